"""Tensors that PyTorch's tests draw, the comparison of their results word by word, and attention for a whole model."""

import pytest
import torch


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def words(x):
    return x.detach().contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    assert torch.equal(words(a), words(b)), f"{int((words(a) != words(b)).sum())} of {a.numel()} elements differ"


def differ(a, b):
    with pytest.raises(AssertionError, match="elements differ"):
        same(a, b)


def give_attention(model, name="pydet"):
    """To a model of Transformers, and to its parts that versions before 5.20 pass by."""
    for part in model.modules():
        if hasattr(part, "set_attn_implementation") and part._can_set_attn_implementation():
            part.set_attn_implementation(name)
