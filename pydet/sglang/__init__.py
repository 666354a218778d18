"""pydet in SGLang: its linear layers, norms, rotary embedding, activations, attention, log-probabilities and sampler.

The function :func:`register` is an entry point of the group ``sglang.srt.plugins``, which SGLang calls in each of its
processes. It does nothing unless the environment variable ``PYDET_SGLANG`` asks::

    PYDET_SGLANG=1 sglang serve --model-path MODEL --model-impl transformers --attention-backend pydet \\
        --disable-cuda-graph

or :func:`enable` is called before the engine is made. From then on the log-probabilities of the engine are those of
the model of Transformers that :func:`pydet.torch.convert` made, bit for bit, alone and in any batch. What pydet would
not compute is refused, with a sentence, when the model is loaded.
"""

from __future__ import annotations

import os

from pydet import plugins
from pydet._native import UNSUPPORTED, Error, fail
from pydet.ops import Arithmetic
from pydet.plugins import Settings

VARIABLE = "PYDET_SGLANG"
VERSIONS = ("0.5.23",)  # whose modules were read and run


def parse(text: str) -> Settings | None:
    """:func:`pydet.plugins.parse`, of ``PYDET_SGLANG``."""
    return plugins.parse(text, VARIABLE)


def prepare() -> None:
    """Prepares this process where ``PYDET_SGLANG`` asks for it, and does nothing elsewhere.

    Raises:
        Error: the variable holds what is no setting, or SGLang is of a version that pydet does not know.
    """
    settings = parse(os.environ.get(VARIABLE, ""))
    if settings is None:
        return
    try:
        from sglang.version import __version__ as version
    except ImportError as problem:
        fail(UNSUPPORTED, f"pydet.sglang: {VARIABLE} is set, and SGLang is not here ({problem})")
    plugins.known("pydet.sglang", "SGLang", str(version), VERSIONS, VARIABLE)
    from pydet.sglang.engine import install

    install(settings)


def register() -> None:
    """SGLang's entry point: :func:`prepare`. What it raises ends the process.

    SGLang logs what a plugin raises and goes on without it; a server that was asked for pydet and computes without it
    would say nothing of that.

    Raises:
        SystemExit: with the sentence of the error.
    """
    try:
        prepare()
    except (Error, ImportError, AttributeError) as problem:
        raise SystemExit(str(problem)) from problem


def enable(
    *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None, kv_chunk: int = 1024, strict: bool = True
) -> None:
    """Asks for pydet in the engines that this process makes from now on, and in their processes.

    It sets ``PYDET_SGLANG``, which they inherit, and calls :func:`prepare`. Where an engine's processes are others' (on
    other hosts, by Ray) the variable must be set for them.

    Args:
        arithmetic, k_chunk, kv_chunk, strict: of :class:`pydet.plugins.Settings`.

    Raises:
        Error: as :func:`prepare`.
    """
    text = str(Settings(arithmetic, k_chunk, kv_chunk, strict))
    parse(text)
    os.environ[VARIABLE] = text
    prepare()
