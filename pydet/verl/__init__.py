"""pydet in verl: the models that its FSDP engine trains, their log-probabilities and entropies.

The module :mod:`pydet.verl.plugin` is an entry point of the group ``verl.plugins``, which verl imports in each of its
processes. It does nothing unless the environment variable ``PYDET_VERL`` asks. Then actor and reference are the models
that :func:`pydet.torch.convert` made, and the log-probabilities of a token do not depend on its micro-batch, nor on
whether padding was removed. They are those of rollouts by :mod:`pydet.vllm`, :mod:`pydet.sglang` and
:func:`pydet.torch.continuous_batching`. What pydet would not compute is refused, with a sentence.
"""

from __future__ import annotations

import os
import sys

from pydet import plugins
from pydet._native import Error
from pydet.ops import Arithmetic
from pydet.plugins import Settings

VARIABLE = "PYDET_VERL"
ROLLOUTS = ("PYDET_VLLM", "PYDET_SGLANG")
VERSIONS = ("0.9.1",)  # whose modules were read and run


def parse(text: str) -> Settings | None:
    """:func:`pydet.plugins.parse`, of ``PYDET_VERL``."""
    return plugins.parse(text, VARIABLE)


def prepare() -> None:
    """Prepares this process where ``PYDET_VERL`` asks for it, and does nothing elsewhere. verl is being imported.

    ``PYDET_VLLM`` and ``PYDET_SGLANG`` are set to the same settings where they are not set, for the rollouts' engines.

    Raises:
        Error: the variable holds what is no setting, or verl is of a version that pydet does not know.
    """
    text = os.environ.get(VARIABLE, "")
    settings = parse(text)
    if settings is None:
        return
    version = getattr(sys.modules.get("verl"), "__version__", "not here, or not being imported")
    plugins.known("pydet.verl", "verl", str(version), VERSIONS, VARIABLE)
    for name in ROLLOUTS:
        os.environ.setdefault(name, text)
    from pydet.verl.trainer import install

    install(settings)


def register() -> None:
    """:func:`prepare`. What it raises ends the process: verl would go on without pydet, and say so nowhere.

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
    """Asks for pydet in verl, in this process and those that inherit its environment, before or after it is imported.

    Ray's workers have the environment of their node: there the variable must be set for them
    (``ray_kwargs.ray_init.runtime_env.env_vars``).

    Args:
        arithmetic, k_chunk, kv_chunk, strict: of :class:`pydet.plugins.Settings`.

    Raises:
        Error: as :func:`prepare`.
    """
    text = str(Settings(arithmetic, k_chunk, kv_chunk, strict))
    parse(text)
    os.environ[VARIABLE] = text
    for name in ROLLOUTS:
        os.environ[name] = text
    if "verl" in sys.modules:
        prepare()
