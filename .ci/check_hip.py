"""check_hip.py LIBRARY: what the code objects of libpydet_hip.so may use, and what they must hold.

For every architecture and kernel, from metadata and disassembly: no scratch, no spilled vector registers, and at most
the vector registers, spilled scalars and static LDS of the table in tools/amd/limits.md; matrix instructions in the
kernels whose name says so; no product that is fused with a sum of +0, which loses the sign of -0; no shifts of vectors
of 16-bit numbers. An architecture without a matrix instruction of its own makes such a kernel an error, since a body
that the preprocessor left out compiles to nothing.

And what a stage of the matrix kernels' loops does, by tools/amd/estimate.py: at most the vector instructions of that
file's second table, at least its products (matrix instructions, or FMA of fp32) while loads are on the way and its
loads that waits leave there, and at most a fifth more than its estimated time.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools/amd"))

import estimate  # noqa: E402
import gcn  # noqa: E402

MATRIX_KERNELS = r"mfma"
# What the compiler makes of a product that is rounded to fp16; a square is never -0. (The like in fp32 it makes of an
# fmaf alone: that is a sum which begins with +0.)
ADDS_ZERO = r"v_(fma|mad)_mix(?:lo|hi)\w* \w+, (?!(\w+), \2, 0($| op_sel(:\[0,0|:\[1,1|_hi)))[^,]+, [^,]+, 0( |$)"
# Of words that the source takes for arrays of 16-bit numbers clang 19 makes vectors, with shifts whose result it
# takes for 0 where the hardware's is not; the source is to take words apart itself.
SHIFTS_HALVES = r"v_pk_(lshl|lshr|ashr)rev_"
ARCHS = ("gfx90a", "gfx942")
LIMITS = "tools/amd/limits.md"


def family(name):
    """gemm_ieee_kernel of _ZN5pydet12_GLOBAL__N_116gemm_ieee_kernelILb1ELb1EEEvNS_4GemmE."""
    if found := re.search(r"GLOBAL__N_1(\d+)([a-z]\w+)", name):
        return found[2][: int(found[1])]
    return name


def budget():
    """{(family, architecture): (vector registers, spilled scalars, bytes of static LDS)} of the table."""
    text = (ROOT / LIMITS).read_text()
    rows = re.findall(r"^\| `(\w+_kernel)`" + r" \| (\d+)" * (len(ARCHS) + 2) + r" \|", text, re.M)
    return {
        (name, arch): (int(numbers[i]), int(numbers[-2]), int(numbers[-1]))
        for name, *numbers in rows
        for i, arch in enumerate(ARCHS)
    }


def stages():
    """[(kernel, (M, N, K), type, k_chunk, architecture, products, VALU, products under way, loads left, us)] of the
    second table."""
    text = (ROOT / LIMITS).read_text()
    shape = r"(\d+)x(\d+)x(\d+)(?:, (fp32|e4m3))?(?:, `k_chunk` (\d+))?"
    rows = re.findall(r"^\| `(hip_\w+)` \| " + shape + r" \| (gfx\w+)" + r" \| ([\d.]+)" * 5 + r" \|", text, re.M)
    return [
        (name, (int(m), int(n), int(k)), dtype or "bf16", int(chunk or 0), arch, *map(int, counts), float(us))
        for name, m, n, k, dtype, chunk, arch, *counts, us in rows
    ]


def check_stages(library, folder):
    problems, rows = [], stages()
    assert {row[4] for row in rows} == set(ARCHS), f"{LIMITS} has no table of stages for every architecture"
    runtime = estimate.Library(library.resolve(), ARCHS[0], folder)
    rows.sort(key=lambda row: row[4])
    for name, shape, dtype, chunk, arch, products, most_valu, least_covered, least_left, most_us in rows:
        runtime.start(arch)
        if dtype == "e4m3":
            found = runtime.estimate_scaled(*shape, dtype=dtype, name=name)
        else:
            found = runtime.estimate(*shape, dtype=dtype, name=name, k_chunk=chunk)
        valu, us = found.stage.counts["VALU"], found.seconds * 1e6
        print(
            f"{name} {'x'.join(map(str, shape))}, {dtype}, k_chunk {chunk}, {arch}: a stage has "
            f"{found.stage.products} products, {valu} VALU; {found.stage.covered} products beside loads, of which "
            f"waits leave {found.stage.left}; estimated {us:.1f} us"
        )
        fine = found.stage.products == products and valu <= most_valu and us <= 1.2 * most_us
        if not fine or found.stage.covered < least_covered or found.stage.left < least_left:
            problems.append(
                f"{name} {shape}, {dtype}, k_chunk {chunk}, on {arch}: "
                f"want {products} products, at most {most_valu} VALU, at least {least_covered} products "
                f"beside loads, of which waits leave at least {least_left}, and at most {1.2 * most_us:.1f} us"
            )
    return problems


def main():
    library, problems, seen, matrix = Path(sys.argv[1]), [], {}, 0
    allowed = budget()
    with tempfile.TemporaryDirectory() as folder:
        problems += check_stages(library, Path(folder))
        for arch in ARCHS:
            objects = gcn.code_objects(library, arch)
            if not objects:
                problems.append(f"no code for {arch}")
            for elf in objects:
                for name, kernel in gcn.kernels(elf, Path(folder) / "kernels.co").items():
                    of, where = (family(name), arch), f"{arch} {name}"
                    registers, spills, scalars = (
                        int(kernel.metadata[key]) for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
                    )
                    uses = registers, scalars, kernel.lds
                    seen[of] = tuple(map(max, seen.get(of, uses), uses))
                    if kernel.scratch or spills:
                        problems.append(f"{where}: {kernel.scratch} bytes of scratch, {spills} spilled registers")
                    if of not in allowed:
                        problems.append(f"{where}: no row for {of[0]} in {LIMITS}")
                    elif any(used > most for used, most in zip(uses, allowed[of], strict=True)):
                        problems.append(
                            f"{where}: {registers} vector registers, {scalars} spilled scalars, {kernel.lds} bytes of "
                            f"LDS; want at most {allowed[of]}"
                        )
                    count = sum(text.startswith("v_mfma") for text in kernel.code.values())
                    matrix += count
                    if bool(count) != bool(re.search(MATRIX_KERNELS, name)):
                        problems.append(f"{where}: {count} matrix instructions")
                    if fused := [text for text in kernel.code.values() if re.match(ADDS_ZERO, text)]:
                        problems.append(f"{where}: {fused[0]} makes a product of -0 into +0")
                    if shifts := [text for text in kernel.code.values() if re.match(SHIFTS_HALVES, text)]:
                        problems.append(f"{where}: {shifts[0]} may shift a neighbour's bits in")
                    if not any(text == "s_endpgm" for text in kernel.code.values()) or len(kernel.code) < 20:
                        problems.append(f"{where}: no code")
    for name, arch in sorted(set(allowed) - set(seen)):
        problems.append(f"{LIMITS} has a row for {name}, which is not there on {arch}")
    for (name, arch), (registers, scalars, lds) in sorted(seen.items()):
        print(f"{name}, {arch}: at most {registers} vector registers, {scalars} spilled scalars, {lds} bytes of LDS")
    print(
        f"{library}: {len({name for name, _ in seen})} kernels and their instances on {', '.join(ARCHS)}, "
        f"{matrix} matrix instructions"
    )
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
