"""check_cuda.py TOOLS LIBRARY [OBJECT...]: what nvcc made of the kernels, read by cuobjdump, in the folder TOOLS.

- No kernel spills, of the library or of an object: none uses local memory or stack. Those of SPILL_OUTSIDE may, but not
  in an innermost loop around an HGMMA or a UTMALDG. Kernels that the Makefile's QUICK, of the environment, names are
  not looked at: their code is not that of a release.
- The Hopper GEMM runs on the tensor cores and is fed by TMA: it has HGMMA and UTMALDG.
- No innermost loop around an HGMMA or a UTMALDG holds MEMBAR.ALL.GPU, which once halved the speed of that loop. (Waits
  are tried again at the end of a kernel: the branches back from there go around whatever else a kernel's warps do.)
"""

import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

FED = ("HGMMA", "UTMALDG")
SPILL_OUTSIDE = (
    *("attention_forward", "attention_decode", "attention_backward_queries"),  # what they keep between their loops
    "attention_mma_kernel",  # a few numbers around a tile and around the call that makes it again row by row
    "make_again",  # of attention by mma.sync, and
    "compute_row",  # of attention, again where a result is not finite
    "attention_backward_fast_kernel",  # of attention's gradients by mma.sync, as attention_mma_kernel
)
LOCAL = re.compile(r"\b(LDL|STL)\b")
# Of a listing's some ten million instructions, those that are looked at; a branch backwards ends a loop.
LOOKED_AT = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@\S+ +)?(?:HGMMA|UTMALDG|BRA|MEMBAR|LDL|STL)\b[^;\n]*);")


def run(tools, *arguments):
    return subprocess.run([tools / "cuobjdump", *arguments], check=True, capture_output=True, text=True).stdout


def quick(code, words):
    """Whether a text names a kernel of an object that was made quickly. nvcc puts a file's name into those of its
    kernels; those of Hopper's objects of one type name the type, 1 bf16, 2 fp16, or that of a and then of b, 3 e4m3,
    4 e5m2."""
    for word in words:
        file, _, group = pathlib.Path(word).name.partition(".")
        kernel = rf"\d_{file}_cu_"
        if group == "e5m2":
            kernel += r"\w*4TypeE(3ELS\w{0,2}_)?4E"
        elif "sm90/" in word and group:
            kernel += rf"\w*4TypeE{1 + int(group) % 2 if file == 'gemm' else group}E"
        if re.search(kernel, code):
            return True
    return False


def spills(text, words):
    """Kernels that use local memory or stack, from --dump-resource-usage. Some functions of objects are of no file."""
    arch = ""
    whole = [code for code in text.split("Fatbin elf code:") if not quick(code, words)]
    for line in "".join(whole).splitlines():
        if found := re.match(r"arch = (\S+)", line):
            arch = found[1]
        if found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", line)
        if found and found.groups() != ("0", "0") and not any(word in name for word in SPILL_OUTSIDE):
            yield f"{arch} {name}: {found[1]} bytes of stack, {found[2]} of local memory"


def functions(text):
    """(name, [(address, instruction)]) of a SASS listing; of its instructions those that are looked at."""
    for code in text.split("Function : ")[1:]:
        name, _, body = code.partition("\n")
        yield name.strip(), [(int(address, 16), instruction) for address, instruction in LOOKED_AT.findall(body)]


def hopper_functions(tools, library, words):
    """Those of a library's code for sm_90a, an object at a time: objects that were made quickly are half of all code,
    and none is disassembled."""
    with tempfile.TemporaryDirectory() as folder:
        command = [tools / "cuobjdump", "--extract-elf", "sm_90a", pathlib.Path(library).resolve()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        for path in sorted(pathlib.Path(folder).iterdir()):
            names = b" ".join(re.findall(rb"_ZN\w+", path.read_bytes())).decode()
            if not quick(names, words):
                yield from functions(run(tools, "-sass", path))


def smallest_loops(body):
    """For each fed instruction, the smallest loop around it, as a range of addresses; a loop is a branch backwards."""
    loops = []
    for address, instruction in body:
        found = re.search(r"\bBRA(?:\.\S+)?\s.*?(0x[0-9a-f]+)", instruction)
        if found and int(found[1], 16) <= address:
            loops.append((int(found[1], 16), address))
    loops.sort(key=lambda loop: loop[1] - loop[0])
    found = set()
    for address, instruction in body:
        if any(word in instruction for word in FED):
            found.update([next((loop for loop in loops if loop[0] <= address <= loop[1]), None)])
    return found - {None}


def innermost(loops):
    """Those with no other of them inside."""
    return [(x, y) for x, y in loops if not any(x <= a and b <= y and (a, b) != (x, y) for a, b in loops)]


def main(tools, library, *objects):
    problems, kernels, words = [], 0, os.environ.get("QUICK", "").split()
    for path in (library, *objects):
        usage = run(tools, "--dump-resource-usage", path)
        problems += [f"{path}: {spill}" for spill in spills(usage, words)]
        found = len(re.findall(r"^\s*Function \S+:", usage, flags=re.M))
        kernels += found
        if not found:
            problems.append(f"{path}: no kernels found")
    counts, hopper = collections.Counter(), 0
    for name, body in hopper_functions(tools, library, words):
        fed = collections.Counter(word for _, text in body for word in FED if word in text)
        counts.update(fed)
        if not fed or quick(name, words):
            continue
        hopper += 1
        for begin, end in innermost(smallest_loops(body)):
            inside = [text for at, text in body if begin <= at <= end]
            if any("MEMBAR" in text and ".GPU" in text for text in inside):
                problems.append(f"{library}: sm_90a {name}: MEMBAR.GPU in the loop from {begin:#x} to {end:#x}")
            if any(map(LOCAL.search, inside)):
                problems.append(f"{library}: sm_90a {name}: local memory in the loop from {begin:#x} to {end:#x}")
    for word in FED:
        if not counts[word]:
            problems.append(f"{library}: sm_90a: no {word} anywhere")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{library}: {kernels} kernels without spills, {hopper} on Hopper's tensor cores or TMA: {dict(counts)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
