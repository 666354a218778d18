"""Tensors that are no NumPy arrays: the frameworks, where they are installed, and hand-made DLPack producers."""

import ctypes
import gc
import importlib
import importlib.util
import os
import sys

import pytest

from capi import ffi


@pytest.fixture
def torch(need):
    need(importlib.util.find_spec("torch"), "torch", "PyTorch is not installed")
    return importlib.import_module("torch")


@pytest.fixture
def jax(need):
    need(importlib.util.find_spec("jax"), "jax", "JAX is not installed")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves a GPU's memory to the other tests
    module = importlib.import_module("jax")
    with module.default_device(module.devices("cpu")[0]):  # also where there is a GPU
        yield module


# ---- DLPack producers ----------------------------------------------------------------------------------------------

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):  # DLManagedTensor
    _fields_ = [("tensor", ctypes.c_byte * 48), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", ctypes.c_byte * 48),
    ]


_new = ctypes.pythonapi["PyCapsule_New"]
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
made, _freed = [], []  # producers, which outlive whoever looks at their capsules; addresses whose deleter was called


@DELETER
def _delete(address):
    _freed.append(address)


class Producer:
    """Offers a capi.Tensor by DLPack. It keeps its capsules, and `asked`, the keywords of each request. With `old`,
    it is from before max_version, and that keyword is a TypeError."""

    def __init__(self, tensor, *, versioned=False, major=1, flags=0, old=False):
        self.tensor, self.versioned, self.major, self.flags, self.old = tensor, versioned, major, flags, old
        self.asked, self.kept = [], []
        self.name = b"dltensor_versioned" if versioned else b"dltensor"

    def __dlpack_device__(self):
        return self.tensor.c.device.device_type, self.tensor.c.device.device_id

    def __dlpack__(self, **keywords):
        if self.old and set(keywords) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.asked.append(keywords)
        return self.capsule()

    def capsule(self):
        managed = Versioned() if self.versioned else Unversioned()
        if self.versioned:
            managed.major, managed.flags = self.major, self.flags
        ctypes.memmove(managed.tensor, int(ffi.cast("uintptr_t", self.tensor.c)), 48)
        managed.deleter = _delete
        capsule = _new(ctypes.addressof(managed), self.name, None)
        self.kept.append((capsule, managed))
        made.append(self)
        return capsule

    def all_given_back(self):
        """Each capsule was looked at and let go of: it has its name, nobody holds it or called its deleter."""
        let_go = lambda: all(sys.getrefcount(capsule) <= 3 for capsule, _ in self.kept)
        if not let_go():
            gc.collect()  # an exception may hold one in a cycle
        return let_go() and all(
            _name_of(capsule) == self.name and ctypes.addressof(managed) not in _freed for capsule, managed in self.kept
        )
