"""What an NVIDIA GPU's clock and power are while it works, by NVML, and work that goes on until they have settled."""

import ctypes
import statistics
import time

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


def sustained(graph, replays, meter):
    """(seconds of a replay, MHz, W) of the last two thirds of so many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    settled = replays // 3
    for i in range(replays):
        if i == settled:
            begin.record()
        graph.replay()
    end.record()
    begin.synchronize()
    clocks, start, joules = [], time.perf_counter(), meter.joules()
    while not end.query():
        clocks.append(meter.mhz())
        time.sleep(0.005)
    watts = (meter.joules() - joules) / (time.perf_counter() - start)
    return begin.elapsed_time(end) / 1e3 / (replays - settled), statistics.fmean(clocks or [meter.mhz()]), watts
