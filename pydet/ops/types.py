"""The arguments that operations have alike, as types, and what the library was built as."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

from pydet._native import constants

Tensor = TypeVar("Tensor")  # of the caller's framework; so are the results
Arithmetic: TypeAlias = Literal["auto", "ieee", "sm90", "sm80", "cdna3", "cdna2"]
Mode: TypeAlias = Literal["deterministic", "fast"]
Order: TypeAlias = Literal["ordered", "tree"]
Granularity: TypeAlias = Literal["row", "group", "block", "tensor"]
Stream: TypeAlias = Any

ABI: int = constants.PYDET_ABI
NUMERICS: int = constants.PYDET_NUMERICS
ADAMW_TENSORS: int = constants.PYDET_ADAMW_TENSORS
DWEIGHT_ROWS: int = constants.PYDET_DWEIGHT_ROWS
FOLD_PARTS: int = constants.PYDET_FOLD_PARTS
__version__ = ".".join(str(getattr(constants, f"PYDET_VERSION_{part}")) for part in ("MAJOR", "MINOR", "PATCH"))
