"""What one stage of a HIP kernel's loop does, and a time for it, from the machine code: nothing here was measured.

    python tools/amd/estimate.py LIBRARY [--arch gfx942] [--kernel NAME] [--dtype bf16] [--k-chunk 512 [--workspace]]
        [--latency 800] MxNxK ...

The library makes the launch on the stand-in runtime (fakehip.py), the interpreter (gcn.py) executes its first
workgroup, and each instruction of the first wave is given a time by the model below. Printed are, for the loop over K,
the instructions of one stage by kind, its loads by width, each wait with what it leaves on the way and how long it
takes; registers, LDS and waves a SIMD; and the time of the whole launch beside the memory's floor.

The model, in cycles of one SIMD (AMD's instruction set guides; where they are silent, round numbers):
- A wave issues one instruction at a time: 4 for vector, scalar and memory instructions, 8 for 64-bit vector ones.
- A matrix instruction keeps its unit for 16 (16x16x16) or 32 (32x32x8), twice that on gfx90a; the next one waits for
  it, and so does what reads its result.
- LDS answers after 64, and hands out 128 bytes a cycle to a CU; memory answers after 800, or --latency (weights are
  read once, so no cache has them), scalar loads after 200. What waits is s_waitcnt, or a barrier, which costs 40.
- The loads of a CU's waves, all 64 lanes of each, take its cache a cycle for 64 bytes.
- Waves of a SIMD share its issue: a workgroup takes the longer of its first wave's own time, and the issue and matrix
  time of all waves that are on the SIMD at once.
- A launch takes 2 us (of several for one call, each), and its rounds of workgroups one after the other; and not less
  than its bytes, each counted once, at 5.3 TB/s (gfx942) or 1.6 (gfx90a), of which a CU gets at most 64 a cycle.
"""

import argparse
import collections
import ctypes
import dataclasses
import itertools
import pathlib
import re
import sys
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tests")]

import capi  # noqa: E402
import fakehip  # noqa: E402
import gcn  # noqa: E402
from cases import DTYPES  # noqa: E402
from reference_fp8 import E4M3, E5M2  # noqa: E402

FP8 = {"e4m3": E4M3, "e5m2": E5M2}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU as its programs see it."""

    name: str
    units: int
    hertz: float
    bandwidth: float  # bytes a second
    matrix: dict  # cycles of a matrix instruction by its shape
    registers: int = 512  # a lane of a SIMD has, for all its waves
    lds: int = 65536
    latency: int = 800  # cycles until memory answers


CHIPS = {
    "gfx942": Chip("MI300X", 304, 2.1e9, 5.3e12, {"16x16x16": 16, "32x32x8": 32}),
    "gfx90a": Chip("MI250X, one die", 110, 1.7e9, 1.6e12, {"16x16x16": 32, "32x32x8": 64}),
}
ISSUE, WIDE, LDS, SCALAR, BARRIER, LAUNCH = 4, 8, 64, 200, 40, 2e-6
PRODUCTS = ("v_mfma", "v_fma_f32", "v_fmac_f32", "v_pk_fma_f32", "v_fma_mix_f32")
KINDS = ("MFMA", "VALU", "SALU", "LDS", "loads", "stores")


def kind_of(name):
    if name.startswith("v_mfma"):
        return "MFMA"
    if name.startswith(("global_load", "flat_load", "buffer_load", "s_load")):
        return "loads"
    if name.startswith(("global_store", "flat_store", "buffer_store", "global_atomic")):
        return "stores"
    if name.startswith("ds_"):
        return "LDS"
    return "VALU" if name.startswith("v_") else "wait" if name == "s_waitcnt" else "SALU"


def bytes_of(name):
    """Of a lane's access."""
    if found := re.search(r"(?:dword|_b32|_b64|_b96|_b128)(?:x(\d))?", name):
        size = {"_b64": 8, "_b96": 12, "_b128": 16}.get(found[0], 4 * int(found[1] or 1))
        return size * (2 if re.match(r"ds_(read|write)2", name) else 1)
    return 1 if "byte" in name or "b8" in name else 2


class Clock:
    """The first wave's time, instruction by instruction."""

    def __init__(self, kernel, chip):
        self.kernel, self.chip = kernel, chip
        self.now = self.matrix_free = 0
        self.ready = {}  # register -> when a matrix instruction has written it
        self.queues = {"vmcnt": [], "lgkmcnt": []}  # when what is on the way is done, oldest first
        self.asked = 0  # bytes of all lanes' loads
        self.trace = []  # (address, start, cycles waited)
        self.covered = set()  # of the trace, the products (MFMA, or FMA in fp32) while loads are on the way
        self.known = {}

    def decoded(self, at):
        if at not in self.known:
            name, _, rest = self.kernel.code[at].partition(" ")
            operands, _ = gcn.split(rest)
            self.known[at] = name, kind_of(name), operands, gcn.named(operands)
        return self.known[at]

    def __call__(self, wave, at):
        name, kind, operands, registers = self.decoded(at)
        started = self.now
        if kind == "wait":
            for counter, count in re.findall(r"(\w+)\((\d+)\)", self.kernel.code[at]):
                queue = self.queues.get(counter, [])  # expcnt counts what none of these kernels has
                done = queue[: max(0, len(queue) - int(count))]
                self.now = max([self.now, *done])
                del queue[: len(done)]
        elif name == "s_barrier":
            self.now += BARRIER
        elif kind == "MFMA":
            cycles = self.chip.matrix[re.search(r"\d+x\d+x\d+", name)[0]]
            self.now = max(self.now, self.matrix_free)
            self.matrix_free = self.now + cycles
            for register in gcn.named(operands[:1]):
                self.ready[register] = self.matrix_free + 8
        elif kind in ("VALU", "LDS", "stores", "loads") and self.ready:
            for register in registers & self.ready.keys():
                self.now = max(self.now, self.ready.pop(register))
        waited = self.now - started
        if name.startswith(PRODUCTS) and self.queues["vmcnt"]:
            self.covered.add(len(self.trace))
        if kind in ("loads", "stores"):
            self.asked += bytes_of(name) * gcn.LANES if kind == "loads" and name[0] != "s" else 0
            counters = {"s": ["lgkmcnt"], "f": ["vmcnt", "lgkmcnt"]}.get(name[0], ["vmcnt"])
            for counter in counters:
                done = self.now + (SCALAR if name[0] == "s" else self.chip.latency)
                self.queues[counter].append(max([done, *self.queues[counter][-1:]]))
        elif kind == "LDS":
            transfer = bytes_of(name) * gcn.LANES // 128
            self.queues["lgkmcnt"].append(
                max([self.now + LDS + transfer, *(x + transfer for x in self.queues["lgkmcnt"][-1:])])
            )
        self.trace.append((at, started, waited))
        self.now += WIDE if re.search(r"_[bfiu]64|pk_\w+_f32", name) and kind == "VALU" else ISSUE


def loop_of(clock):
    """The branch back that closes the loop over K: of those with the most matrix instructions (or fmas) between their
    first and last turn, the outermost. And the instructions of its turns: none where K is too short for a second."""
    code, best = clock.kernel.code, (0, 0, [])
    taken = collections.defaultdict(list)
    for i, (at, *_) in enumerate(clock.trace[:-1]):
        if code[at].startswith(("s_cbranch", "s_branch")) and clock.trace[i + 1][0] <= at:
            taken[at].append(i)

    def works(part):
        named = (code[clock.trace[i][0]] for i in part)
        return sum(text.startswith(PRODUCTS) for text in named)

    for places in taken.values():
        turns = [range(a + 1, b + 1) for a, b in itertools.pairwise(places)]
        if turns and (score := (sum(map(works, turns)), -len(turns))) > best[:2]:
            best = *score, turns
    return best[2]


@dataclasses.dataclass
class Stage:
    """One turn of the loop."""

    counts: dict
    widths: dict  # (kind, bytes a lane) -> instructions
    waits: list  # (text, cycles waited)
    issue: int
    cycles: int
    matrix: int
    products: int  # MFMA, or FMA in fp32, which are VALU too
    covered: int  # of them, while loads are on the way
    left: int  # loads that the strictest wait for memory leaves on the way


def stage_of(clock, places, following):
    counts, widths, waits, matrix, left, products = collections.Counter(), collections.Counter(), [], 0, [], 0
    turn = [clock.trace[i] for i in places]
    for at, _, waited in turn:
        text = clock.kernel.code[at]
        name, kind, *_ = clock.decoded(at)
        counts[kind] += 1
        products += name.startswith(PRODUCTS)
        if kind in ("loads", "stores", "LDS"):
            widths[re.sub(r"_b\d+|_dword.*|_u?short.*|_u?byte.*|2st64|2", "", name), bytes_of(name)] += 1
        if kind == "MFMA":
            matrix += clock.chip.matrix[re.search(r"\d+x\d+x\d+", name)[0]]
        if kind == "wait" or name == "s_barrier" or (kind == "MFMA" and waited > 64):
            waits.append((text if kind != "MFMA" else "matrix unit", waited))
        if found := re.search(r"vmcnt\((\d+)\)", text):
            left.append(int(found[1]))
    issue = ISSUE * sum(counts.values())
    covered = len(clock.covered & set(places))
    return Stage(counts, widths, waits, issue, following - turn[0][1], matrix, products, covered, min(left, default=0))


@dataclasses.dataclass
class Launch:
    clock: Clock  # of the first wave
    shape: list
    shared: int
    waves: int = 0  # of the first workgroup that have work, by the instructions of all


@dataclasses.dataclass
class Estimate:
    kernel: str  # of the library's table
    symbol: str
    stages: int  # turns of the loop; 1: the stage is all that the wave does
    stage: Stage
    waves: int  # of a workgroup
    groups: int
    occupancy: int  # waves a SIMD
    registers: int
    lds: int
    seconds: float
    floor: float


def occupancy_of(kernel, waves, shared, chip):
    """Workgroups on a CU at once, and waves a SIMD then."""
    used = -(-int(kernel.metadata["vgpr_count"]) // 8) * 8
    by_registers = (
        min(8, chip.registers // max(used, 8)) * 4 // waves
        if waves <= 4
        else min(8, chip.registers // used) * 4 // waves
    )
    by_lds = chip.lds // max(kernel.lds + shared, 1)
    groups = max(1, min(by_registers, by_lds, 32))
    return groups, -(-groups * waves // 4)


class Library:
    """A library on the stand-in runtime, whose launches execute one workgroup."""

    def __init__(self, path, arch, folder):
        self.runtime = fakehip.StandIn(fakehip.build(path, folder), path, folder)
        self.runtime.execute, self.lib = self.execute, capi.ffi.dlopen(str(path))
        self.forget = ctypes.CDLL(str(path)).pydet_exchange_forget_devices
        self.start(arch)

    def start(self, arch):
        """As another GPU."""
        self.runtime.start(arch)
        self.runtime.fake.fakehip_units(CHIPS[arch].units)
        self.forget()
        self.chip = CHIPS[arch]

    def execute(self, kernel, shape, shared, segment):
        launch = Launch(Clock(kernel, self.chip), shape, shared)
        executed = gcn.launch(
            kernel, shape[:3], shape[3:], shared, segment, self.runtime.memory(), watch=launch.clock, groups=[(0, 0, 0)]
        )
        launch.waves = -(-executed // len(launch.clock.trace))
        self.launches.append(launch)

    def estimate(self, m, n, k, dtype="bf16", name=None, k_chunk=0, workspace=False):
        """Of a[m, k] times w[n, k] transposed, as skinny_gemm and a forward pass have them."""
        rng = np.random.default_rng(0)
        a, w = (rng.standard_normal((rows, k), np.float32).astype(DTYPES[dtype]) for rows in (m, n))
        out = np.zeros((m, n), DTYPES[dtype])
        for array in (a, w, out):
            self.runtime.own(array)
        rocm = (10, 0)
        tensors = [capi.Tensor(x, device=rocm) for x in (a, w)] + [capi.Tensor(out, device=rocm)]
        forced = {"kernel": name, "arithmetic": "ieee" in name} if name else {}
        given = capi.options("pydet_skinny_gemm_options", k_chunk=k_chunk, **forced)
        null, size = capi.ffi.NULL, capi.ffi.new("uint64_t *")
        if workspace:
            assert self.lib.pydet_skinny_gemm_workspace(m, n, k, given, size) == 0
            memory = np.zeros(size[0] + 256, np.uint8)
            self.runtime.own(memory)
            given.workspace = capi.ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 256)
            given.workspace_size = size[0]
        self.launches = []
        status = self.lib.pydet_skinny_gemm(null, tensors[0].c, tensors[1].c, null, tensors[2].c, given)
        self.runtime.fake.fakehip_disown()
        if self.runtime.problem:
            raise self.runtime.problem
        if status:
            sys.exit(capi.ffi.string(self.lib.pydet_last_error()).decode())
        return self.read(capi.ffi.string(self.lib.pydet_last_kernel()).decode(), a.nbytes, w.nbytes, out.nbytes)

    def estimate_scaled(self, m, n, k, dtype="e4m3", name=None):
        """Of fp8: a[m, k] with scales by groups of 128 along k, w[n, k] by blocks of 128 x 128, out in bf16."""
        rng, groups = np.random.default_rng(0), lambda extent: -(-extent // 128)
        a, w = (rng.integers(0, 0x70, (rows, k), np.uint8).view(FP8[dtype]) for rows in (m, n))
        a_scale, w_scale = np.ones((m, groups(k)), np.float32), np.ones((groups(k), groups(n)), np.float32)
        out, rocm = np.zeros((m, n), DTYPES["bf16"]), (10, 0)
        for array in (a, w, a_scale, w_scale, out):
            self.runtime.own(array.view(np.uint8))
        turned = capi.Tensor(w, shape=(k, n), strides=(1, k), device=rocm)
        x, x_scale, b_scale, result = (capi.Tensor(of, device=rocm) for of in (a, a_scale, w_scale, out))
        forced = {"kernel": name} if name else {}
        given = capi.options("pydet_scaled_gemm_options", k_chunk=128, arithmetic=1, **forced)
        self.launches, null = [], capi.ffi.NULL
        operands = x.c, x_scale.c, turned.c, b_scale.c, null, result.c
        status = self.lib.pydet_scaled_gemm(null, *operands, given)
        self.runtime.fake.fakehip_disown()
        if self.runtime.problem:
            raise self.runtime.problem
        if status:
            sys.exit(capi.ffi.string(self.lib.pydet_last_error()).decode())
        sizes = a.nbytes + a_scale.nbytes, w.nbytes + w_scale.nbytes, out.nbytes
        return self.read(capi.ffi.string(self.lib.pydet_last_kernel()).decode(), *sizes)

    def read(self, name, *operands):
        chip, first = self.chip, self.launches[0]
        clock, kernel = first.clock, first.clock.kernel
        turns = loop_of(clock)
        in_loop = bool(turns)
        turns = turns or [range(len(clock.trace) - 1)]  # all that the wave does
        middle = turns[len(turns) // 2]  # neither the first nor the last, which prepare and end
        stage = stage_of(clock, middle, clock.trace[middle[-1] + 1][1])
        taken = [self.cycles(launch) for launch in self.launches]
        waves, groups, occupancy, _ = taken[0]
        traffic = sum(operands)
        per_unit = 64 * chip.hertz * min(groups, chip.units)
        seconds = sum(cycles for *_, cycles in taken) / chip.hertz
        seconds = LAUNCH * len(taken) + max(seconds, traffic / min(chip.bandwidth, per_unit))
        return Estimate(
            name, kernel.name, len(turns) + 1 if in_loop else 1, stage, waves, groups, occupancy,
            int(kernel.metadata["vgpr_count"]), kernel.lds + first.shared, seconds, traffic / chip.bandwidth,
        )  # fmt: skip

    def cycles(self, launch):
        """(waves of a workgroup, workgroups, waves a SIMD, cycles)."""
        clock, kernel, chip = launch.clock, launch.clock.kernel, self.chip
        waves = -(-int(np.prod(launch.shape[3:])) // gcn.LANES)
        groups = int(np.prod(launch.shape[:3]))
        at_once, occupancy = occupancy_of(kernel, waves, launch.shared, chip)
        here = min(at_once, -(-groups // chip.units))  # workgroups that a CU has at once
        busy = ISSUE * len(clock.trace)
        matrix = sum(
            chip.matrix[re.search(r"\d+x\d+x\d+", kernel.code[at])[0]]
            for at, *_ in clock.trace
            if "mfma" in kernel.code[at]
        )
        on_simd = -(-here * launch.waves // 4)
        cycles = max(clock.now, on_simd * max(busy, matrix), here * launch.waves * clock.asked // 64)
        return waves, groups, occupancy, -(-groups // (chip.units * here)) * cycles


def describe(shape, e, chip):
    s = e.stage
    counts = ", ".join(f"{s.counts[kind]} {kind}" for kind in KINDS if s.counts[kind])
    widths = ", ".join(f"{count} {name} of {size} bytes" for (name, size), count in sorted(s.widths.items()))
    waits = "\n".join(f"    {text}: {cycles} cycles" for text, cycles in s.waits)
    return (
        f"{shape} by {e.kernel}\n  {e.symbol}\n"
        f"  {e.groups} workgroups of {e.waves} waves, {e.registers} registers, {e.lds} bytes of LDS, "
        f"{e.occupancy} waves a SIMD\n"
        f"  {f'a stage of {e.stages}' if e.stages > 1 else 'all that the wave does, whose loop has no second turn'}: "
        f"{counts}\n  {widths}\n"
        f"  {s.cycles} cycles, of which {s.matrix} the matrix unit works and {s.issue} instructions are issued\n"
        f"  {s.covered} of {s.products} products while loads are on the way, of which waits leave {s.left}; "
        f"waits:\n{waits}\n"
        f"  estimated {e.seconds * 1e6:.1f} us on a {chip.name}; the memory's floor is {e.floor * 1e6:.1f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("shapes", nargs="+", help="MxNxK")
    parser.add_argument("--arch", choices=CHIPS, default="gfx942")
    parser.add_argument("--kernel", help="by its name in pydet.kernels(); default: the library's choice")
    parser.add_argument("--dtype", choices=[*DTYPES, *FP8], default="bf16", help="of fp8: scaled_gemm")
    parser.add_argument("--k-chunk", type=int, default=0)
    parser.add_argument(
        "--workspace", action="store_true", help="with the memory that pydet_skinny_gemm_workspace says"
    )
    parser.add_argument("--latency", type=int, default=800, help="cycles until memory answers")
    arguments = parser.parse_args()
    if missing := fakehip.missing(arguments.library):
        sys.exit("; ".join(missing))
    with tempfile.TemporaryDirectory() as folder:
        library = Library(arguments.library.resolve(), arguments.arch, pathlib.Path(folder))
        library.chip = dataclasses.replace(library.chip, latency=arguments.latency)
        for shape in arguments.shapes:
            m, n, k = map(int, shape.split("x"))
            if arguments.dtype in FP8:
                e = library.estimate_scaled(m, n, k, arguments.dtype, arguments.kernel)
            else:
                e = library.estimate(m, n, k, arguments.dtype, arguments.kernel, arguments.k_chunk, arguments.workspace)
            print(describe(shape, e, library.chip), flush=True)


if __name__ == "__main__":
    main()
