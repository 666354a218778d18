"""Warns where Inductor, torch.compile's usual backend, will leave out roundings between the steps that it fuses."""

from __future__ import annotations

import sys
import warnings

_RECIPE = 'torch.compile(model, options={"emulate_precision_casts": True})'


def warn_of_fusion() -> None:
    """Called while an operator of pydet's is traced: its bits are safe, those of what is fused around it are not.

    Inductor keeps fp32 between element-wise steps that it fuses, where eager mode rounds to bfloat16 or float16, and
    contracts products and sums; what it fuses may change with the shapes. With emulate_precision_casts it does neither;
    its own formulas stay other than PyTorch's, in fp32 those of cos, sin, tanh-GELU and the gradient of silu, where a
    model has them as functions in its code; convert makes those of modules pydet's.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    inductor = sys.modules.get("torch._inductor.config")
    try:
        backend = dynamo.InstructionTranslator.current_tx().output.compiler_fn  # type: ignore[union-attr]
    except AttributeError:  # nothing is being traced, or by a release that is built otherwise
        return
    backend = getattr(backend, "_torchdynamo_orig_backend", backend)
    if getattr(backend, "compiler_name", None) != "inductor":
        return
    options = getattr(backend, "config", None) or {}
    emulated = options.get("emulate_precision_casts", getattr(inductor, "emulate_precision_casts", False))
    if not emulated:
        warnings.warn(
            "pydet.torch: torch.compile will fuse element-wise steps without the roundings between them, so that bits "
            f"may differ from eager mode's and vary with the batch; use {_RECIPE}",
            stacklevel=2,
        )
