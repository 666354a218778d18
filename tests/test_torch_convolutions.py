"""Convolutions that are one product of their windows: what convert makes of them, and their gradients."""

import copy
import os
import pickle

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet.torch as pt  # noqa: E402
from pydet.torch.convolutions import Convolution  # noqa: E402
from torch_bits import normal, same  # noqa: E402

CASES = {  # a layer, and the shape of what it is given
    "patches": (lambda: torch.nn.Conv2d(3, 8, 4, 4), (4, 3, 16, 16)),
    "patches that are no squares": (lambda: torch.nn.Conv2d(3, 8, (4, 2), (4, 2), bias=False), (4, 3, 16, 8)),
    "a rest": (lambda: torch.nn.Conv2d(3, 8, 4, 4, padding="valid"), (4, 3, 19, 17)),
    "points": (lambda: torch.nn.Conv1d(3, 8, 1), (4, 3, 16)),
    "over time": (lambda: torch.nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (4, 3, 4, 16, 8)),
    "of Whisper": (lambda: torch.nn.Conv1d(3, 8, 3, padding=1), (4, 3, 16)),
    "of Whisper, the second": (lambda: torch.nn.Conv1d(3, 8, 3, stride=2, padding=1), (4, 3, 32)),
    "of HuBERT": (lambda: torch.nn.Conv1d(3, 8, 10, stride=5), (4, 3, 85)),
}


def converted(layer):
    net = torch.nn.Sequential(copy.deepcopy(layer))
    report = pt.convert(net, strict=True)
    assert list(report.swapped) == ["0"] and isinstance(net[0], Convolution) and isinstance(net[0], type(layer))
    return net


@pytest.mark.parametrize("case", CASES)
def test_it_is_that_convolution(case):
    torch.manual_seed(0)
    make, shape = CASES[case]
    layer, x = make(), normal(*shape).requires_grad_()
    net, y = converted(layer), layer(x)
    torch.testing.assert_close(net(x), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net(x[0]), y[0], rtol=1e-5, atol=1e-5)
    assert net(x).is_contiguous() and list(net.state_dict()) == [f"0.{name}" for name in layer.state_dict()]
    want = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    got = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    same(torch.cat([net(part) for part in x.split(1)]), net(x))
    same(pickle.loads(pickle.dumps(net))(x), net(x))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_one_batch(case, dtype):
    torch.manual_seed(0)
    make, shape = CASES[case]
    net, x = converted(make().to(dtype)), normal(*shape).to(dtype)
    found = pt.accumulate_gradients(net)
    assert found == list(net.parameters()) and not found.outside

    def sums(cut):
        for p in found:
            p.main_grad.zero_()
        for part in x.split(cut):
            (net(part).float() ** 3).sum().backward()
        return [p.main_grad.clone() for p in found]

    whole = sums(4)
    for cut in (1, [1, 3]):
        for one, other in zip(sums(cut), whole, strict=True):
            same(one, other)
    for module in net.modules():
        module.accumulates = False
    (net(x).float() ** 3).sum().backward()
    for p, one in zip(found, whole, strict=True):
        torch.testing.assert_close(one, p.grad.float(), rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0.05)


def test_channels_that_are_adjacent():
    """main_grad has the strides of its parameter."""
    net, x = converted(torch.nn.Conv2d(3, 8, 4, 4)), normal(4, 3, 16, 16)
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)
    for one in (net, other):
        pt.accumulate_gradients(one)
        one(x).square().sum().backward()
        one(x).square().sum().backward()
    assert not other[0].weight.main_grad.is_contiguous()
    same(other[0].weight.main_grad.contiguous(), net[0].weight.main_grad)


def test_torchscript_and_autocast():
    net, x = converted(torch.nn.Conv2d(3, 8, 4, 4)), normal(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
    same(torch.jit.script(net)(x), net(x))
    for case in ("of Whisper", "over time"):
        make, shape = CASES[case]
        net, x = converted(make()), normal(*shape)
        same(torch.jit.script(net)(x), net(x))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.Conv2d(3, 8, 4, 4, padding=1),
        torch.nn.Conv1d(4, 8, 2, 2, groups=2),
        torch.nn.Conv1d(3, 8, 4, padding=1),
        torch.nn.Conv1d(3, 8, 3, padding="same"),
        torch.nn.Conv1d(3, 8, 2, 2, dilation=2),
        torch.nn.Conv1d(3, 8, 3, padding=1, padding_mode="circular"),
        torch.nn.ConvTranspose1d(3, 8, 2, 2),
    ],
)
def test_others_are_left_and_named(layer):
    net = torch.nn.Sequential(layer)
    report = pt.convert(net)
    assert type(net[0]) is type(layer) and "has matrices, and no counterpart here" in report.left["0"]
