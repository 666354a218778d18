"""Rotary embeddings on an NVIDIA GPU: the CPU's bits, and those of a converted model's."""

import importlib.util

import numpy as np
import pytest

import pydet
import test_rotary as rotary
from cases import DTYPES, assert_same_bits, data
from test_cuda import device, each, torch  # noqa: F401


@each("rotary_table")
def test_the_table(device, kernel, dtype):
    """The CPU's cases; places 0 to 1,000,000; more numbers than a launch has of 32 bits' blocks in its way."""
    rotary.check_table(device, dtype)
    places = np.arange(0, 1_000_001, 11)
    for n, twice in ((64, True), (1, False), (33, True)):
        options = {"twice": twice, "out_dtype": DTYPES[dtype]}
        want = pydet.rotary_table(places[: 1 << 14], rotary.frequencies_of(n), **options)
        got = device.rotary_table(places, rotary.frequencies_of(n), **options)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours[: 1 << 14], theirs)
    assert device.refused == 0


@each("rotary")
def test_heads(device, kernel, dtype):
    rotary.check_heads(device, dtype)
    for tokens, heads, groups, n in ((1, 32, 8, 128), (700, 32, 8, 128), (65, 16, 16, 64), (33, 8, 1, 256)):
        q, k = (data("normal", (tokens, h, n), DTYPES[dtype], h) for h in (heads, groups))
        cos, sin = pydet.rotary_table(np.arange(tokens), rotary.frequencies_of(n // 2), out_dtype=DTYPES[dtype])
        for how in ({}, {"neighbours": True}, {"transposed": True, "in_fp32": True}, {"out_neighbours": True}):
            want, got = pydet.rotary(q, k, cos, sin, **how), device.rotary(q, k, cos, sin, **how)
            for ours, theirs in zip(got, want, strict=True):
                assert_same_bits(ours, theirs, f"{tokens} tokens, {heads} and {groups} heads of {n}, {how}")
    device.dtype = dtype
    rotary.test_strides_and_tables_that_are_shared(device)
    assert device.refused == 0


def test_a_converted_model_turns_as_on_the_cpu(torch):
    """Logits and gradients by rotary are those of the composition; its table is the CPU's; also in a CUDA graph."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("no Transformers here")
    import transformers

    import pydet.torch as pt
    from pydet.torch import rotations

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, head_dim=16, **sizes)
    pt.register_attention()
    ids, found = torch.arange(3, 40)[None], []
    for native in (True, False):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.set_attn_implementation("pydet")
        pt.convert(model)
        if not native:
            for module in model.modules():
                if (kind := rotations.turned_from(type(module))) is not None:
                    module.__class__ = kind
        table = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), ids)
        model.cuda()
        logits = model(ids.cuda(), use_cache=False).logits
        logits.float().square().sum().backward()
        on_card = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16, device="cuda"), ids.cuda())
        for ours, theirs in zip(on_card, table, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        found.append([logits, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and bool(one.any())
