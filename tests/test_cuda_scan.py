"""Scans on an NVIDIA GPU: the CPU's bits, by every kernel."""

import numpy as np

import pydet
import test_scan as scans
import test_scan_backward as gradients
from cases import assert_same_bits, data
from test_cuda import device, each, torch  # noqa: F401

LONG = [(2, 300, 4, 64, 2, 128), (1, 40, 5, 128, 5, 256), (1, 17, 2, 40, 1, 512), (1, 70, 300, 1, 1, 16)]
# Of gradients' tiles: more than a grid is deep, and more heads than it is high, which go another way.
MANY = [(70000, 2, 1, 32, 1, 32), (1, 1, 66000, 32, 1, 32)]
# What a gradient takes: up to 256 states, and 128 of them with a decay each.
HELD = [(2, 300, 4, 64, 2, 128), (1, 70, 300, 1, 1, 16), (1, 40, 5, 128, 5, 256), (1, 90, 3, 33, 1, 100)]


@each("selective_scan")
def test_selective_scan(device, kernel, dtype):
    scans.check_selective_scan(device, dtype)
    scans.check_wide(device, "selective_scan", dtype)
    gradients.check_drawn(device, "selective_scan", dtype, 60)
    gradients.check_drawn(device, "selective_scan", dtype, 6, seed=1, tokens=1500)
    for number, sizes in enumerate(LONG):
        given = scans.scan_of(*sizes, dtype, number, each_state=bool(number % 2))
        scans.same(
            device.selective_scan(*given, return_final=True), pydet.selective_scan(*given, return_final=True), sizes
        )
    assert device.refused == 0


@each("gated_delta")
def test_gated_delta(device, kernel, dtype):
    scans.check_gated_delta(device, dtype)
    scans.check_wide(device, "gated_delta", dtype)
    gradients.check_drawn(device, "gated_delta", dtype, 60)
    gradients.check_drawn(device, "gated_delta", dtype, 6, seed=1, tokens=1500)
    for number, sizes in enumerate(LONG[:3]):
        given = scans.delta_of(*sizes, dtype, number)
        scans.same(device.gated_delta(*given, return_final=True), pydet.gated_delta(*given, return_final=True), sizes)
    assert device.refused == 0


def check_a_state_in_its_place(device, name, given, state):
    want = getattr(pydet, name)(*given, initial=state, return_final=True)
    moved = [None if x is None else device.to_device(x)[0] for x in given]
    there = device.to_device(state)[0]
    y, _ = getattr(pydet, name)(*moved, initial=there, final=there, kernel=device.kernel)
    scans.same((device.to_host(y), device.to_host(there)), want)


@each("selective_scan", "_step")
def test_selective_scan_of_a_few_tokens(device, kernel, dtype):
    scans.check_steps(device, "selective_scan", dtype)
    given, state = scans.scan_of(3, 1, 4, 8, 2, 128, dtype), scans.states_of(3, 4, 8, 128)
    check_a_state_in_its_place(device, "selective_scan", given, state)
    assert device.refused == 0


@each("gated_delta", "_step")
def test_gated_delta_of_a_few_tokens(device, kernel, dtype):
    scans.check_steps(device, "gated_delta", dtype)
    given, state = scans.delta_of(3, 1, 4, 8, 2, 128, dtype), scans.states_of(3, 4, 128, 8)
    check_a_state_in_its_place(device, "gated_delta", given, state)
    assert device.refused == 0


@each("causal_conv1d")
def test_causal_conv1d(device, kernel, dtype):
    scans.check_causal_conv1d(device, dtype)
    assert device.refused == 0


@each("selective_scan")
def test_packs(device, kernel, dtype):
    """Sequences of a pack, of which one has no tokens."""
    starts = np.int32([0, 3, 3, 4, 90])
    given, initial = scans.scan_of(1, 90, 4, 8, 2, 20, dtype), scans.states_of(4, 4, 8, 20)
    own = {"cu_seqlens": starts, "initial": initial, "return_final": True}
    scans.same(device.selective_scan(*given, **own), pydet.selective_scan(*given, **own))
    x, w = data("normal", (1, 90, 70), np.float32), data("normal", (70, 4), np.float32)
    want = pydet.causal_conv1d(x, w, cu_seqlens=starts)
    device.kernel = "cuda_causal_conv1d"
    assert_same_bits(device.causal_conv1d(x, w, cu_seqlens=starts), want)


@each("selective_scan_backward")
def test_selective_scan_backward(device, kernel, dtype):
    gradients.check_selective_scan_backward(device, dtype)
    gradients.check_wide(device, "selective_scan_backward", dtype)
    gradients.check_drawn(device, "selective_scan_backward", dtype, 60)
    gradients.check_drawn(device, "selective_scan_backward", dtype, 6, seed=1, tokens=1500)
    for number, sizes in enumerate(HELD + MANY):
        given = scans.scan_of(*sizes, dtype, number, each_state=sizes in HELD and bool(number % 2))
        dy = data("normal", given[0].shape, given[0].dtype, 70)
        got, want = (f.selective_scan_backward(dy, *given, return_initial=True) for f in (device, pydet))
        scans.same(got, want, sizes)
    gradients.check_pack(device, "selective_scan_backward", scans.scan_of(1, 20, 4, 8, 2, 20, dtype), dtype)
    assert device.refused == 0


@each("gated_delta_backward")
def test_gated_delta_backward(device, kernel, dtype):
    gradients.check_gated_delta_backward(device, dtype)
    gradients.check_wide(device, "gated_delta_backward", dtype)
    gradients.check_drawn(device, "gated_delta_backward", dtype, 60)
    gradients.check_drawn(device, "gated_delta_backward", dtype, 6, seed=1, tokens=1500)
    for number, sizes in enumerate(HELD[:3] + MANY):
        given = scans.delta_of(*sizes, dtype, number)
        dout = data("normal", given[2].shape, given[2].dtype, 70)
        got, want = (f.gated_delta_backward(dout, *given, return_initial=True) for f in (device, pydet))
        scans.same(got, want, sizes)
    gradients.check_pack(device, "gated_delta_backward", scans.delta_of(1, 20, 4, 8, 2, 20, dtype), dtype)
    assert device.refused == 0


@each("causal_conv1d_backward")
def test_causal_conv1d_backward(device, kernel, dtype):
    gradients.check_causal_conv1d_backward(device, dtype)
    given = gradients.conv_of(2, 300, 200, 4, dtype)
    own = {"bias": True, "return_initial": True}
    got, want = (f.causal_conv1d_backward(*given[:3], initial=given[3], **own) for f in (device, pydet))
    scans.same(got, want)
    assert device.refused == 0
