"""pydet.torch.AdamW: the formula of NUMERICS.md word by word, whatever the width, the threads and the layout."""

import copy
import math
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import numpy as np  # noqa: E402

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from pydet.torch.optimizer import exact_sqrt  # noqa: E402
from torch_bits import differ, normal, same  # noqa: E402

HOW = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def by_formula(w, gradients, lr, betas, eps, weight_decay):
    """w, m and v in NumPy, whose operations in fp32 are IEEE 754's."""
    f = np.float32
    w, m, v, powers = w.numpy(), np.zeros_like(w), np.zeros_like(w), [1.0, 1.0]
    for g in (x.numpy() for x in gradients):
        powers = [power * beta for power, beta in zip(powers, betas, strict=True)]
        m = f(betas[0]) * m + f(1 - betas[0]) * g
        v = f(betas[1]) * v + (f(1 - betas[1]) * g) * g
        d = np.sqrt(v) * f(1 / math.sqrt(1 - powers[1])) + f(eps)
        w = w * f(1 - lr * weight_decay) - (f(lr / (1 - powers[0])) * m) / d
    assert w.dtype == m.dtype == v.dtype == np.float32
    return [torch.from_numpy(x) for x in (w, m, v)]


def run(start, gradients, optimizer=pt.AdamW, **how):
    p = torch.nn.Parameter(start.clone())
    adam = optimizer([p], **(HOW | how))
    for g in gradients:
        p.grad = g.clone()
        adam.step()
    return p.detach(), adam


@pytest.mark.parametrize("count", (1, 7, 8, 15, 16, 17, 33, 257, 100003))
def test_the_formula(count):
    """At widths beside those of vectors, on one thread and on two; and PyTorch's AdamW has other bits."""
    start, gradients = normal(count, seed=1), [normal(count, seed=s) for s in (2, 3, 4)]
    gradients[1][0], gradients[2][-1] = 1e-30, 1e30  # a square that underflows, and one that overflows
    mine, adam = run(start, gradients)
    (state,) = adam.state.values()
    with np.errstate(over="ignore", under="ignore"):
        want = by_formula(start, gradients, **HOW)
    for x, y in zip((mine, state["exp_avg"], state["exp_avg_sq"]), want, strict=True):
        same(x, y)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        same(run(start, gradients)[0], mine)
    finally:
        torch.set_num_threads(before)
    if count > 100:
        other, _ = run(start, gradients, torch.optim.AdamW)
        differ(other, mine)
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(other[1:-1], mine[1:-1], rtol=1e-5, atol=1e-6)


def test_the_root_is_rounded_to_nearest():
    """PyTorch's own is not, on some machines: a formula with it would have other bits there."""
    x = torch.cat([torch.rand(300001), torch.rand(1000) * 2.0**-130, torch.tensor([0.0, 1.0, 3e38, 2.0**-149])])
    same(exact_sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))
    near = torch.arange(1, 4097, dtype=torch.float32)  # roots of squares, and of their neighbours
    for y in (near * near, torch.nextafter(near * near, near * 0), torch.nextafter(near * near, near * 1e9)):
        same(exact_sqrt(y), torch.from_numpy(np.sqrt(y.numpy())))


def test_an_element_depends_on_its_own_gradients_alone():
    start, gradients = normal(40, 24, seed=1), [normal(40, 24, seed=s) for s in (2, 3)]
    mine, _ = run(start, gradients)
    same(run(start.t(), [g.t() for g in gradients])[0], mine.t())
    for rows in (slice(0, 13), slice(13, 40)):
        same(run(start[rows], [g[rows] for g in gradients])[0], mine[rows])
    same(run(start[:, 1::2], [g[:, 1::2] for g in gradients])[0], mine[:, 1::2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_the_bits_of_the_cpu():
    start, gradients = normal(100003, seed=1), [normal(100003, seed=s) for s in (2, 3, 4)]
    gradients[1][0], gradients[2][-1] = 1e-30, 1e30
    same(run(start.cuda(), [g.cuda() for g in gradients])[0].cpu(), run(start, gradients)[0])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_parameters_of_two_bytes_follow_a_copy_in_float32(dtype):
    start, gradients = normal(300, seed=1).to(dtype), [normal(300, seed=s) * 1e-2 for s in range(2, 8)]
    p = torch.nn.Parameter(start.clone())
    adam = pt.AdamW([p], **HOW)
    for g in gradients:
        p.main_grad = g
        adam.step()
    same(adam.state[p]["master"], run(start.float(), gradients)[0])
    same(p.detach(), adam.state[p]["master"].to(dtype))
    adam.zero_grad()
    assert not p.main_grad.any() and p.grad is None


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_checkpoint_goes_on_with_the_same_bits(dtype, tmp_path):
    start, gradients = normal(50, seed=1).to(dtype), [normal(50, seed=s).to(dtype) for s in range(2, 8)]
    whole, _ = run(start, gradients)
    half, adam = run(start, gradients[:3])
    torch.save(adam.state_dict(), tmp_path / "adam.pt")
    p = torch.nn.Parameter(half.clone())
    other = pt.AdamW([p], lr=1.0)
    other.load_state_dict(torch.load(tmp_path / "adam.pt"))
    assert all(x.dtype == torch.float32 for x in other.state[p].values() if isinstance(x, torch.Tensor))
    twin = copy.deepcopy(other)
    for optimizer in (other, twin):
        (own,) = optimizer.param_groups[0]["params"]
        for g in gradients[3:]:
            own.grad = g.clone()
            optimizer.step()
        same(own.detach(), whole)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_that_are_loaded_between_steps_are_where_it_goes_on(dtype):
    """As of an earlier checkpoint: the float32 copy of what was before is not what trains on."""
    start, (g, h) = normal(50, seed=1).to(dtype), [normal(50, seed=s).to(dtype) for s in (2, 3)]
    p, loaded = torch.nn.Parameter(start.clone()), normal(50, seed=4).to(dtype)
    adam = pt.AdamW([p], **(HOW | {"betas": (0.0, 0.0), "weight_decay": 0.0}))
    p.grad = g
    adam.step()
    loaded[:7] = p.detach()[:7]  # of these the float32 copy stays
    kept = adam.state[p]["master"][:7].clone() if dtype != torch.float32 else loaded[:7]
    p.data.copy_(loaded)
    p.grad = h
    adam.step()
    again = torch.nn.Parameter(torch.cat([kept, loaded[7:].float()]))
    other = pt.AdamW([again], **(HOW | {"betas": (0.0, 0.0), "weight_decay": 0.0}))
    again.grad = h.float()
    other.step()
    same(p.detach(), again.detach().to(dtype))


def test_a_state_of_another_optimizer_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    theirs, mine = torch.optim.AdamW([p]), pt.AdamW([p])
    p.grad = torch.ones(3)
    theirs.step()
    with pytest.raises(pydet.Error, match=r"^AdamW: a state has no beta1_power, want that of a pydet\.torch\.AdamW"):
        mine.load_state_dict(theirs.state_dict())
    assert not mine.state
    with pytest.raises(pydet.Error, match=r"^AdamW: amsgrad is True, want it left out"):
        mine.load_state_dict(torch.optim.AdamW([p], amsgrad=True).state_dict())
    mine.load_state_dict(torch.optim.AdamW([p]).state_dict())


def test_clipping_in_one_process():
    """Without a process group, as a loop on one device has it."""
    from pydet.torch.distributed import clip_grad_norm_

    one, other = torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.zeros(3, 5))
    one.main_grad, other.grad = normal(7, seed=1), normal(3, 5, seed=2)
    want = torch.cat([one.main_grad, other.grad.flatten()])
    norm = clip_grad_norm_([one, other], 0.5)
    torch.testing.assert_close(norm, want.norm())
    torch.testing.assert_close(torch.cat([one.main_grad, other.grad.flatten()]), want * (0.5 / want.norm()))


def test_what_it_refuses():
    p = torch.nn.Parameter(torch.zeros(3))
    for options, words in (
        ({"lr": -1.0}, r"^AdamW: lr is -1.0, want a finite number of 0 or more"),
        ({"eps": float("nan")}, r"^AdamW: eps is nan"),
        ({"weight_decay": float("inf")}, r"^AdamW: weight_decay is inf"),
        ({"betas": (0.9, 1.0)}, r"^AdamW: betas is \(0.9, 1.0\), want two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, r"^AdamW: betas is \(0.9,\), want two numbers"),
        ({"betas": 0.9}, r"^AdamW: betas is 0.9, want two numbers"),
        ({"lr": 1e39}, r"^AdamW: lr is 1e\+39, want a finite number of 0 or more in float32"),
        ({"lr": "1e-3"}, r"^AdamW: lr is 1e-3, want a finite number"),
    ):
        with pytest.raises(pydet.Error, match=words):
            pt.AdamW([p], **options)
    for name in ("amsgrad", "maximize"):
        with pytest.raises(pydet.Error, match=f"^AdamW: {name} is True, want it left out: the formula has"):
            pt.AdamW([{"params": [p], name: True}])
    with pytest.raises(
        pydet.Error, match=r"^AdamW: a group has learning_rate, want lr, betas, eps, weight_decay alone"
    ):
        pt.AdamW([{"params": [p], "learning_rate": 3}])
    for name, value in {"fused": True, "foreach": True, "decoupled_weight_decay": False}.items():
        with pytest.raises(pydet.Error, match=f"^AdamW: {name} is {value}, want it left out"):
            pt.AdamW([p]).add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))], name: value})
    pt.AdamW([{"params": [("w", p)], "initial_lr": 1.0, "fused": None}], lr=0.1)
    p.main_grad = torch.zeros(4)
    with pytest.raises(pydet.Error, match=r"^AdamW: a gradient is torch.float32 \(4,\), want .* of \(3,\)"):
        pt.AdamW([p]).step()
    p.main_grad = None
    p.grad = torch.zeros(3).to_sparse()
    with pytest.raises(pydet.Error, match=r"^AdamW: a gradient is sparse"):
        pt.AdamW([p]).step()
    wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    wide.grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(pydet.Error, match=r"^AdamW: a parameter is torch.float64"):
        pt.AdamW([wide]).step()
    assert not wide.any()
