"""An interpreter of AMD machine code, for the kernels that libpydet_hip.so ships: gfx90a and gfx942, waves of 64.

What runs is the code in the library: its bundles are taken apart, LLVM's disassembler turns the instructions into text,
and each becomes a Python function on 64 lanes of NumPy (AMD's "Instinct MI200 / MI300 Instruction Set Architecture").
The waves of a workgroup run one by one, each from barrier to barrier, in an order that the caller may choose: without
the barriers they need, they see each other's work too early or too late. Memory is that of this process; what a kernel
reads or writes outside of the ranges it was given is an error. Registers hold NaN, and LDS anything, until they are
written.

Loads and stores happen as late as s_waitcnt lets them: when the count that it waits for says that they are done in
every order that the hardware may choose. An instruction that names a register which a load has yet to write is an
error.

Simplified, since the kernels do not depend on it: the reciprocal and the square root are correctly rounded where the
hardware's are within 1 ulp, and a division's scale, refinement and fix-up give its correctly rounded quotient at once.
Matrix instructions take their arithmetic from reference.py and their lane maps from here. Not modelled: the cycles that
must lie between some instructions (s_nop).
"""

import functools
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests"))

import reference
from cases import BFLOAT16, FLOAT16

LANES = 64
SHARED_BASE = 1 << 48  # flat addresses from here on are the workgroup's LDS
U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
UNWRITTEN = 0x7FA5A5A5  # a register that nothing was written to: NaN, and an address outside of everything
LANE_BITS = U64(1) << np.arange(LANES, dtype=U64)
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


# ---- Code objects ----------------------------------------------------------------------------------------------------


def code_objects(library, arch):
    """The ELF files for one architecture in a library."""
    data, found, at = library.read_bytes(), [], 0
    while (at := data.find(BUNDLE, at)) >= 0:
        (count,), entry = struct.unpack_from("<Q", data, at + 24), at + 32
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, entry)
            name = data[entry + 24 : entry + 24 + length].decode()
            entry += 24 + length
            if name.split("--")[-1].split(":")[0] == arch:
                found.append(data[at + offset : at + offset + size])
        at += 24
    return found


def tool(name):
    """An LLVM tool, the newest there is: an old one does not know every architecture."""
    import shutil

    return next((path for version in ("-21", "-20", "-19", "") if (path := shutil.which(name + version))), None)


class Kernel:
    """One kernel: its code, taken apart at its first use and decoded as it is reached, and what its metadata says."""

    def __init__(self, name, metadata, descriptor, listing):
        self.name, self.listing, self.decoded = name, listing, {}
        self.arguments = metadata["args"]
        self.kernarg_size, self.lds, self.scratch = (
            int(metadata[key])
            for key in ("kernarg_segment_size", "group_segment_fixed_size", "private_segment_fixed_size")
        )
        self.metadata = metadata
        rsrc1, self.rsrc2, properties = struct.unpack_from("<IIH", descriptor, 48)
        # What the interpreter does, and the contract asks for: rounding to nearest even, subnormals kept, IEEE mode.
        assert rsrc1 >> 12 & 0xFF == 0xF0, f"{name} runs in floating-point mode {rsrc1 >> 12 & 0xFF:#x}, want 0xf0"
        assert rsrc1 >> 23 & 1, f"{name} does not run in IEEE mode"
        self.user = [size * (properties >> bit & 1) for bit, size in enumerate((4, 2, 2, 2, 2, 2, 1))]

    @functools.cached_property
    def code(self):
        """{address: text}"""
        return self.listing()[self.name]

    @functools.cached_property
    def entry(self):
        return min(self.code)


def kernels(elf, path):
    """{name: Kernel} of a code object; `path` is where it may be written for the tools, also later."""

    def output(name, *options):
        path.write_bytes(elf)
        return subprocess.run([tool(name), *options, path], capture_output=True, text=True, check=True).stdout

    @functools.cache
    def listing():
        code, lines = {}, {}
        line = r"^(?:[0-9a-f]+ <(.*)>:|\s+(\S.*?)\s*// ([0-9A-F]+):.*)$"
        for symbol, text, address in re.findall(line, output("llvm-objdump", "-d", "--no-show-raw-insn"), re.M):
            if symbol:
                lines = code.setdefault(symbol, {})
            else:
                lines[int(address, 16)] = text
        return code

    notes, descriptors, result = output("llvm-readelf", "--notes"), symbols(elf), {}
    for block in re.split(r"^  - ", notes, flags=re.M)[1:]:
        metadata = dict(re.findall(r"^    \.(\w+): +(\S+)$", block, re.M))
        metadata.update(re.findall(r"^\.(\w+): +(\S+)$", block[: block.find("\n")], re.M))
        metadata["args"] = [
            (int(offset), int(size), kind)
            for offset, size, kind in re.findall(r"\.offset: +(\d+)\s+\.size: +(\d+)\s+\.value_kind: +(\w+)", block)
        ]
        if "name" in metadata:
            result[metadata["name"]] = Kernel(
                metadata["name"], metadata, descriptors[metadata["name"] + ".kd"], listing
            )
    return result


def symbols(elf):
    """{name: bytes} of the data symbols of an ELF file."""
    (sections_at,) = struct.unpack_from("<Q", elf, 40)
    size, count, _ = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + i * size) for i in range(count)]
    found = {}
    for kind, offset, length, link in ((s[1], s[4], s[5], s[6]) for s in sections):
        if kind != 2:
            continue
        for at in range(offset, offset + length, 24):
            name, _, _, section, value, extent = struct.unpack_from("<IBBHQQ", elf, at)
            if 0 < section < count:
                text = elf[sections[link][4] + name :].split(b"\0", 1)[0].decode()
                start = sections[section][4] + value - sections[section][3]
                found[text] = elf[start : start + extent]
    return found


# ---- Memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """Ranges of this process's memory that a kernel may touch: {address: array of bytes}."""

    def __init__(self, ranges):
        self.ranges = [(base, view) for base, view in ranges.items() if len(view)]

    def at(self, addresses, size):
        """[(which of the addresses, view, offsets)] for accesses of `size` bytes. Most lie in one range."""
        if not len(addresses):
            return []
        first, end = int(addresses.min()), int(addresses.max()) + size
        for base, view in self.ranges:
            if base <= first and end <= base + len(view):
                return [(slice(None), view, (addresses - U64(base)).astype(np.int64))]
        left, parts = np.ones(len(addresses), bool), []
        for base, view in self.ranges:
            inside = left & (addresses >= U64(base)) & (addresses + U64(size) <= U64(base + len(view)))
            if inside.any():
                parts.append((inside, view, (addresses[inside] - U64(base)).astype(np.int64)))
                left &= ~inside
        if left.any():
            raise AssertionError(
                f"{size} bytes at {int(addresses[left][0]):#x} are outside of what the kernel was given"
            )
        return parts

    def load(self, addresses, size):
        result = np.empty(len(addresses), f"V{size}")
        for inside, view, offsets in self.at(addresses, size):
            result[inside] = pieces(view, size)[offsets]
        return result.view(np.uint8).reshape(-1, size)

    def store(self, addresses, data):
        size = data.shape[1]
        data = np.ascontiguousarray(data).view(f"V{size}").reshape(-1)
        for inside, view, offsets in self.at(addresses, size):
            pieces(view, size)[offsets] = data[inside]


def pieces(view, size):
    """The piece of `size` bytes that begins at each byte."""
    return np.ndarray((len(view) - size + 1,), f"V{size}", view, strides=(1,))


# ---- Waves -----------------------------------------------------------------------------------------------------------


def mask_of(value):
    return (U64(value) & LANE_BITS) != 0


def value_of(mask):
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def in_lanes(x):
    """A value a lane, of one value for all too."""
    return x if np.shape(x) == (LANES,) else np.broadcast_to(x, (LANES,))


# The counters of an access, and the one by which accesses of its kind are done in the order in which they were issued.
COUNTERS = {"global": {"vmcnt"}, "lds": {"lgkmcnt"}, "scalar": {"lgkmcnt"}, "flat": {"vmcnt", "lgkmcnt"}}
IN_ORDER = {"global": "vmcnt", "lds": "lgkmcnt"}


class Access:
    def __init__(self, kind, registers, effect, decides=None):
        self.kind, self.registers, self.effect = kind, registers, effect
        # The counters that are still to be waited for until it is done.
        self.left = set(COUNTERS[kind] if decides is None else decides)


class Wave:
    def __init__(self, kernel, memory, lds):
        self.kernel, self.memory, self.lds = kernel, memory, lds
        self.v = np.full((512, LANES), UNWRITTEN, U32)  # the accumulation registers after the vector registers
        self.s = [UNWRITTEN] * 128
        self.vcc, self.scc, self.pc = 0, 0, kernel.entry
        self.set_exec(M64)
        self.executed = 0
        self.on_the_way = {"vmcnt": [], "lgkmcnt": []}  # accesses, oldest first
        self.awaited = {}  # register -> the access that will write it

    def set_exec(self, value):
        self.exec, self.mask = value, mask_of(value)
        self.all = value == M64

    def put(self, register, x):
        """A vector register, in the lanes that are active."""
        if self.all:
            self.v[register] = x
        else:
            np.copyto(self.v[register], x, where=self.mask)

    def put64(self, register, x):
        x = np.asarray(x, U64)
        self.put(register, (x & U64(M32)).astype(U32))
        self.put(register + 1, (x >> U64(32)).astype(U32))

    def issue(self, kind, registers, effect, decides=None):
        """An access starts: `effect` is what it does, to these registers among other things, once it is done, as these
        counters say, or all of its kind."""
        access = Access(kind, registers, effect, decides)
        for register in registers:
            before = self.awaited.get(register)
            if before and (kind != before.kind or kind not in IN_ORDER):
                raise AssertionError(f"{self.kernel.code[self.at]} before an earlier load of {register} is waited for")
            self.awaited[register] = access
        for counter in COUNTERS[kind]:
            self.on_the_way[counter].append(access)

    def wait(self, counter, count):
        """Returns when at most `count` are on the way. Those that keep no order may be the first that are done."""
        queue = self.on_the_way[counter]
        done = len(queue) - count
        if done <= 0:
            return
        if count == 0:
            first, queue[:] = queue[:], []
        else:
            ordered = [access for access in queue if IN_ORDER.get(access.kind) == counter]
            first = ordered[: max(0, done - (len(queue) - len(ordered)))]
            queue[:] = [access for access in queue if access not in first]
        for access in first:
            if counter not in access.left:
                continue
            access.left.discard(counter)
            if not access.left:
                access.effect()
                for register in access.registers:
                    if self.awaited.get(register) is access:
                        del self.awaited[register]

    def run(self, watch=None):
        """Executes; yields at each barrier. watch(wave, address) is called before each instruction."""
        decoded, kernel, awaited = self.kernel.decoded, self.kernel, self.awaited
        while True:
            self.at = self.pc
            step = decoded.get(self.at)
            if step is None:
                step = decoded[self.at] = decode(kernel, self.at)
            action, self.pc, registers = step
            self.executed += 1
            if watch:
                watch(self, self.at)
            if awaited and not registers.isdisjoint(awaited):
                missing, where = ", ".join(registers & awaited.keys()), f"{self.at:#x} of {kernel.name}"
                raise AssertionError(f"{kernel.code[self.at]} at {where} does not wait for {missing}")
            if action is None:
                continue
            stopped = action(self)
            if stopped == "end":
                return
            if stopped == "barrier":
                yield


def launch(kernel, grid, block, dynamic_lds, kernarg, memory, order=None, watch=None, groups=None):
    """Runs a kernel. grid and block are (x, y, z); kernarg the bytes of its explicit arguments; `order` permutes the
    waves of a workgroup anew for each stretch between barriers. `groups`: these workgroups of the grid alone. `watch`
    as in Wave.run, of the first wave of each. Returns the number of instructions."""
    threads = block[0] * block[1] * block[2]
    segment = np.zeros(max(kernel.kernarg_size, 16), np.uint8)
    segment[: len(kernarg)] = np.frombuffer(kernarg, np.uint8)
    hidden = {f"hidden_block_count_{c}": grid[i] for i, c in enumerate("xyz")}
    hidden |= {f"hidden_group_size_{c}": block[i] for i, c in enumerate("xyz")}
    hidden |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": dynamic_lds}
    for offset, size, kind in kernel.arguments:
        if kind.startswith("hidden_"):
            segment[offset : offset + size] = np.frombuffer(hidden.get(kind, 0).to_bytes(size, "little"), np.uint8)
    whole = Memory({**dict(memory), segment.ctypes.data: segment})
    executed = 0
    if groups is None:
        groups = ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))
    for group in groups:
        lds = np.full(kernel.lds + dynamic_lds, 0xA5, np.uint8)  # holds anything at first
        waves = [start(kernel, whole, lds, i, group, block, segment.ctypes.data) for i in range(-(-threads // LANES))]
        for wave, first in zip(waves, range(0, threads, LANES), strict=True):
            wave.set_exec(M64 if threads - first >= LANES else (1 << (threads - first)) - 1)
        running = [(wave, wave.run(watch if i == 0 else None)) for i, wave in enumerate(waves)]
        while running:
            if order is not None:
                running = [running[i] for i in order(len(running))]
            with np.errstate(all="ignore"):
                running = [(wave, steps) for wave, steps in running if next(steps, "ended") != "ended"]
        executed += sum(wave.executed for wave in waves)
    return executed


def start(kernel, memory, lds, number, group, block, kernarg):
    """A wave with the registers that the hardware sets."""
    wave, at = Wave(kernel, memory, lds), 0
    for kind, size in enumerate(kernel.user):
        if size and kind == 3:
            wave.s[at], wave.s[at + 1] = kernarg & M32, kernarg >> 32
        at += size
    user = kernel.rsrc2 >> 1 & 31
    for i in range(3):
        if kernel.rsrc2 >> (7 + i) & 1:
            wave.s[user] = group[i]
            user += 1
    thread = np.arange(number * LANES, (number + 1) * LANES)
    ids = (thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1]))
    wave.v[0] = ids[0] | ids[1] << 10 | ids[2] << 20
    return wave


# ---- Operands --------------------------------------------------------------------------------------------------------

SPECIAL = {"vcc_lo": ("vcc", 0), "vcc_hi": ("vcc", 32), "exec_lo": ("exec", 0), "exec_hi": ("exec", 32)}


def constant(text, wide):
    """A literal or inline constant as bits; None for anything else."""
    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
        return int(F32(float(text)).view(U32))
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0) & (M64 if wide and text.startswith("-") else M64 if wide else M32)
    if text == "src_shared_base":
        return SHARED_BASE if wide else SHARED_BASE >> 32
    if text in ("src_private_base", "src_private_limit", "src_shared_limit"):
        return 0xDEAD << 48 if wide else 0xDEAD0000
    return None


def register(text):
    """("v" or "s", number) of a register or of the first of several; accumulation registers are v256 and up."""
    found = re.fullmatch(r"([vsa])(\d+)|([vsa])\[(\d+):\d+\]", text)
    if not found:
        return None
    kind, number = found[1] or found[3], int(found[2] or found[4])
    return ("v", number + 256) if kind == "a" else (kind, number)


def scalar(text, wide=False):
    """Wave -> int."""
    if (bits := constant(text, wide)) is not None:
        return lambda w: bits
    if text in ("vcc", "exec"):
        return lambda w: getattr(w, text)
    if text in SPECIAL:
        name, shift = SPECIAL[text]
        return lambda w: getattr(w, name) >> shift & M32
    if text == "scc":
        return lambda w: w.scc
    number = {"m0": 124, "flat_scratch": 102, "flat_scratch_lo": 102, "flat_scratch_hi": 103}.get(text)
    if number is None:
        kind, number = register(text)
        assert kind == "s", text
    if wide:
        return lambda w: w.s[number] | w.s[number + 1] << 32
    return lambda w: w.s[number]


def put_scalar(text, wide=False):
    """(Wave, int) -> None."""
    if text == "exec":
        return lambda w, x: w.set_exec(x & M64)
    if text == "vcc":
        return lambda w, x: setattr(w, "vcc", x & M64)
    if text in SPECIAL:
        name, shift = SPECIAL[text]

        def put_half(w, x):
            value = getattr(w, name) & ~(M32 << shift) & M64 | (x & M32) << shift
            w.set_exec(value) if name == "exec" else setattr(w, "vcc", value)

        return put_half
    number = 124 if text == "m0" else register(text)[1]

    def put(w, x):
        w.s[number] = x & M32
        if wide:
            w.s[number + 1] = x >> 32 & M32

    return put


def vector(text, wide=False, modifiers=True):
    """Wave -> bits of the 64 lanes (or one value for all): uint32, or uint64 if wide; |x| and -x are applied."""
    negative = absolute = False
    if modifiers:
        if (negative := text.startswith(("-v", "-s", "-|", "neg("))) and not text.startswith("neg("):
            text = text[1:]
        elif text.startswith("neg("):
            text = text[4:-1]
        if absolute := text.startswith(("|", "abs(")):
            text = text[1:-1] if text.startswith("|") else text[4:-1]
    found = register(text)
    if found and found[0] == "v":
        number = found[1]
        if wide:
            read = lambda w: w.v[number].astype(U64) | w.v[number + 1].astype(U64) << U64(32)
        else:
            read = lambda w: w.v[number]
    else:
        from_scalar, kind = scalar(text, wide), U64 if wide else U32
        read = lambda w: kind(from_scalar(w))
    if not negative and not absolute:
        return read
    sign, rest = U32(1 << 31), U32(M32 >> 1)

    def signed(w):
        x = read(w)
        x = x & rest if absolute else x
        return x ^ sign if negative else x

    return signed


# ---- Instructions ----------------------------------------------------------------------------------------------------


def f(x):
    return np.asarray(x, U32).view(F32)


def bits(x):
    return np.asarray(x, F32).view(U32)


def half(x):
    return (np.asarray(x, U32) & U32(0xFFFF)).astype(np.uint16).view(np.float16)


def half_bits(x):
    return np.asarray(x, F32).astype(np.float16).view(np.uint16).astype(U32)


def i32(x):
    return np.asarray(x, U32).view(I32)


def to_integer(x, kind):
    limits = np.iinfo(kind)
    x = np.trunc(np.nan_to_num(f(x).astype(np.float64), nan=0.0, posinf=2e10, neginf=-2e10))
    return np.clip(x, limits.min, limits.max).astype(np.int64).astype(kind).view(U32)


def product64(a, b):
    return np.asarray(a, U32).astype(U64) * np.asarray(b, U32).astype(U64)


def add_scaled(a, b, c):
    return bits(f(a) * f(b) + f(c))


# Of the 29 bits that float64 has beyond fp32: the half of fp32's last; and below what, without its sign, minus 1, a
# float64 is subnormal in fp32.
HALFWAY_BITS, HALFWAY = U64((1 << 29) - 1), U64(1 << 28)
SUBNORMAL = U64((int(np.float64(2.0**-126).view(U64)) << 1) - 1)


def fma(a, b, c):
    """By a sum in float64, whose rounding is the one of the exact value unless it ends halfway between two numbers of
    fp32; then, and where those are subnormal, by the reference."""
    a64, b64, c64 = (f(x).astype(np.float64) for x in (a, b, c))
    total = np.asarray(a64 * b64 + c64)
    pattern = total.view(U64)
    halfway = (pattern & HALFWAY_BITS) == HALFWAY
    small = (pattern << U64(1)) - U64(1) < SUBNORMAL  # by its size alone; a zero is none
    if not np.count_nonzero(halfway) and not np.count_nonzero(small):
        return total.astype(F32).view(U32)
    return bits(reference.fma(*np.broadcast_arrays(f(a), f(b), f(c))))


def extreme(first_is):
    """The larger or smaller of two numbers in IEEE mode, by whether the first is it: a quiet NaN is none, of two the
    second is the result, a signalling one is the result, quiet; +0 is larger than -0."""

    def of(a, b):
        a, b = np.asarray(a, U32), np.asarray(b, U32)
        first, second = f(a), f(b)
        negative = lambda x: x >> U32(31) != 0
        zeros = (first == 0) & (second == 0)
        # Of two zeros the signs, as numbers, say which it is.
        by_sign = first_is(-negative(a).astype(F32), -negative(b).astype(F32))
        taken = np.where(zeros, by_sign, first_is(first, second))
        result = np.where(np.isnan(first), b, np.where(np.isnan(second) | taken, a, b))
        for x in (b, a):
            signals = np.isnan(f(x)) & (x & U32(1 << 22) == 0)
            result = np.where(signals, x | U32(1 << 22), result)
        return result

    return of


larger, smaller = extreme(np.greater_equal), extreme(np.less)


def permute_bytes(a, b, selector):
    wide = np.asarray(a, U32).astype(U64) << U64(32) | np.asarray(b, U32).astype(U64)
    result = np.zeros(LANES, U32)
    for i in range(4):
        chosen = in_lanes(np.asarray(selector, U32) >> U32(8 * i) & U32(0xFF))
        byte = np.where(chosen < 8, wide >> (chosen.astype(U64) % U64(8) * U64(8)) & U64(0xFF), U64(0))
        assert (chosen <= 12).all() and not ((chosen >= 8) & (chosen < 12)).any(), "v_perm_b32 of signs"
        result |= byte.astype(U32) << U32(8 * i)
    return result


def bit_field(x, first, size):
    """Signed."""
    assert np.ndim(size) == 0 and 0 < int(size) < 32
    up = U32(32 - int(size)) - (np.asarray(first, U32) & U32(31))
    return (i32(x << up) >> I32(32 - int(size))).view(U32)


def ones(x):
    """How many bits are set."""
    return sum(np.asarray(x, U32) >> U32(i) & U32(1) for i in range(32)).astype(U32)


def shift(x, by, width=32):
    return np.asarray(by, U32) & U32(width - 1)


# Of one destination: name -> function of the operands' bits.
VALUES = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: U32(int(f"{int(np.ravel(a)[0]):032b}"[::-1], 2)),  # of constants only
    "v_ffbl_b32": lambda a: np.where(a == U32(0), U32(M32), ones(~np.asarray(a, U32) & (a - U32(1)))),
    "v_bcnt_u32_b32": lambda a, b: ones(a) + b,
    "v_cvt_f32_f16": lambda a: bits(half(a).astype(F32)),
    "v_cvt_f16_f32": lambda a: half_bits(f(a)),
    "v_cvt_f32_u32": lambda a: bits(np.asarray(a, U32).astype(F32)),
    "v_cvt_f32_i32": lambda a: bits(i32(a).astype(F32)),
    "v_cvt_u32_f32": lambda a: to_integer(a, U32),
    "v_cvt_i32_f32": lambda a: to_integer(a, I32),
    "v_rcp_f32": lambda a: bits(F32(1) / f(a)),
    "v_rcp_iflag_f32": lambda a: bits(F32(1) / f(a)),
    "v_sqrt_f32": lambda a: bits(np.sqrt(f(a))),
    "v_trunc_f32": lambda a: bits(np.trunc(f(a))),
    "v_floor_f32": lambda a: bits(np.floor(f(a))),
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_f32": lambda a, b: bits(f(a) + f(b)),
    "v_sub_f32": lambda a, b: bits(f(a) - f(b)),
    "v_subrev_f32": lambda a, b: bits(f(b) - f(a)),
    "v_mul_f32": lambda a, b: bits(f(a) * f(b)),
    "v_max_f32": larger,
    "v_min_f32": smaller,
    "v_max3_f32": lambda a, b, c: larger(larger(a, b), c),
    "v_max_i32": lambda a, b: np.maximum(i32(a), i32(b)).view(U32),
    "v_min_i32": lambda a, b: np.minimum(i32(a), i32(b)).view(U32),
    "v_max_u32": np.maximum,
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_min_u32": np.minimum,
    "v_mul_lo_u32": lambda a, b: (product64(a, b) & U64(M32)).astype(U32),
    "v_mul_hi_u32": lambda a, b: (product64(a, b) >> U64(32)).astype(U32),
    "v_mul_i32_i24": lambda a, b: ((i32(a << U32(8)) >> I32(8)) * (i32(b << U32(8)) >> I32(8))).view(U32),
    "v_mul_u32_u24": lambda a, b: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)),
    "v_mad_u32_u24": lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c,
    "v_lshlrev_b32": lambda a, b: b << shift(b, a),
    "v_lshrrev_b32": lambda a, b: b >> shift(b, a),
    "v_ashrrev_i32": lambda a, b: (i32(b) >> shift(b, a).astype(I32)).view(U32),
    "v_lshrrev_b16": lambda a, b: (b & U32(0xFFFF)) >> shift(b, a, 16),
    "v_lshlrev_b16": lambda a, b: b << shift(b, a, 16) & U32(0xFFFF),
    "v_ldexp_f32": lambda a, b: bits(np.ldexp(f(a).astype(np.float64), i32(b)).astype(F32)),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_lshl_add_u32": lambda a, b, c: (a << shift(a, b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << shift(a, c),
    "v_lshl_or_b32": lambda a, b, c: a << shift(a, b) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_bfe_u32": lambda a, b, c: a >> shift(a, b) & ((U32(1) << shift(a, c)) - U32(1)),
    "v_bfe_i32": lambda a, b, c: bit_field(a, b, c),
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_add_u16": lambda a, b: a + b & U32(0xFFFF),
    "v_sub_u16": lambda a, b: a - b & U32(0xFFFF),
    "v_ashrrev_i16": lambda a, b: (
        (i32(b << U32(16)) >> (shift(b, a, 16) + U32(16)).astype(I32)).view(U32) & U32(0xFFFF)
    ),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_fma_f32": fma,
    "v_mad_f32": add_scaled,
    "v_perm_b32": permute_bytes,
    "v_alignbit_b32": lambda a, b, c: (
        (np.asarray(a, U32).astype(U64) << U64(32) | np.asarray(b, U32).astype(U64)) >> (np.asarray(c, U64) & U64(31))
    ).astype(U32),
    "v_div_fmas_f32": fma,
    "v_div_fixup_f32": lambda q, denominator, numerator: bits(f(numerator) / f(denominator)),
}
WIDE = {
    "v_lshlrev_b64": lambda a, b: b << (np.asarray(a, U64) & U64(63)),
    "v_lshrrev_b64": lambda a, b: b >> (np.asarray(a, U64) & U64(63)),
    "v_ashrrev_i64": lambda a, b: (np.asarray(b, U64).view(I64) >> (np.asarray(a, U64) & U64(63)).astype(I64)).view(
        U64
    ),
    "v_mov_b64": lambda a: a,
    "v_lshl_add_u64": lambda a, b, c: (a << (np.asarray(b, U64) & U64(63))) + c,
}
COMPARE = {
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal},
    **{"ne": np.not_equal, "lg": lambda a, b: (a < b) | (a > b), "neq": np.not_equal},
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    **{"nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b)},
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}
CARRY = {  # a b and a carry -> (result, carry), by 64-bit sums
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


def signed(x, width=32):
    return x - (1 << width) if x >> (width - 1) & 1 else x


def leading(x):
    return 32 - x.bit_length() if x else M32


# Scalar: name -> function of integers -> (result, scc or None).
SCALARS = {
    "s_mov_b32": lambda a: (a, None),
    "s_mov_b64": lambda a: (a, None),
    "s_movk_i32": lambda a: (signed(a & 0xFFFF, 16), None),
    "s_abs_i32": lambda a: (abs(signed(a)) & M32, a != 0),
    "s_not_b32": lambda a: (~a & M32, (~a & M32) != 0),
    "s_not_b64": lambda a: (~a & M64, (~a & M64) != 0),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_flbit_i32": lambda a: (leading(a ^ (M32 if a >> 31 else 0)), None),
    "s_flbit_i32_b32": lambda a: (leading(a), None),
    "s_ff1_i32_b64": lambda a: ((a & -a).bit_length() - 1 if a else M32, None),
    "s_bcnt1_i32_b64": lambda a: (a.bit_count(), a != 0),
    "s_sext_i32_i16": lambda a: (signed(a & 0xFFFF, 16), None),
    "s_add_u32": lambda a, b: (a + b, a + b > M32),
    "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_add_i32": lambda a, b: (a + b, not -(1 << 31) <= signed(a) + signed(b) < 1 << 31),
    "s_sub_i32": lambda a, b: (a - b, not -(1 << 31) <= signed(a) - signed(b) < 1 << 31),
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
    "s_and_b32": lambda a, b: (a & b, a & b != 0),
    "s_and_b64": lambda a, b: (a & b, a & b != 0),
    "s_or_b32": lambda a, b: (a | b, a | b != 0),
    "s_or_b64": lambda a, b: (a | b, a | b != 0),
    "s_xor_b32": lambda a, b: (a ^ b, a ^ b != 0),
    "s_xor_b64": lambda a, b: (a ^ b, a ^ b != 0),
    "s_andn2_b32": lambda a, b: (a & ~b, a & ~b != 0),
    "s_andn2_b64": lambda a, b: (a & ~b, a & ~b != 0),
    "s_nor_b64": lambda a, b: (~(a | b) & M64, ~(a | b) & M64 != 0),
    "s_nand_b64": lambda a, b: (~(a & b) & M64, ~(a & b) & M64 != 0),
    "s_orn2_b64": lambda a, b: (a | ~b & M64, (a | ~b & M64) != 0),
    "s_lshl_b32": lambda a, b: (a << (b & 31) & M32, a << (b & 31) & M32 != 0),
    "s_lshl_b64": lambda a, b: (a << (b & 63) & M64, a << (b & 63) & M64 != 0),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), a >> (b & 31) != 0),
    "s_lshr_b64": lambda a, b: (a >> (b & 63), a >> (b & 63) != 0),
    "s_ashr_i32": lambda a, b: (signed(a) >> (b & 31), signed(a) >> (b & 31) != 0),
    "s_ashr_i64": lambda a, b: (signed(a, 64) >> (b & 63), signed(a, 64) >> (b & 63) != 0),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)), signed(a) > signed(b)),
    "s_bfe_u32": lambda a, b: (a >> (b & 31) & ((1 << (b >> 16 & 127)) - 1),) * 2,
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_lshl1_add_u32": lambda a, b: (a * 2 + b, a * 2 + b > M32),
    "s_lshl2_add_u32": lambda a, b: (a * 4 + b, a * 4 + b > M32),
    "s_lshl3_add_u32": lambda a, b: (a * 8 + b, a * 8 + b > M32),
    "s_lshl4_add_u32": lambda a, b: (a * 16 + b, a * 16 + b > M32),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
}


def signed_field(width):
    """Bits of an integer of `width` bits, from where the second operand says and as many: they say scc."""

    def of(a, b):
        first, count = b & (width - 1), min(b >> 16 & 127, width)
        field = signed(signed(a, width) >> first & ((1 << count) - 1), count) if count else 0
        return field, field != 0

    return of


SCALARS |= {"s_bfe_i32": signed_field(32), "s_bfe_i64": signed_field(64)}
SCALAR_COMPARE = {
    **{"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b},
    **{"ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b},
}
SAVE_EXEC = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_andn2_saveexec_b64": lambda a, e: a & ~e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
}
NOTHING = (
    "s_nop",
    "s_sleep",
    "s_setprio",
    "s_inst_prefetch",
    "s_endpgm_ordered",
    "buffer_wbl2",
    "buffer_inv",
)


def decode(kernel, pc):
    """(what the instruction at pc does to a wave, or None; the address of the next; the registers that it names, a load
    those of its address alone)."""
    action, registers = instruction(kernel.code[pc])
    return action, sorted_after(kernel, pc), registers


@functools.cache
def instruction(text):
    """What an instruction does, once for all kernels and places that have it, and the registers that it names."""
    name, _, rest = text.partition(" ")
    if name in NOTHING:
        return None, frozenset()
    if name == "s_waitcnt":
        counts = [(counter, int(count)) for counter, count in re.findall(r"(\w+)\((\d+)\)", rest)]
        assert counts and all(counter in ("vmcnt", "lgkmcnt", "expcnt") for counter, _ in counts), text
        counts = [(counter, count) for counter, count in counts if counter != "expcnt"]  # of exports, which none makes

        def wait(w):
            for counter, count in counts:
                w.wait(counter, count)

        return wait, frozenset()
    operands, modifiers = split(rest)
    if name == "s_endpgm":

        def end(w):
            for counter in w.on_the_way:
                w.wait(counter, 0)
            return "end"

        return end, frozenset()
    if name == "s_barrier":
        return lambda w: "barrier", frozenset()
    for family in (branch, scalar_alu, scalar_load, vector_memory, lds_memory, matrix, lane, vector_alu):
        if (action := family(name, operands, modifiers)) is not None:
            is_load = "_load" in name or name.startswith(("ds_read", "ds_bpermute"))
            return action, frozenset(named(operands[1:] if is_load else operands, name))
    raise NotImplementedError(text)


def named(operands, name=""):
    """The registers of these operands, and those that the instruction has without naming them: "v1", "s2", "vcc"."""
    found = {"vcc"} if "vcc" in name else set()
    for text in operands:
        if "vcc" in text:
            found.add("vcc")
        for kind, one, several, first, last in re.findall(r"\b([vsa])(\d+)\b|\b([vsa])\[(\d+):(\d+)\]", text):
            numbers = [int(one)] if kind else range(int(first), int(last) + 1)
            found.update(f"{kind or several}{number}" for number in numbers)
    return found


def sorted_after(kernel, pc):
    if not hasattr(kernel, "next"):
        addresses = sorted(kernel.code)
        kernel.next = dict(zip(addresses, [*addresses[1:], addresses[-1] + 4], strict=True))
    return kernel.next[pc]


def split(rest):
    """Operands, and modifiers {name: text}; a bare word (off, glc, gds) is an operand or a modifier that is True."""
    modifiers = dict(re.findall(r"\b(\w+):(\[[^]]*\]|\S+)", re.sub(r"[vsa]\[\d+:\d+\]", "", rest)))
    rest = re.sub(r"\b\w+:(\[[-\d,]*\]|[\w.]+)(?![\d\]])", lambda m: m[0] if re.match(r"[vsa]\[", m[0]) else "", rest)
    words = [word.strip() for word in rest.split(",")]
    if words and " " in words[-1]:
        words[-1], *flags = words[-1].split()
        modifiers |= dict.fromkeys(flags, True)
    return [word for word in words if word], modifiers


def numbers(modifiers, name, default):
    return [int(x) for x in modifiers[name].strip("[]").split(",")] if name in modifiers else default


def branch(name, operands, modifiers):
    if not name.startswith(("s_branch", "s_cbranch")):
        return None
    distance = 4 * signed(int(operands[0]) & 0xFFFF, 16)
    taken = {
        "s_branch": lambda w: True,
        "s_cbranch_scc0": lambda w: not w.scc,
        "s_cbranch_scc1": lambda w: w.scc,
        "s_cbranch_vccz": lambda w: w.vcc == 0,
        "s_cbranch_vccnz": lambda w: w.vcc != 0,
        "s_cbranch_execz": lambda w: w.exec == 0,
        "s_cbranch_execnz": lambda w: w.exec != 0,
    }[name]

    def jump(w):
        if taken(w):
            w.pc += distance  # from the next instruction, where it stands already

    return jump


def scalar_alu(name, operands, modifiers):
    if not name.startswith("s_") or name.startswith(("s_load", "s_getreg", "s_setreg")):
        return None
    if name in SAVE_EXEC:
        combine, put, source = SAVE_EXEC[name], put_scalar(operands[0], True), scalar(operands[1], True)

        def save(w):
            old, new = w.exec, combine(source(w), w.exec) & M64
            put(w, old)
            w.set_exec(new)
            w.scc = int(new != 0)

        return save
    if found := re.fullmatch(r"s_cmpk?_(\w+?)_([iu])(32|64)", name):
        wide, is_signed = found[3] == "64", found[2] == "i"
        compare, (a, b) = SCALAR_COMPARE[found[1]], (scalar(x, wide) for x in operands)
        width = 64 if wide else 32
        view = (lambda x: signed(x, width)) if is_signed else (lambda x: x)

        def compared(w):
            w.scc = int(compare(view(a(w)), view(b(w))))

        return compared
    if name in ("s_bitcmp0_b32", "s_bitcmp1_b32"):
        a, b, want = scalar(operands[0]), scalar(operands[1]), int(name[8])

        def test(w):
            w.scc = int((a(w) >> (b(w) & 31) & 1) == want)

        return test
    if name in ("s_bitset0_b32", "s_bitset1_b32"):
        put, old, which = put_scalar(operands[0]), scalar(operands[0]), scalar(operands[1])
        value = int(name[8])
        return lambda w: put(w, old(w) & ~(1 << (which(w) & 31)) | value << (which(w) & 31))
    if name in ("s_cselect_b32", "s_cselect_b64"):
        wide = name.endswith("64")
        put, a, b = put_scalar(operands[0], wide), scalar(operands[1], wide), scalar(operands[2], wide)
        return lambda w: put(w, a(w) if w.scc else b(w))
    if name in ("s_cmov_b32", "s_cmov_b64"):
        wide = name.endswith("64")
        put, a = put_scalar(operands[0], wide), scalar(operands[1], wide)
        return lambda w: put(w, a(w)) if w.scc else None
    if name in ("s_addc_u32", "s_subb_u32"):
        put, a, b, sign = put_scalar(operands[0]), scalar(operands[1]), scalar(operands[2]), 1 if "add" in name else -1

        def carried(w):
            total = a(w) + sign * (b(w) + w.scc)
            put(w, total)
            w.scc = int(not 0 <= total <= M32)

        return carried
    if name in ("s_addk_i32", "s_mulk_i32"):
        put, a, k = put_scalar(operands[0]), scalar(operands[0]), signed(int(operands[1], 0) & 0xFFFF, 16)
        if name == "s_mulk_i32":
            return lambda w: put(w, a(w) * k)

        def add(w):
            total = signed(a(w)) + k
            put(w, total)
            w.scc = int(not -(1 << 31) <= total < 1 << 31)

        return add
    if name not in SCALARS:
        return None
    operation, wide = SCALARS[name], name.endswith("64")
    narrow_result = name in ("s_ff1_i32_b64", "s_bcnt1_i32_b64")
    put = put_scalar(operands[0], wide and not narrow_result)
    shifts = name.startswith(("s_lsh", "s_ash", "s_bfe")) and wide
    sources = [scalar(x, wide and not (shifts and i)) for i, x in enumerate(operands[1:])]

    def compute(w):
        result, scc = operation(*(read(w) for read in sources))
        put(w, result)
        if scc is not None:
            w.scc = int(bool(scc))

    return compute


def scalar_load(name, operands, modifiers):
    found = re.fullmatch(r"s_load_dword(?:x(\d+))?", name)
    if not found:
        return None
    count, (_, first) = int(found[1] or 1), (None, {"vcc": 106}.get(operands[0]) or register(operands[0])[1])
    base, offset = scalar(operands[1], True), scalar(operands[2]) if operands[2:] else (lambda w: 0)
    extra, written = int(modifiers.get("offset", "0"), 0), named(operands[:1])

    def load(w):
        address = base(w) + signed(offset(w), 32) + extra

        def done():
            words = w.memory.load(np.array([address], U64), 4 * count).view(U32)[0]
            if operands[0] == "vcc":
                w.vcc = int(words[0]) | int(words[1]) << 32
            else:
                w.s[first : first + count] = [int(word) for word in words]

        w.issue("scalar", written, done)

    return load


SIZES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


def vector_memory(name, operands, modifiers):
    found = re.fullmatch(r"(global|flat)_(load|store)_(\w+?)(?:x(\d))?(_d16(?:_hi)?)?", name)
    if not found or found[3] not in {*SIZES, "ushort_d16", "short_d16"}:
        return None
    is_store, count, kind = found[2] == "store", int(found[4] or 1), found[3]
    high = name.endswith("_d16_hi")
    keeps_half = "_d16" in name and not is_store
    size = SIZES[kind.replace("_d16", "")] * count
    data, at = (operands[1], operands[0]) if is_store else (operands[0], operands[1])
    first, offset = register(data)[1], int(modifiers.get("offset", "0"), 0)
    base = operands[2] if found[1] == "global" and operands[2] != "off" else None
    address = vector(at, base is None, False)
    if base is not None:
        base = scalar(base, True)
    sign = kind.startswith("s") and kind != "short"

    def addresses(w):
        where = in_lanes(np.asarray(address(w)).astype(U64))
        if base is not None:
            where = where + U64(base(w))
        return (where + U64(offset & M64))[w.mask]

    def shared(w, where):
        return (
            Memory({SHARED_BASE: w.lds}) if len(where) and where[0] >> U64(32) == U64(SHARED_BASE >> 32) else w.memory
        )

    space, written = found[1], set() if is_store else named(operands[:1])

    def store(w):
        where = addresses(w)
        words = np.stack([w.v[first + i][w.mask] for i in range(-(-size // 4))], 1)
        if high:
            words = words >> U32(16)
        # By a flat address into LDS: its counter says that it is there, as the compiler's model of memory has it.
        decides = {"lgkmcnt"} if space == "flat" and shared(w, where) is not w.memory else None
        w.issue(space, written, lambda: shared(w, where).store(where, words.view(np.uint8)[:, :size]), decides)

    def load(w):
        where, mask = addresses(w), w.mask

        def done():
            data = shared(w, where).load(where, size)
            if size < 4:
                kinds = {1: np.int8 if sign else np.uint8, 2: np.int16 if sign else np.uint16}
                words = data.view(kinds[size]).astype(I32).view(U32)
            else:
                words = data.view(U32)
            for i in range(words.shape[1]):
                if keeps_half:
                    old = w.v[first][mask]
                    new = words[:, 0] & U32(0xFFFF)
                    w.v[first][mask] = old & U32(0xFFFF) | new << U32(16) if high else old & U32(0xFFFF0000) | new
                else:
                    w.v[first + i][mask] = words[:, i]

        w.issue(space, written, done)

    return store if is_store else load


def lds_memory(name, operands, modifiers):
    if name in ("ds_bpermute_b32", "ds_permute_b32"):
        first, address, data = register(operands[0])[1], vector(operands[1]), vector(operands[2])
        offset, written = int(modifiers.get("offset", "0")), named(operands[:1])

        def permute(w):
            assert name == "ds_bpermute_b32"
            chosen = (in_lanes(address(w)).astype(np.int64) + offset) // 4 % LANES
            values = np.where(w.mask, in_lanes(data(w)), U32(0))[chosen]
            mask = w.mask
            w.issue("lds", written, lambda: np.copyto(w.v[first], values, where=mask))

        return permute
    if found := re.fullmatch(r"ds_(add|or)(_rtn)?_[ub](32|64)", name):
        return lds_atomic(found, operands, modifiers)
    found = re.fullmatch(r"ds_(read|write)(2)?(st64)?_(b|u|i)(8|16|32|64|96|128)(_d16(?:_hi)?)?", name)
    if not found:
        return None
    is_store, size = found[1] == "write", int(found[5]) // 8
    unit = size * (64 if found[3] else 1)
    if found[2]:
        offsets = [int(modifiers.get(f"offset{i}", "0")) * unit for i in (0, 1)]
    else:
        offsets = [int(modifiers.get("offset", "0"))]
    address = vector(operands[0 if is_store else 1])
    words = max(1, size // 4)
    assert not found[6], name

    def where(w, offset):
        return (in_lanes(address(w))[w.mask] + U32(offset)).astype(U64)  # which wraps at 32 bits

    if is_store:
        sources = [register(x)[1] for x in operands[1 : 1 + len(offsets)]]

        def store(w):
            parts = []
            for source, offset in zip(sources, offsets, strict=True):
                data = np.stack([w.v[source + i][w.mask] for i in range(words)], 1)
                parts.append((where(w, offset), data.view(np.uint8)[:, :size]))

            def done():
                for at, data in parts:
                    Memory({0: w.lds}).store(at, data)

            w.issue("lds", (), done)

        return store
    first, written = register(operands[0])[1], named(operands[:1])

    def load(w):
        places, mask = [where(w, offset) for offset in offsets], w.mask

        def done():
            for i, at in enumerate(places):
                part = Memory({0: w.lds}).load(at, size)
                if size < 4:
                    kinds = {1: np.int8 if found[4] == "i" else np.uint8, 2: np.int16 if found[4] == "i" else np.uint16}
                    part = part.view(kinds[size]).astype(I32)
                part = part.view(U32)
                for j in range(words):
                    w.v[first + i * words + j][mask] = part[:, j]

        w.issue("lds", written, done)

    return load


def lds_atomic(found, operands, modifiers):
    """Lane after lane, from the last: the hardware promises no order."""
    combine = {"add": lambda a, b: a + b, "or": lambda a, b: a | b}[found[1]]
    kind, returns = {"32": U32, "64": U64}[found[3]], found[2] is not None
    assert not (returns and kind is U64)
    offset, written = U32(int(modifiers.get("offset", "0"))), named(operands[:1]) if returns else ()
    first = register(operands[0])[1] if returns else None
    address, data = vector(operands[-2]), vector(operands[-1], kind is U64)

    def atomic(w):
        lanes = np.flatnonzero(w.mask)[::-1]
        places = (in_lanes(address(w)) + offset).astype(U64)
        values = np.broadcast_to(np.asarray(data(w), kind), (LANES,)).copy()

        def done():
            shared = Memory({0: w.lds})
            for i in lanes:
                at = places[i : i + 1]
                old = shared.load(at, kind().itemsize).view(kind)[0]
                shared.store(at, combine(old, values[i : i + 1]).view(np.uint8)[None])
                if returns:
                    w.v[first][i] = old[0]

        w.issue("lds", written, done)

    return atomic


def matrix(name, operands, modifiers):
    """D = A B + C on matrix cores. a: row lane % M, k = 4 (lane / M) + j; b likewise by columns. D: column lane % N."""
    found = re.fullmatch(r"v_mfma_f32_(16x16x16|32x32x8)_?(bf16|f16)(?:_1k)?(?:_e64)?", name)
    if not found:
        return None
    size, k = (16, 16) if found[1] == "16x16x16" else (32, 8)
    dtype = BFLOAT16 if found[2] == "bf16" else FLOAT16
    d, a, b = (register(x)[1] for x in operands[:3])
    c = register(operands[3])
    start = None if c else F32(0)
    assert c or operands[3] == "0"
    lanes, count = np.arange(LANES), size * size // LANES
    place_of_operand = (lanes % size)[:, None], 4 * (lanes // size)[:, None] + np.arange(4)
    registers = np.arange(count)[:, None]
    rows = 4 * (lanes // 16) + registers if size == 16 else (registers & 3) + 8 * (registers >> 2) + 4 * (lanes // 32)
    place_of_result = rows, np.broadcast_to(lanes % size, rows.shape)

    def operand(w, at):
        values = np.empty((size, k), dtype)
        values[place_of_operand] = np.stack([w.v[at], w.v[at + 1]], 1).view(np.uint16).view(dtype)
        return values

    def multiply(w):
        assert w.all, "matrix instructions ignore exec"
        total = np.empty((size, size), F32)
        total[place_of_result] = start if c is None else w.v[c[1] : c[1] + count].view(F32)
        left, right = operand(w, a), operand(w, b)
        width = reference.STEP[w.kernel.arithmetic]
        for first in range(0, k, width):
            part = slice(first, first + width)
            total = reference.step(w.kernel.arithmetic, left[:, None, part], right[None, :, part], total)
        w.v[d : d + count] = total[place_of_result].view(U32)

    return multiply


def lane(name, operands, modifiers):
    """What moves between lanes and scalars, and what has no lanes."""
    plain = re.sub(r"_e(32|64)$", "", name)
    if plain.endswith("_dpp"):
        return of_another_lane(plain.removesuffix("_dpp"), operands, modifiers)
    if plain == "v_readfirstlane_b32":
        put, source = put_scalar(operands[0]), vector(operands[1])

        def first(w):
            values = in_lanes(source(w))
            put(w, int(values[int(np.argmax(w.mask))]))

        return first
    if plain == "v_readlane_b32":
        put, source, index = put_scalar(operands[0]), vector(operands[1]), scalar(operands[2])
        return lambda w: put(w, int(source(w)[index(w) & 63]))
    if plain == "v_writelane_b32":
        number, source, index = register(operands[0])[1], scalar(operands[1]), scalar(operands[2])

        def write(w):
            w.v[number][index(w) & 63] = source(w)

        return write
    if plain in ("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"):
        number, counted, plus = register(operands[0])[1], vector(operands[1]), vector(operands[2])
        below = np.array([(1 << i) - 1 for i in range(LANES)], dtype=object)
        parts = np.array([int(x) >> 32 if "hi" in plain else int(x) & M32 for x in below], U64).astype(U32)

        def count(w):
            chosen = in_lanes(counted(w)) & parts
            ones = np.unpackbits(np.ascontiguousarray(chosen).view(np.uint8).reshape(LANES, 4), axis=1).sum(1)
            w.put(number, ones.astype(U32) + plus(w))

        return count
    if plain in ("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"):
        number, source = register(operands[0])[1], vector(operands[1])
        return lambda w: w.put(number, source(w))
    if plain == "v_nop":
        return lambda w: None
    return None


def of_another_lane(plain, operands, modifiers):
    """DPP: the first operand is another lane's; 0 of a lane that is not there, or not active."""
    lanes = np.arange(LANES)
    rows = lanes // 16 * 16
    if "row_shl" in modifiers:
        source = lanes + int(modifiers.pop("row_shl"))
        there = source < rows + 16
    elif modifiers.pop("wave_shl", None) == "1":
        source = lanes + 1
        there = source < LANES
    elif modifiers.pop("row_mirror", None):
        source, there = rows + 15 - lanes % 16, np.full(LANES, True)
    else:
        raise NotImplementedError(f"{plain} with {modifiers}")
    if modifiers != {"row_mask": "0xf", "bank_mask": "0xf", "bound_ctrl": "1"}:
        raise NotImplementedError(f"{plain} with {modifiers}")
    number, (moved, *others), operation = register(operands[0])[1], [vector(x) for x in operands[1:]], VALUES[plain]
    source = source % LANES

    def compute(w):
        values = np.where(there & w.mask[source], in_lanes(moved(w))[source], U32(0))
        w.put(number, operation(values, *(read(w) for read in others)))

    return compute


def selected(text, wide, choice):
    """An operand, or the part of its 32 bits that SDWA takes: zeros before it, or its sign."""
    signs = text.startswith("sext(")
    read = vector(text[5:-1] if signs else text, wide)
    if choice in (None, "DWORD"):
        return read
    kind, number = choice.split("_")
    size = 8 if kind == "BYTE" else 16
    if signs:
        return lambda w: bit_field(read(w), size * int(number), size)
    return lambda w: read(w) >> U32(size * int(number)) & U32((1 << size) - 1)


def compared_halves(compare, operands, modifiers):
    """v_cmp of fp16, whose literals are of 16 bits."""
    put = put_scalar(operands[0], True)
    assert not any("." in x for x in operands[1:]), "an inline constant is its fp16"
    a, b = (selected(x, False, modifiers.get(f"src{i}_sel")) for i, x in enumerate(operands[1:]))
    return lambda w: put(w, value_of(in_lanes(compare(half(a(w)), half(b(w)))) & w.mask))


def vector_alu(name, operands, modifiers):
    plain = re.sub(r"_(e32|e64|sdwa)$", "", name)
    if modifiers.keys() - {
        *("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "dst_sel", "dst_unused", "src0_sel", "src1_sel"),
    }:
        raise NotImplementedError(f"{name} with {modifiers}")
    if plain != "v_cmp_class_f32" and (found := re.fullmatch(r"v_cmp_(\w+?)_([fiu])(16|32|64)", plain)):
        if found[2] + found[3] == "f16":
            return compared_halves(COMPARE[found[1]], operands, modifiers)
        wide = found[3] == "64"
        compare, put = COMPARE[found[1]], put_scalar(operands[0], True)
        a, b = (selected(x, wide, modifiers.get(f"src{i}_sel")) for i, x in enumerate(operands[1:]))
        kind = {"f32": F32, "i32": I32, "u32": U32, "u16": U32, "i64": I64, "u64": U64}[found[2] + found[3]]
        raw = U64 if wide else U32
        low = raw({"16": 0xFFFF, "32": M32, "64": M64}[found[3]])

        def compared(w):
            result = compare(np.asarray(a(w) & low, raw).view(kind), np.asarray(b(w) & low, raw).view(kind))
            put(w, value_of(in_lanes(result) & w.mask))

        return compared
    if plain == "v_cmp_class_f32":
        put, a, b = put_scalar(operands[0], True), vector(operands[1]), vector(operands[2])
        return lambda w: put(w, value_of(in_lanes(classes(a(w)) & b(w) != 0) & w.mask))
    if plain == "v_cndmask_b32":
        number = register(operands[0])[1]
        a, b = (selected(x, False, modifiers.get(f"src{i}_sel")) for i, x in enumerate(operands[1:3]))
        if modifiers.get("dst_sel", "DWORD") != "DWORD":
            raise NotImplementedError(f"{name} with {modifiers}")
        chooser = scalar(operands[3] if operands[3:] else "vcc", True)
        return lambda w: w.put(number, np.where(mask_of(chooser(w)), b(w), a(w)))
    if plain in CARRY:
        if name.endswith("_sdwa"):
            raise NotImplementedError(f"{name} with {modifiers}")
        number, put = register(operands[0])[1], put_scalar(operands[1], True)
        a, b = vector(operands[2]), vector(operands[3])
        carry = scalar(operands[4], True) if operands[4:] else (lambda w: 0)
        combine = CARRY[plain]

        def carried(w):
            total = combine(
                np.asarray(a(w), U32).astype(I64), np.asarray(b(w), U32).astype(I64), mask_of(carry(w)).astype(I64)
            )
            put(w, value_of(in_lanes((total < 0) | (total > M32)) & w.mask))
            w.put(number, (total & M32).astype(U32))

        return carried
    if plain == "v_mad_u64_u32":
        number, a, b, c = register(operands[0])[1], vector(operands[2]), vector(operands[3]), vector(operands[4], True)
        return lambda w: w.put64(number, product64(a(w), b(w)) + c(w))  # whose carry nothing here reads
    if plain == "v_div_scale_f32":
        number, put, a = register(operands[0])[1], put_scalar(operands[1], True), vector(operands[2])

        def scale(w):
            w.put(number, a(w))
            put(w, 0)

        return scale
    if plain in ("v_fmac_f32", "v_mac_f32"):
        if name.endswith("_sdwa"):
            raise NotImplementedError(f"{name} with {modifiers}")
        number, a, b = register(operands[0])[1], vector(operands[1]), vector(operands[2])
        operation = fma if plain == "v_fmac_f32" else add_scaled
        return lambda w: w.put(number, operation(a(w), b(w), w.v[number]))
    if plain in ("v_madmk_f32", "v_fmamk_f32", "v_madak_f32", "v_fmaak_f32"):
        number, (a, b, c) = register(operands[0])[1], (vector(x) for x in operands[1:])
        operation = fma if "fma" in plain else add_scaled
        return lambda w: w.put(number, operation(a(w), b(w), c(w)))
    if plain in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        # A sign is that of the number, be it a half.
        minus = [x.startswith(("-v", "-s", "-|")) for x in operands[1:]]
        signs = [(U32(M32 >> 1 if "|" in x else M32), U32(m << 31)) for x, m in zip(operands[1:], minus, strict=True)]
        plainly = [x[m:].strip("|") for x, m in zip(operands[1:], minus, strict=True)]
        number, reads = register(operands[0])[1], [vector(x) for x in plainly]
        low, high = numbers(modifiers, "op_sel", [0] * 3), numbers(modifiers, "op_sel_hi", [0] * 3)

        def mixed(w):
            values = [
                bits(half(read(w) >> U32(16 * low[i])).astype(F32)) if high[i] else read(w)
                for i, read in enumerate(reads)
            ]
            total = fma(*(x & keep ^ flip for x, (keep, flip) in zip(values, signs, strict=True)))
            if plain == "v_fma_mix_f32":
                w.put(number, total)
            elif plain == "v_fma_mixlo_f16":
                w.put(number, w.v[number] & U32(0xFFFF0000) | half_bits(f(total)))
            else:
                w.put(number, w.v[number] & U32(0xFFFF) | half_bits(f(total)) << U32(16))

        return mixed
    if plain in ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32", "v_pk_mov_b32"):
        return packed(plain, operands, modifiers)
    if plain == "v_pk_lshrrev_b16":
        number, (by, x) = register(operands[0])[1], (vector(operand) for operand in operands[1:])
        chosen = numbers(modifiers, "op_sel", [0] * 2), numbers(modifiers, "op_sel_hi", [1] * 2)

        def shifted_halves(w):
            distance, value, result = by(w), x(w), U32(0)
            for place, (of_distance, of_value) in enumerate(chosen):
                half_of_value = value >> U32(16 * of_value) & U32(0xFFFF)
                result = result | half_of_value >> (distance >> U32(16 * of_distance) & U32(15)) << U32(16 * place)
            w.put(number, result)

        return shifted_halves
    if plain in WIDE:
        number, operation = register(operands[0])[1], WIDE[plain]
        shifted = plain != "v_mov_b64"
        position = {"v_lshl_add_u64": 1}.get(plain, 0)
        reads = [vector(x, not (shifted and i == position)) for i, x in enumerate(operands[1:])]
        return lambda w: w.put64(number, operation(*(read(w) for read in reads)))
    if plain not in VALUES:
        return None
    number, operation = register(operands[0])[1], VALUES[plain]
    if plain == "v_cvt_f32_f16" and operands[1].startswith(("-", "|")):
        # The sign is the half's: its bit 15, or that of the result, which has the same value
        read = selected(operands[1].strip("-|"), False, modifiers.get("src0_sel"))
        minus, magnitude = operands[1][0] == "-", "|" in operands[1]
        keep, flip = U32(M32 >> 1 if magnitude else M32), U32(int(minus) << 31)
        return lambda w: w.put(number, operation(read(w)) & keep ^ flip)
    reads = [selected(x, False, modifiers.get(f"src{i}_sel")) for i, x in enumerate(operands[1:])]
    part = modifiers.get("dst_sel", "DWORD")
    if part == "DWORD":
        return lambda w: w.put(number, operation(*(read(w) for read in reads)))
    kind, index = part.split("_")
    size = 8 if kind == "BYTE" else 16
    keep = U32(~(((1 << size) - 1) << size * int(index)) & M32)
    pads = modifiers.get("dst_unused") == "UNUSED_PAD"

    def put_part(w):
        old = U32(0) if pads else w.v[number] & keep
        result = operation(*(read(w) for read in reads)) & U32((1 << size) - 1)
        w.put(number, old | result << U32(size * int(index)))

    return put_part


def classes(x):
    """The bit that v_cmp_class tests, of each value."""
    x = np.asarray(x, U32)
    value, negative = f(x), x >> U32(31) != 0
    quiet = x & U32(1 << 22) != 0
    tiny = (x & U32(0x7F800000) == 0) & (value != 0)
    index = np.select(
        [np.isnan(value) & ~quiet, np.isnan(value), np.isinf(value), value == 0, tiny],
        [0, 1, np.where(negative, 2, 9), np.where(negative, 5, 6), np.where(negative, 4, 7)],
        np.where(negative, 3, 8),
    )
    return U32(1) << index.astype(U32)


def packed(name, operands, modifiers):
    """Two fp32 operations: on the halves of pairs of registers that op_sel (low) and op_sel_hi (high) choose."""
    number, count = register(operands[0])[1], len(operands) - 1
    low = numbers(modifiers, "op_sel", [0] * count)
    high = numbers(modifiers, "op_sel_hi", [1] * count)
    if name == "v_pk_mov_b32":
        high = [low[1]] * count  # the high half comes from the second operand alone
    negate = numbers(modifiers, "neg_lo", [0] * count), numbers(modifiers, "neg_hi", [0] * count)

    def halves(text):
        if constant(text, False) is not None:
            return [vector(text)] * 2
        found = register(text) or ("s", None)
        if found[0] == "v":
            return [vector(f"v{found[1] + i}") if found[1] < 256 else vector(f"a{found[1] - 256 + i}") for i in (0, 1)]
        if text == "vcc":
            return [vector("vcc_lo"), vector("vcc_hi")]
        return [vector(f"s{found[1] + i}") for i in (0, 1)]

    sources = [halves(x) for x in operands[1:]]
    operation = {
        "v_pk_fma_f32": fma,
        "v_pk_mul_f32": VALUES["v_mul_f32"],
        "v_pk_add_f32": VALUES["v_add_f32"],
    }.get(name)

    def compute(w):
        def value(i, half, which):
            x = sources[i][which](w)
            return x ^ U32(1 << 31) if negate[half][i] else x

        if name == "v_pk_mov_b32":
            first, second = np.copy(value(0, 0, low[0])), value(1, 0, low[1])
        else:
            first = operation(*(value(i, 0, low[i]) for i in range(count)))
            second = operation(*(value(i, 1, high[i]) for i in range(count)))
        w.put(number + 1, second)
        w.put(number, first)

    return compute
