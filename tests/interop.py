"""Tensors that are no NumPy arrays: the frameworks, where they are installed, and hand-made DLPack producers."""

import ctypes
import importlib
import importlib.util

import pytest

from capi import ffi


@pytest.fixture
def torch(need):
    need(importlib.util.find_spec("torch"), "torch", "PyTorch is not installed")
    return importlib.import_module("torch")


@pytest.fixture
def jax(need):
    need(importlib.util.find_spec("jax"), "jax", "JAX is not installed")
    return importlib.import_module("jax")


# ---- DLPack producers ----------------------------------------------------------------------------------------------

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):  # DLManagedTensor
    _fields_ = [("tensor", ctypes.c_byte * 48), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", DELETER), ("flags", ctypes.c_uint64), ("tensor", ctypes.c_byte * 48)]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.PyDLL(None).PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
_names = {False: b"dltensor", True: b"dltensor_versioned"}


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule):  # a capsule that nobody took over frees what it holds, as the protocol asks
    for versioned, name in _names.items():
        if _is_valid(capsule, name):
            managed = (Versioned if versioned else Unversioned).from_address(_pointer(capsule, name))
            managed.deleter(ctypes.addressof(managed))


class Producer:
    """Offers a capi.Tensor by DLPack. `live` counts the capsules whose tensor has not been freed; freeing twice fails."""

    def __init__(self, tensor, *, versioned=False, major=1, flags=0, old_signature=False):
        self.tensor, self.versioned, self.major, self.flags = tensor, versioned, major, flags
        self.live, self.made, self.freed_twice = {}, 0, 0
        self.asked = []
        if old_signature:  # from before max_version: the keyword is a TypeError
            self.__class__ = OldProducer

    def __dlpack_device__(self):
        return self.tensor.c.device.device_type, self.tensor.c.device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append({"stream": stream, "max_version": max_version})
        return self.capsule()

    def capsule(self):
        managed = Versioned() if self.versioned else Unversioned()
        if self.versioned:
            managed.major, managed.minor, managed.flags = self.major, 0, self.flags
        ctypes.memmove(managed.tensor, int(ffi.cast("uintptr_t", self.tensor.c)), 48)
        address = ctypes.addressof(managed)

        def delete(given):
            if self.live.pop(given, None) is None:
                self.freed_twice += 1

        managed.deleter = DELETER(delete)
        self.live[address] = (managed, self.tensor)
        self.made += 1
        return _new(address, _names[self.versioned], ctypes.cast(_drop, ctypes.c_void_p))


class OldProducer(Producer):
    def __dlpack__(self, stream=None):
        self.asked.append({"stream": stream})
        return self.capsule()
