"""A platform by which verl runs on a CPU, which it has none for: what its FSDP engine asks of one."""

import contextlib

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform


class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu
    is_available = current_device = device_count = set_device = synchronize = manual_seed = manual_seed_all = None
    set_allocator_settings = empty_cache = get_device_capability = communication_backend_name = None
    visible_devices_envvar = nvtx_range = profiler_start = profiler_stop = ray_resource_name = None
    ray_noset_envvars = is_ipc_supported = cudart = None


def nothing(self, *arguments, **options):
    return None


for name in (
    *("set_device", "synchronize", "manual_seed", "manual_seed_all", "set_allocator_settings", "empty_cache"),
    *("profiler_start", "profiler_stop", "cudart"),
):
    setattr(Cpu, name, nothing)
Cpu.is_available = lambda self: True
Cpu.current_device = lambda self: "cpu"
Cpu.device_count = lambda self: 1
Cpu.get_device_capability = lambda self, device_index=0: (None, None)
Cpu.communication_backend_name = lambda self: "gloo"
Cpu.visible_devices_envvar = lambda self: "NO_DEVICES"
Cpu.nvtx_range = lambda self, msg: contextlib.nullcontext()
Cpu.ray_resource_name = lambda self: "CPU"
Cpu.ray_noset_envvars = lambda self: []
Cpu.is_ipc_supported = lambda self: False
set_platform(Cpu())
