"""pydet.torch.AdamW: the formula of NUMERICS.md word by word, whatever the width, the threads and the layout."""

import contextlib
import copy
import math
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import numpy as np  # noqa: E402

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from cases import data  # noqa: E402
from pydet.torch import optimizer as optimizers  # noqa: E402
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


# ---- One call for many parameters ------------------------------------------------------------------------------------


def trained(where, steps=3, count=150, composed=False, compiled=False):
    """Parameters and states of more tensors than two launches take, some by main_grad, one with no gradient."""
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    parameters = []
    for i in range(count):
        x = torch.from_numpy(data("normal", ((5, 7), (300,), (1,), (2049,), (0, 3))[i % 5], np.dtype(np.float32), i))
        parameters.append(torch.nn.Parameter(x.to(kinds[i % 3]).to(where)))
    adam = pt.AdamW(
        [{"params": parameters[:100]}, {"params": parameters[100:], "lr": 0.1, "weight_decay": 0.0}], lr=0.01
    )
    step = torch.compile(adam.step) if compiled else adam.step
    before = optimizers._fuses
    optimizers._fuses = (lambda tensors: False) if composed else before
    try:
        for number in range(steps):
            for i, p in enumerate(parameters):
                g = torch.from_numpy(data("wide", tuple(p.shape), np.dtype(np.float32), 1000 * number + i)).to(where)
                if i % 4 == 0:
                    p.main_grad = g
                elif i != 7 or number:
                    p.grad = g.to(p.dtype)
            step()
    finally:
        optimizers._fuses = before
    return [x.cpu() for p in parameters for x in (p.detach(), *adam.state[p].values()) if isinstance(x, torch.Tensor)]


def same_tensors(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        words = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert x.view(words).equal(y.view(words))


def test_one_call_has_the_bits_of_the_composition():
    """Of parameters of all types, more than a call takes; also where PyTorch compiles the loop."""
    before = pydet.last_kernel()
    want = trained("cpu", composed=True)
    assert pydet.last_kernel() == before
    same_tensors(trained("cpu"), want)
    assert pydet.last_kernel().startswith("cpu_adamw") and len(want) > 3 * 64
    same_tensors(trained("cpu", compiled=True), want)


def composed(monkeypatch):
    monkeypatch.setattr(optimizers, "_fuses", lambda tensors: False)


def calls_of(monkeypatch):
    """How often the library was called, and how often PyTorch's operations were composed."""
    counted = {"fused": 0, "composed": 0}

    def count(name, function):
        def call(*arguments, **options):
            counted[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(optimizers, "adamw", count("fused", optimizers.adamw))
    monkeypatch.setattr(optimizers, "_step_composed", count("composed", optimizers._step_composed))
    return counted


def test_how_many_calls_a_step_is(monkeypatch):
    counted = calls_of(monkeypatch)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(130)]
    adam = pt.AdamW(parameters)
    for p in parameters:
        p.grad = torch.ones(3)
    adam.step()
    assert counted == {"fused": 3, "composed": 0}
    parameters[5].grad = None  # from now on a step behind the others
    adam.step()
    parameters[5].grad = torch.ones(3)
    adam.step()
    assert counted == {"fused": 3 + 3 + 4, "composed": 0}
    assert [adam.state[p]["step"] for p in parameters[4:7]] == [3, 2, 3]
    empty = torch.nn.Parameter(torch.ones(0, 3))
    empty.grad = torch.ones(0, 3)
    other = pt.AdamW([empty, torch.nn.Parameter(torch.ones(2))])
    other.step()
    assert other.state[empty]["step"] == 1 and len(other.state) == 1


def layouts():
    """Parameters, and gradients of each step: what a call of the library takes, and what it leaves to PyTorch."""
    x, g = normal(12, 10, seed=1), [normal(12, 10, seed=s) for s in (2, 3)]
    images = normal(2, 3, 4, 5, seed=4).to(memory_format=torch.channels_last)
    of_images = [normal(2, 3, 4, 5, seed=s).to(memory_format=torch.channels_last) for s in (5, 6)]
    memory = normal(300, seed=7)
    yield "transposed alike", 1, [x.clone().t()], [[y.t()] for y in g]
    yield "channels last", 1, [images], [[y] for y in of_images]
    yield "a gradient in another order", 0, [x.clone()], [[y.t().contiguous().t()] for y in g]
    yield "gaps", 0, [x.clone()[:, ::2]], [[y[:, ::2]] for y in g]
    yield "rows of one buffer", 1, [*x.clone()], [[*y] for y in g]
    yield "views that overlap", 1, [memory[:200], memory[100:]], [[normal(200, seed=s)] * 2 for s in (8, 9)]
    yield "an expanded gradient", 0, [x.clone()], [[y[:1].expand(12, 10)] for y in g]
    yield "a shared gradient", 1, [x.clone(), x.clone()], [[y, y] for y in g]


@pytest.mark.parametrize("number", range(8))
def test_layouts(number, monkeypatch):
    """A call of the library has the composition's bits, and what it does not take is composed."""
    found, counted = [], calls_of(monkeypatch)
    for by_hand in (False, True):
        name, calls, starts, gradients = list(layouts())[number]
        if by_hand:
            composed(monkeypatch)
        parameters = [torch.nn.Parameter(x) for x in starts]
        adam = pt.AdamW(parameters, **HOW)
        for some in gradients:
            for p, g in zip(parameters, some, strict=True):
                p.grad = None
                p.main_grad = g
            adam.step()
        found.append([x for p in parameters for x in (p.detach(), adam.state[p]["exp_avg"])])
        if not by_hand:
            assert counted["fused"] == 2 * calls, name
            assert counted["composed"] == (0 if calls and "overlap" not in name else 2 * len(starts)), name
    same_tensors(*found)


def test_a_parameter_that_is_listed_twice_takes_two_steps():
    gradients, found = [normal(20, seed=s) for s in (2, 3)], []
    for twice in (True, False):
        p = torch.nn.Parameter(normal(20, seed=1))
        with pytest.warns(UserWarning, match="duplicate") if twice else contextlib.nullcontext():
            adam = pt.AdamW([p] * (2 if twice else 1), **HOW)
        for g in gradients:
            p.grad = g
            for _ in range(1 if twice else 2):
                adam.step()
        assert adam.state[p]["step"] == 4
        found.append([p.detach(), adam.state[p]["exp_avg_sq"]])
    same_tensors(*found)


def test_a_refused_step_counts_for_nothing():
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one.grad, other.main_grad = torch.ones(3), torch.ones(4)
    adam = pt.AdamW([one, other])
    with pytest.raises(pydet.Error, match=r"^AdamW: a gradient is torch.float32 \(4,\)"):
        adam.step()
    assert not adam.state and one.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_nan_is_the_one_of_the_library(dtype, monkeypatch):
    found = []
    for by_hand in (False, True):
        if by_hand:
            composed(monkeypatch)
        p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        p.main_grad = torch.tensor([-math.nan, 1.0, math.inf, 2.0])
        adam = pt.AdamW([p], **HOW)
        for _ in range(2):
            adam.step()
        found.append([p.detach(), *(x for x in adam.state[p].values() if isinstance(x, torch.Tensor))])
    same_tensors(*found)
    words = found[0][0].view(torch.int32 if dtype == torch.float32 else torch.int16).tolist()
    assert words[0] == words[2] == (0x7FFFFFFF if dtype == torch.float32 else 0x7FFF)


def test_a_state_of_other_types_goes_on():
    """Saved beside parameters of bf16 and loaded beside float32 ones, and the other way: a master comes or goes."""
    start, gradients = normal(50, seed=1), [normal(50, seed=s) for s in (2, 3)]
    for before, after in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        half, adam = run(start.to(before), [gradients[0].to(before)])
        p = torch.nn.Parameter(half.to(after))
        other = pt.AdamW([p], **HOW)
        other.load_state_dict(adam.state_dict())
        p.grad = gradients[1].to(after)
        other.step()
        assert ("master" in other.state[p]) == (after != torch.float32) and torch.isfinite(p).all()
        assert (p.detach() - half.to(after)).any()


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
