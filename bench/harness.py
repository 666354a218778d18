"""Times variants of one problem side by side, checks the bits of what was timed, and writes a table, JSON and a plot.

A row is one problem; its variants are ways to compute it: pydet, kernels of pydet forced by name, and peers. They take
turns, sample by sample, so that a machine that slows down slows them all. Each call of a sample takes the next of
several sets of buffers, as many as make the last-level cache forget the first. A figure is the median of its samples.

A device is a class that times calls, clears and reads outputs, and says how many samples to take: Cpu is the one here,
bench/cuda.py has the others.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "raw"  # bench/summary.py makes of them what the tree keeps


@dataclass
class Variant:
    """A way to compute a row: one call for each set of buffers. outputs: set 0's, where their bits are promised."""

    name: str
    calls: list[Callable[[], object]]
    outputs: list[Any] = field(default_factory=list)


@dataclass
class Row:
    """A problem. work: operations or bytes of one call, None where only time counts; unit: what 1e9 of it a second is
    called. peer: the variant that the others are compared with. agrees: set 0's outputs have the bits of every other
    kernel. one_result: all outputs have the same bits. note: what the reader of the table must know."""

    op: str
    shape: str
    dtype: str
    variants: list[Variant]
    peer: str
    work: float | None = None
    unit: str = ""
    agrees: Callable[[], bool] | None = None
    note: str = ""
    one_result: bool = True


class Cpu:
    """The wall clock. A sample starts with calls that are not timed, for as long as the threads of the variant before
    may spin (OpenBLAS 0.3.31: some 100 ms on a Zen 4). One in which this process's threads waited for a core is taken
    again; the last of RETRIES counts as it is, and as disturbed."""

    SETTLE_SECONDS = 0.12
    WAITED = 0.01  # of the sample's time
    RETRIES = 6
    SAMPLES = 15  # of each variant of a row
    FEWEST_SAMPLES = 5  # where SAMPLES of them would take more than
    ROW_SECONDS = 30
    SAMPLE_SECONDS = 0.03  # a sample makes as many calls as fill this, and at least one

    disturbed = 0  # samples until now

    def start_row(self):
        pass

    def sample(self, calls, count):
        """Seconds a call."""
        endless = itertools.cycle(calls)
        for _ in range(self.RETRIES):
            settled = time.perf_counter() + self.SETTLE_SECONDS
            while time.perf_counter() < settled:
                next(endless)()
            waited = self.waited()
            start = time.perf_counter()
            for call in itertools.islice(endless, count):
                call()
            seconds = time.perf_counter() - start
            if self.waited() - waited <= self.WAITED * seconds:
                return seconds / count
        self.disturbed += 1
        return seconds / count

    def take(self, calls, count):
        """Seconds a call of a sample that counts, and what else was read meanwhile."""
        return self.sample(calls, count), {}

    def waited(self):
        """Seconds for which threads of this process were ready to run but had no core; 0 where Linux does not say."""
        nanoseconds = 0
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has just ended
                nanoseconds += int(path.read_text().split()[1])
        return nanoseconds / 1e9

    def clear(self, array):
        array.fill(0)

    def read(self, array):
        return array.tobytes()


def cache_bytes():
    """Of the last-level cache; 32 MiB where the system does not say."""
    names = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
    return next((size for n in names if n in os.sysconf_names and (size := os.sysconf(n)) > 0), 32 << 20)


def buffer_sets(bytes_per_set):
    """How many sets of buffers to walk, so that those between two uses of one fill the last-level cache; at most 64."""
    return min(64, 1 + -(-cache_bytes() // bytes_per_set))


# ---- Measuring -------------------------------------------------------------------------------------------------------


def kernel_of(call):
    """The kernel of pydet's that a call launches, of several the last one; None where it launches none."""
    import numpy as np

    import pydet

    x = np.zeros((1, 1), np.float32)
    for other in (pydet.softmax, partial(pydet.rmsnorm, eps=1.0)):  # what one of them launches the call may launch too
        other(x)
        before = pydet.last_kernel()
        call()
        if pydet.last_kernel() != before:
            return pydet.last_kernel()
    return None


def measure(row, device, threads):
    """Times the row's variants in turn and returns the table's entry of each."""

    def digest(variant):
        return hashlib.sha256(b"".join(device.read(array) for array in variant.outputs)).hexdigest()

    promised = [v for v in row.variants if v.outputs]
    digests = {}
    for v in promised:
        for call in v.calls:
            call()
        digests[v.name] = digest(v)
        for array in v.outputs:
            device.clear(array)

    counts = {}
    for v in row.variants:
        seconds = device.sample(v.calls, 1)
        if seconds >= device.SAMPLE_SECONDS:  # once may be a hiccup, and a sample of one short call says little
            seconds = min(seconds, device.sample(v.calls, 1))
        counts[v.name] = 1
        if seconds < device.SAMPLE_SECONDS:
            seconds = device.sample(v.calls, max(len(v.calls), round(0.1 * device.SAMPLE_SECONDS / seconds)))
            counts[v.name] = max(len(v.calls), round(device.SAMPLE_SECONDS / seconds))

    samples, readings = ({v.name: [] for v in row.variants} for _ in range(2))
    disturbed = dict.fromkeys(samples, 0)
    start = time.perf_counter()
    for taken in range(device.SAMPLES):
        if taken >= device.FEWEST_SAMPLES and time.perf_counter() - start > device.ROW_SECONDS:
            break
        for v in row.variants:
            before = device.disturbed
            seconds, read = device.take(v.calls, counts[v.name])
            samples[v.name].append(seconds)
            readings[v.name].append(read)
            disturbed[v.name] += device.disturbed - before

    # What the timed calls left, computed anew since the outputs were cleared.
    bits_ok = all(digest(v) == digests[v.name] for v in promised)
    bits_ok = (
        bits_ok and (not row.one_result or len(set(digests.values())) <= 1) and (row.agrees is None or row.agrees())
    )

    kernels = {v.name: kernel_of(v.calls[0]) for v in row.variants}
    entries = []
    peer = statistics.median(samples[row.peer]) if row.peer in samples else None
    for v in row.variants:
        low, median, high = statistics.quantiles(samples[v.name], n=4, method="inclusive")
        entries.append(
            {
                "op": row.op,
                "shape": row.shape,
                "dtype": row.dtype,
                "threads": threads,
                "variant": v.name,
                "kernel": kernels[v.name],
                "us": median * 1e6,
                "us_quartiles": [low * 1e6, high * 1e6],
                "rate": row.work / median / 1e9 if row.work else None,
                "unit": row.unit,
                "peer": row.peer if peer and v.name != row.peer else None,
                "times_peer": peer / median if peer and v.name != row.peer else None,
                "bits_ok": bits_ok if v.outputs else None,
                "sha256": digests.get(v.name),
                "samples": len(samples[v.name]),
                "disturbed": disturbed[v.name],
                "calls_per_sample": counts[v.name],
                "buffer_sets": len(v.calls),
                "note": row.note,
            }
            | {key: round(statistics.fmean(read[key] for read in readings[v.name])) for key in readings[v.name][0]}
        )
    return entries


def run(rows, device, threads):
    """Measures rows, given as functions that build one each, so that only one row's buffers exist; prints the table."""
    from tqdm import tqdm

    entries, notes = [], {}
    print(table_head(), flush=True)
    for build in tqdm(rows, unit="row", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False):
        device.start_row()
        for entry in measure(build(), device, threads):
            entries.append(entry)
            tqdm.write(table_line(entry), file=sys.stdout)
            sys.stdout.flush()
            if entry["note"]:
                notes[entry["note"]] = None
    for note in notes:
        print(f"Note: {note}.")
    return entries


# ---- Writing ---------------------------------------------------------------------------------------------------------

# Title, width, and the cell of an entry; a number is set to the right.
COLUMNS = (
    ("op", 16, lambda e: e["op"]),
    ("shape", 26, lambda e: e["shape"]),
    ("dtype", 5, lambda e: e["dtype"]),
    ("threads", 7, lambda e: str(e["threads"])),
    ("variant", 26, lambda e: e["variant"]),
    ("us", -10, lambda e: f"{'~' * (e['disturbed'] > e['samples'] // 2)}{e['us']:.{2 if e['us'] < 100 else 0}f}"),
    ("rate", -14, lambda e: f"{e['rate']:.2f} {e['unit']}" if e["rate"] else ""),
    ("x peer", -6, lambda e: f"{e['times_peer']:.2f}" if e["times_peer"] else ""),
    ("MHz, W", -9, lambda e: f"{e['mhz']}, {e['watts']}" if "mhz" in e else ""),
    ("bits ok", -7, lambda e: {True: "yes", False: "NO", None: ""}[e["bits_ok"]]),
    ("kernel", 36, lambda e: e.get("kernel") or ""),
)


def table_head():
    titles = "".join(f"| {title:{width}} " if width > 0 else f"| {title:>{-width}} " for title, width, _ in COLUMNS)
    rules = "".join("|" + "-" * (abs(width) + 1) + ("-" if width > 0 else ":") for _, width, _ in COLUMNS)
    return f"{titles}|\n{rules}|"


def table_line(entry):
    return "".join(f"| {cell(entry):{'<' if width > 0 else '>'}{abs(width)}} " for _, width, cell in COLUMNS) + "|"


def machine():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "last_level_cache_bytes": cache_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit():
    """What PYDET_COMMIT says, as where a tree was carried to another machine; else that of the checkout that runs."""
    if "PYDET_COMMIT" in os.environ:
        return os.environ["PYDET_COMMIT"]
    described = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    return None


def versions():
    import numpy as np

    import pydet

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found = {
        "pydet": pydet.__version__,
        "commit": commit(),
        "numerics": pydet.NUMERICS,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }
    try:
        import torch

        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["gpu"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
    except ImportError:
        found["torch"] = None
    return found


def write_json(path, command, entries, state):
    """state: of the machine while it measured."""
    data = {
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine() | state,
        "versions": versions(),
        "rows": entries,
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_table(path, entries):
    path.write_text("\n".join([table_head(), *map(table_line, entries)]) + "\n")
