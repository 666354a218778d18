"""pydet in vLLM: its linear layers, norms, rotary embedding, activations, attention, log-probabilities and sampler.

The function :func:`register` is an entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its
processes. It does nothing unless the environment variable ``PYDET_VLLM`` asks::

    PYDET_VLLM=1 vllm serve MODEL --enforce-eager --model-impl transformers

or :func:`enable` is called before the engine is made. From then on the log-probabilities of the engine are those of
the model of Transformers that :func:`pydet.torch.convert` made, bit for bit, alone and in any batch. What pydet would
not compute is refused, with a sentence, when the model is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.hooks import unknown
from pydet.ops import Arithmetic

VARIABLE = "PYDET_VLLM"
VERSIONS = ("0.32.0",)  # whose modules were read and run


@dataclass(frozen=True)
class Settings:
    """What decides bits, and whether a model of which something is left is refused.

    Attributes:
        arithmetic, k_chunk: as in :func:`pydet.torch.convert`.
        kv_chunk: as in :func:`pydet.torch.register_attention`.
        strict: refuse a model of which a module is left; otherwise a warning names what is left.
    """

    arithmetic: Arithmetic = "auto"
    k_chunk: int | None = None
    kv_chunk: int = 1024
    strict: bool = True

    def __str__(self) -> str:
        """What the environment variable holds for these."""
        given = {x.name: value for x in fields(self) if (value := getattr(self, x.name)) != x.default}
        return ",".join(f"{name}={int(x) if isinstance(x, bool) else x}" for name, x in given.items()) or "1"


def parse(text: str) -> Settings | None:
    """The settings that the environment variable asks for; None where it asks for nothing.

    ``""`` and ``"0"``: nothing. ``"1"``: the defaults. Otherwise ``name=value`` of :class:`Settings`, with commas
    between: ``"arithmetic=sm90,kv_chunk=512,strict=0"``.
    """
    if text in ("", "0"):
        return None
    given: dict[str, str | int | bool] = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if name == "arithmetic" and equals:
            given[name] = value
        elif name in ("k_chunk", "kv_chunk") and value.isdecimal():
            given[name] = int(value)
        elif name == "strict" and value in ("0", "1"):
            given[name] = value == "1"
        else:
            fail(
                INVALID_VALUE,
                f"{VARIABLE}: {part!r} is no setting, want 0, 1, or arithmetic=NAME, k_chunk=NUMBER, kv_chunk=NUMBER "
                "and strict=0 or strict=1 with commas between",
            )
    settings = Settings(**given)  # type: ignore[arg-type]
    unknown(settings.arithmetic, VARIABLE, "arithmetic")
    if settings.k_chunk == 0:
        fail(INVALID_VALUE, f"{VARIABLE}: k_chunk is 0, want a positive number")
    if settings.kv_chunk <= 0 or settings.kv_chunk % 128:
        fail(INVALID_VALUE, f"{VARIABLE}: kv_chunk is {settings.kv_chunk}, want a positive multiple of 128")
    return settings


def register() -> None:
    """vLLM's entry point: prepares this process where ``PYDET_VLLM`` asks for it, and does nothing elsewhere.

    Raises:
        Error: the variable holds what is no setting, or vLLM is of a version that pydet does not know.
    """
    settings = parse(os.environ.get(VARIABLE, ""))
    if settings is None:
        return
    try:
        from vllm.version import __version__ as version
    except ImportError as problem:
        fail(UNSUPPORTED, f"pydet.vllm: {VARIABLE} is set, and vLLM is not here ({problem})")
    if str(version).partition("+")[0] not in VERSIONS:
        fail(
            UNSUPPORTED,
            f"pydet.vllm: vLLM is {version}, want {' or '.join(VERSIONS)}: of another version it is not known what "
            f"computes where; unset {VARIABLE} to run it without pydet",
        )
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        fail(
            UNSUPPORTED,
            "pydet.vllm: VLLM_USE_V2_MODEL_RUNNER is "
            f"{os.environ['VLLM_USE_V2_MODEL_RUNNER']}, want 0: the second runner has a sampler of its own",
        )
    from pydet.vllm.engine import install

    install(settings)


def enable(
    *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None, kv_chunk: int = 1024, strict: bool = True
) -> None:
    """Asks for pydet in the engines that this process makes from now on, and in their processes.

    It sets ``PYDET_VLLM``, which they inherit, and calls :func:`register`. Where an engine's processes are others' (on
    other hosts, by Ray) the variable must be set for them.

    Args:
        arithmetic, k_chunk, kv_chunk, strict: of :class:`Settings`.

    Raises:
        Error: as :func:`register`.
    """
    text = str(Settings(arithmetic, k_chunk, kv_chunk, strict))
    parse(text)
    os.environ[VARIABLE] = text
    register()
