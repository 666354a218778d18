"""sample and topk in PyTorch: the bits of pydet's functions, compiled too; no gradient of a token."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pydet  # noqa: E402
import pydet.torch  # noqa: E402

OPTIONS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def rows(dtype=torch.float32, shape=(3, 4, 100)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x, *torch.randint(-(2**40), 2**40, (2, *shape[:-1]), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_functions_are_pydets(dtype):
    x, seed, position = rows(dtype)
    wanted = pydet.sample(x, seed, position, **OPTIONS)
    for got, want in zip(pydet.torch.sample(x, seed, position, **OPTIONS), wanted, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype
    of_rows = {name: torch.full(seed.shape, value) for name, value in OPTIONS.items()}
    for got, want in zip(pydet.torch.sample(x, seed, position, **of_rows), wanted, strict=True):
        assert torch.equal(got, want)
    turned = x.swapaxes(0, 1), seed.swapaxes(0, 1), position.swapaxes(0, 1)  # strides that the library does not walk
    assert torch.equal(pydet.torch.sample(*turned, **OPTIONS)[0], wanted[0].swapaxes(0, 1))
    for got, want in zip(pydet.torch.topk(x, 7), torch.topk(x.float(), 7), strict=True):
        assert got.dtype in (dtype, torch.int64) and (dtype != torch.float32 or torch.equal(got, want))
    assert torch.equal(pydet.torch.topk(x, 7)[1], pydet.topk(x, 7)[1])


def test_compiled_it_has_the_same_tokens():
    x, seed, position = rows()
    function = lambda x, seed, position: pydet.torch.sample(x, seed, position, **OPTIONS)
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for got, want in zip(compiled(x, seed, position), function(x, seed, position), strict=True):
        assert torch.equal(got, want)
    ranked = torch.compile(lambda x: pydet.torch.topk(x, 5), backend="eager", fullgraph=True)
    assert torch.equal(ranked(x)[1], pydet.topk(x, 5)[1])
    for operator, given in (("sample", (x, seed, position)), ("topk", (x, 5))):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.pydet, operator).default, given, test_utils=checks)


def test_shapes_without_memory():
    x, whole = torch.empty(2, 5, 9, device="meta"), torch.empty(2, 5, dtype=torch.int64, device="meta")
    token, *log_probs = torch.ops.pydet.sample(x, whole, whole)
    assert token.shape == (2, 5) and token.dtype == torch.int64 and all(p.dtype == torch.float32 for p in log_probs)
    values, index = torch.ops.pydet.topk(x.bfloat16(), 3)
    assert values.shape == index.shape == (2, 5, 3) and values.dtype == torch.bfloat16 and index.dtype == torch.int64
    with pytest.raises(pydet.Error, match="seed is float32, want int32 or int64"):
        torch.ops.pydet.sample(x, whole.float(), whole)
    with pytest.raises(pydet.Error, match="position is 5x2, want 2x5"):
        torch.ops.pydet.sample(x, whole, whole.T)
    with pytest.raises(pydet.Error, match="k is 10, want 1 to the 9 elements of a row"):
        torch.ops.pydet.topk(x, 10)


def test_gradients():
    x, seed, position = rows()
    x.requires_grad_()
    assert not pydet.torch.sample(x, seed, position)[1].requires_grad
    values, index = pydet.torch.topk(x, 3)
    values.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x).scatter(-1, index, 1.0))
    with pytest.raises(pydet.Error, match="sample: an operand requires grad, and this has no gradient"):
        torch.ops.pydet.sample(x, seed, position)


def test_forward_mode_of_topk():
    x, *_ = rows()
    values, tangent = torch.func.jvp(lambda x: pydet.torch.topk(x, 3)[0], (x,), (2 * x,))
    assert values.any() and torch.equal(tangent, 2 * values)


def test_vmap_of_topk():
    x, *_ = rows()
    assert np.array_equal(torch.vmap(lambda x: torch.ops.pydet.topk(x, 4)[1])(x), pydet.topk(x, 4)[1])


def test_vmap_of_sample():
    """In one call: PyTorch makes many, and warns, of an operator without a rule."""
    x, seed, position = rows()
    heat = torch.tensor([0.5, 1.0, 2.0])[:, None].expand(3, 4).contiguous()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        of_rows = torch.vmap(torch.vmap(lambda *given: pydet.torch.sample(*given, **OPTIONS)))(x, seed, position)
        of_seeds = torch.vmap(lambda seed: pydet.torch.sample(x[0], seed, position[0]))(seed)
        of_heat = torch.vmap(lambda x, heat: pydet.torch.sample(x, seed[0], position[0], temperature=heat), (1, 0))(
            x.movedim(0, 1), heat
        )
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    for got, want in (
        (of_rows, pydet.sample(x, seed, position, **OPTIONS)),
        (of_seeds, pydet.sample(x[:1].expand(3, 4, 100), seed, position[:1].expand(3, 4).contiguous())),
        (of_heat, pydet.sample(x, *(y[:1].expand(3, 4).contiguous() for y in (seed, position)), temperature=heat)),
    ):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
