"""What an NVIDIA GPU's clock and power are while it works, by NVML."""

import ctypes

import torch


class Meter:
    def __init__(self):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.handle)):
            raise SystemExit("NVML does not know the device")

    def read(self, function, number, *arguments):
        if code := getattr(self.nvml, function)(self.handle, *arguments, ctypes.byref(number)):
            raise SystemExit(f"NVML: {function} gives error {code}")
        return number.value

    def mhz(self):
        """The SM clock."""
        sm = 1
        return self.read("nvmlDeviceGetClockInfo", ctypes.c_uint(), sm)

    def joules(self):
        """Since the driver was loaded."""
        return self.read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3
