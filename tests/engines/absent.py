"""On a machine without a GPU, stands for what SGLang imports and no wheel gives a CPU: sgl_kernel's names, which raise
when they are called, and the operators whose names torchvision's build for CUDA asks for. To be imported first."""

import importlib.machinery
import sys
import types

import torch


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*arguments, **options):
            raise RuntimeError(f"{self.__name__}.{name} is not here")

        return absent


if "sgl_kernel" not in sys.modules:
    kernels = Module("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    sys.modules["sgl_kernel"] = kernels
    if torch.version.cuda is None:
        operators = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
