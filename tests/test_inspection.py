"""Tools that walk the modules of a process ask every global for attributes; none of pydet's may raise for that.

vLLM's worker asks each global of each module for ``__dict__``; inspect, doctest and mock ask for ``__wrapped__``.
"""

import importlib
import inspect
import pathlib
import sys

import pytest

import pydet

ASKED = ("__dict__", "__wrapped__", "__code__", "__file__", "__bases__", "__array_interface__", "_a_name_of_nothing")
OPTIONAL = ("torch", "jax", "transformers", "vllm", "sglang", "verl")


def raised(values):
    """(name, attribute, error) of each value that raises anything but AttributeError when it is asked."""
    found = []
    for name, value in values.items():
        for attribute in ASKED:
            try:
                getattr(value, attribute, None)
            except Exception as problem:
                found.append((name, attribute, type(problem).__name__))
    return found


def modules():
    """The names of all modules of the package; __main__ does nothing when it is imported."""
    folder = pathlib.Path(pydet.__file__).parent
    files = [file.relative_to(folder.parent).with_suffix("") for file in sorted(folder.rglob("*.py"))]
    return [".".join(file.parts).removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("name", modules())
def test_globals_can_be_asked_for_any_attribute(name):
    try:
        module = importlib.import_module(name)
    except ImportError as problem:
        assert any(package in str(problem).lower() for package in OPTIONAL), problem
        pytest.skip(str(problem))
    assert not raised(vars(module))
    for value in vars(module).values():
        if callable(value):
            inspect.unwrap(value)
        inspect.getmodule(value)
    assert dict(inspect.getmembers(module))


def test_every_module_in_the_process():
    """Those that importing all of them brought, and the classes in them, one level further down."""
    ours = {name: module for name, module in sys.modules.items() if name == "pydet" or name.startswith("pydet.")}
    assert len(ours) > 10
    for name, module in ours.items():
        classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__.startswith("pydet")]
        for kind in classes:
            assert not raised(dict(vars(kind))), (name, kind)


def test_the_walk_finds_what_raises():
    """The negative control: cffi's object, which was a global once."""
    found = raised({"constants": pydet._native.ffi.dlopen(None)})
    assert ("constants", "__dict__", "error") in found or ("constants", "_a_name_of_nothing", "error") in found, found
