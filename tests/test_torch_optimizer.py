"""pydet.torch.AdamW: the formula of NUMERICS.md word by word, whatever the width, the threads and the layout."""

import concurrent.futures
import contextlib
import copy
import math
import os
import pickle
import weakref

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
    before = optimizers._is_served
    optimizers._is_served = (lambda device: False) if composed else before
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
        optimizers._is_served = before
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
    monkeypatch.setattr(optimizers, "_is_served", lambda device: False)


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
    """Parameters, and gradients of each step; how many of them a call of the library leaves to PyTorch's operations."""
    x, g = normal(12, 10, seed=1), [normal(12, 10, seed=s) for s in (2, 3)]
    images = normal(2, 3, 4, 5, seed=4).to(memory_format=torch.channels_last)
    of_images = [normal(2, 3, 4, 5, seed=s).to(memory_format=torch.channels_last) for s in (5, 6)]
    memory = normal(300, seed=7)
    other = [y.t().contiguous().t() for y in g]
    yield "transposed alike", 0, [x.clone().t()], [[y.t()] for y in g]
    yield "channels last", 0, [images], [[y] for y in of_images]
    yield "a gradient in another order", 1, [x.clone()], [[y] for y in other]
    yield "one of three", 1, [x.clone() for _ in range(3)], [[y, z, y] for y, z in zip(g, other, strict=True)]
    yield "gaps", 1, [x.clone()[:, ::2]], [[y[:, ::2]] for y in g]
    yield "rows of one buffer", 0, [*x.clone()], [[*y] for y in g]
    yield "views that overlap", 2, [memory[:200], memory[100:]], [[normal(200, seed=s)] * 2 for s in (8, 9)]
    yield "an expanded gradient", 1, [x.clone()], [[y[:1].expand(12, 10)] for y in g]
    yield "a shared gradient", 0, [x.clone(), x.clone()], [[y, y] for y in g]
    yield "a gradient of steps unlike its parameter's", 1, [x.clone()[:1]], [[y.flatten()[::2][None, :10]] for y in g]


@pytest.mark.parametrize("number", range(10))
def test_layouts(number, monkeypatch):
    """A call of the library has the composition's bits, and what it does not take is composed, that alone."""
    found, counted = [], calls_of(monkeypatch)
    for by_hand in (False, True):
        name, left, starts, gradients = list(layouts())[number]
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
            assert counted["composed"] == 2 * left, name
            assert counted["fused"] == 2 * (2 if 0 < left < len(starts) else 1), name
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


# ---- What is replaced between steps --------------------------------------------------------------------------------


def replaced():
    """Of the third of five parameters, once two steps were made; each is what a training loop or a wrapper may do."""

    def state_of(name, made):
        return lambda p, adam: adam.state[p].update({name: made(adam.state[p][name])})

    def data(made):
        def replace(p, adam):
            p.data = made(p.data)
            p.grad = None if p.grad is None else made(p.grad.float()).to(p.dtype)

        return replace

    def swapped(p, adam):
        other = torch.nn.Parameter(p.detach() * 2)
        other.grad = p.grad * 2
        torch.utils.swap_tensors(p, other)

    def group(p, adam):
        adam.add_param_group({"params": [torch.nn.Parameter(p.detach().clone())], "lr": 0.3})

    return {
        "nothing": lambda p, adam: None,
        "memory": data(torch.clone),
        "memory of another order": data(lambda x: x.t().contiguous().t()),
        "memory of another order alone": lambda p, adam: setattr(p, "data", p.data.t().contiguous().t()),
        "the same memory turned over": data(lambda x: x.t()),
        "a part of larger memory": data(lambda x: torch.cat([x, x])[3 : 3 + len(x)]),
        "to float32": data(torch.Tensor.float),
        "to bfloat16": data(torch.Tensor.bfloat16),
        "to float16": data(torch.Tensor.half),
        "swapped": swapped,
        "values in place": lambda p, adam: p.data.mul_(2),
        "no gradient": lambda p, adam: setattr(p, "grad", None),
        "a gradient of another type": lambda p, adam: setattr(p, "main_grad", normal(*p.shape).half()),
        "an expanded gradient": lambda p, adam: setattr(p, "main_grad", normal(1, 1).expand(p.shape)),
        "no state": lambda p, adam: adam.state.pop(p),
        "all state": lambda p, adam: adam.state.clear(),
        "exp_avg": state_of("exp_avg", lambda x: x * 2),
        "exp_avg_sq of another order": state_of("exp_avg_sq", lambda x: x.t().contiguous().t()),
        "its own state loaded": lambda p, adam: adam.load_state_dict(copy.deepcopy(adam.state_dict())),
        "a number": lambda p, adam: adam.param_groups[0].update(lr=0.2, betas=(0.5, 0.6)),
        "a group": group,
    }


OF_THE_SAME_VALUES = (
    *("nothing", "memory", "memory of another order", "memory of another order alone", "its own state loaded"),
    *("exp_avg_sq of another order", "to float32", "to bfloat16", "to float16"),
)


def replaced_and_stepped(what, dtype):
    parameters = [torch.nn.Parameter(normal(6, 6, seed=i).to(dtype)) for i in range(5)]
    adam = pt.AdamW(parameters, **HOW)
    for step in range(4):
        listed = [p for one in adam.param_groups for p in one["params"]]
        for i, p in enumerate(listed):
            p.grad = None
            p.grad = normal(6, 6, seed=10 * step + i).to(p.dtype)
        if step == 2:
            replaced()[what](listed[2], adam)
        adam.step()
    return [x for p in listed for x in (p.detach(), *adam.state[p].values()) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("what", replaced())
def test_what_is_replaced_between_steps_is_what_the_next_one_takes(what, dtype, monkeypatch):
    """A step has nothing of the step before but the state, so it has the bits of the composition, which reads all anew;
    and what was replaced had a part in them."""
    mine, other = replaced_and_stepped(what, dtype), replaced_and_stepped("nothing", dtype)
    composed(monkeypatch)
    same_tensors(mine, replaced_and_stepped(what, dtype))
    alike = [torch.equal(x, y) for x, y in zip(mine, other, strict=False)]
    assert what in OF_THE_SAME_VALUES or len(mine) != len(other) or not all(alike)


def test_what_was_resized_is_refused():
    """A parameter or a gradient of another shape, of which the state knows nothing: no memory beyond it is written."""
    for name in ("grad", "parameter", "state"):
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        adam = pt.AdamW(parameters)
        for p in parameters:
            p.grad = torch.ones(4)
        adam.step()
        before = [p.detach().clone() for p in parameters]
        p = parameters[1]
        if name == "grad":
            p.grad.resize_(9)
        if name == "parameter":
            p.data = torch.ones(9)
            p.grad = torch.ones(9)
            before[1] = p.detach().clone()
        if name == "state":
            adam.state[p]["exp_avg"].resize_(2)
        with pytest.raises(pydet.Error, match=r"want.* \(4,\)" if name == "grad" else r"^adamw: exp_avgs\[1\] is"):
            adam.step()
        same_tensors([p.detach() for p in parameters], before)


def test_copies_of_an_optimizer():
    """deepcopy and pickle: of their own parameters, which go on with the same bits, outside torch.compile too."""
    parameters = [torch.nn.Parameter(normal(7, seed=i).bfloat16()) for i in range(70)]
    adam = pt.AdamW(parameters, **HOW)

    def step(optimizer):
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = normal(7, seed=100 + i).bfloat16()
        optimizer.step()

    step(adam)
    copies = [copy.deepcopy(adam), pickle.loads(pickle.dumps(adam)), copy.deepcopy(copy.deepcopy(adam))]
    step(adam)
    for other in copies:
        step(other)
        assert other._run._torchdynamo_disable
        found = other.param_groups[0]["params"]
        same_tensors([p.detach() for p in found], [p.detach() for p in parameters])
        for one, p in zip(found, parameters, strict=True):
            assert one.data_ptr() != p.data_ptr()
            for name in ("exp_avg", "exp_avg_sq", "master"):
                same(other.state[one][name], adam.state[p][name])


def test_two_threads_have_the_bits_of_one():
    """Each with an optimizer of its own."""

    def steps(number):
        parameters = [torch.nn.Parameter(normal(1 + i, seed=number)) for i in range(100)]
        adam = pt.AdamW(parameters, **HOW)
        for step in range(10):
            for i, p in enumerate(parameters):
                p.grad = normal(1 + i, seed=number + step)
            adam.step()
        return [p.detach() for p in parameters]

    want = [steps(number) for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for mine, theirs in zip(pool.map(steps, range(2)), want, strict=True):
            same_tensors(mine, theirs)


def test_a_thousand_steps_keep_no_memory_but_the_state():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(70)]
    adam = pt.AdamW(parameters)
    for p in parameters:
        p.grad = torch.ones(3)
    gradients = [weakref.ref(p.grad) for p in parameters]
    for _ in range(1000):
        adam.step()
    adam.zero_grad()
    assert not any(x() is not None for x in gradients)
    assert {len(adam.state[p]) for p in parameters} == {5} and len(adam.state) == 70


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
