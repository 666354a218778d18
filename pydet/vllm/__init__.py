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

from pydet import plugins
from pydet._native import UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.plugins import Settings

VARIABLE = "PYDET_VLLM"
VERSIONS = ("0.26.0", "0.32.0")  # whose modules were read and run


def parse(text: str) -> Settings | None:
    """:func:`pydet.plugins.parse`, of ``PYDET_VLLM``."""
    return plugins.parse(text, VARIABLE)


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
    plugins.known("pydet.vllm", "vLLM", str(version), VERSIONS, VARIABLE)
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
