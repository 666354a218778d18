"""Single instructions of AMD's interpreter (tools/amd/gcn.py), as the ISA's documents have them."""

import itertools
import struct

import numpy as np
import pytest

import gcn

NUMBERS = {
    **{
        "+0": 0x00000000,
        "-0": 0x80000000,
        "1": 0x3F800000,
        "-1": 0xBF800000,
        "least": 0x00000001,
        "-least": 0x80000001,
    },
    **{"inf": 0x7F800000, "-inf": 0xFF800000, "quiet": 0x7FC00001, "-quiet": 0xFFC00002},
    **{"signalling": 0x7F800001, "-signalling": 0xFFA00003},
}


def extreme(a, b, larger):
    """V_MAX_F32 and V_MIN_F32 in IEEE mode, as their pseudo code has them."""
    nan = lambda x: x & 0x7FFFFFFF > 0x7F800000
    for x in (a, b):
        if nan(x) and not x & 1 << 22:
            return x | 1 << 22
    if nan(a):
        return b
    if nan(b):
        return a
    if {a, b} == {0, 1 << 31}:
        return 0 if larger else 1 << 31
    x, y = (struct.unpack("f", struct.pack("I", bits))[0] for bits in (a, b))
    return a if (x > y if larger else x < y) else b


@pytest.mark.parametrize("name", ["v_max_f32", "v_min_f32", "v_max3_f32"])
def test_the_larger_and_the_smaller(name):
    """+0 is larger than -0, on either side; a number is more than a quiet NaN."""
    larger, pairs = "max" in name, list(itertools.product(NUMBERS.values(), repeat=2))
    a, b = np.array(pairs, np.uint32).T
    c = np.roll(a, 5)
    got = gcn.VALUES[name](*((a, b, c) if "max3" in name else (a, b)))
    for i, (x, y) in enumerate(pairs):
        want = extreme(x, y, larger)
        want = extreme(want, int(c[i]), True) if "max3" in name else want
        assert int(got[i]) == want, f"{name} of {x:08x} and {y:08x} is {int(got[i]):08x}, want {want:08x}"
    assert int(gcn.VALUES["v_max_f32"](0, 1 << 31)) == 0 and int(gcn.VALUES["v_min_f32"](1 << 31, 0)) == 1 << 31


@pytest.mark.parametrize("width", [32, 64])
def test_signed_fields_say_whether_they_are_zero(width):
    """S_BFE_I32 and S_BFE_I64: the field with its sign, and scc whether it is not 0."""
    operation = gcn.SCALARS[f"s_bfe_i{width}"]
    words = [0, 1, 0x80, 0x7F00, 0xFF00, 0xDEADBEEF, 1 << (width - 1), (1 << width) - 1]
    for word, first, count in itertools.product(words, (0, 1, 7, 8, 31, width - 1), (0, 1, 7, 8, 16, 31, width)):
        digits = f"{word:0{width}b}"
        extended = digits[0] * width + digits  # what lies above the word has its sign
        field = extended[len(extended) - first - count : len(extended) - first]
        want = int(field or "0", 2) - (int(field[0]) << count if field else 0)
        got, scc = operation(word, first | count << 16)
        assert (got, bool(scc)) == (want, want != 0), f"{word:x} from {first} on, {count} bits"
    above = 1 << 5 if width == 32 else 1 << 6  # of the offset no more bits count
    assert operation(0xF0, 4 | above | 4 << 16) == (-1, True)


class Wave:
    """Registers alone."""

    def __init__(self, *words):
        self.v = {number: np.full(gcn.LANES, word, np.uint32) for number, word in enumerate(words)}

    def put(self, number, value):
        self.v[number] = np.broadcast_to(np.asarray(value, np.uint32), gcn.LANES)


@pytest.mark.parametrize("negative", [*itertools.product((False, True), repeat=3)])
@pytest.mark.parametrize("absolute", [*itertools.product((False, True), repeat=3)])
def test_signs_of_halves_in_a_mixed_product(negative, absolute):
    """V_FMA_MIX_F32 of either half of a register and of whole ones: - and | | are of the number that is read."""
    halves = np.array([[1.5, -2.5], [-3.25, 0.75], [0.5, -8]], np.float16)
    whole = np.array([5.5, -6.5, 7.5], np.float32)
    for are_halves, places in itertools.product(
        itertools.product((0, 1), repeat=3), itertools.product((0, 1), repeat=3)
    ):
        words, numbers = [0], []
        for i in range(3):
            number = halves[i][places[i]] if are_halves[i] else whole[i]
            words.append(int(halves[i].view(np.uint32)[0] if are_halves[i] else whole[i : i + 1].view(np.uint32)[0]))
            number = abs(float(number)) if absolute[i] else float(number)
            numbers.append(-number if negative[i] else number)
        named = [
            "-" * n + "|" * a + f"v{i + 1}" + "|" * a for i, (n, a) in enumerate(zip(negative, absolute, strict=True))
        ]
        chosen = [place if half else 0 for place, half in zip(places, are_halves, strict=True)]
        text = f"v_fma_mix_f32 v0, {', '.join(named)} op_sel:{chosen} op_sel_hi:{list(are_halves)}".replace(", ", ",")
        action, _ = gcn.instruction(text.replace(",v", ", v").replace(",-", ", -").replace(",|", ", |"))
        wave = Wave(*words)
        action(wave)
        want = np.float32(numbers[0] * numbers[1] + numbers[2])
        assert wave.v[0].view(np.float32)[0] == want, text
