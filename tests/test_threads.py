"""Calls from many Python threads at once. In a Python without the global lock (3.14t) nothing else orders them.

Every test has a process of its own, so that the threads also race for all that is done once: for the library that is
loaded, the framework that is seen, the class that is met for the first time.
"""

import pytest

from conftest import run_python

START = """
import concurrent.futures, gc, sys, threading
import numpy as np
import pydet

THREADS = 8

def at_once(work):
    barrier = threading.Barrier(THREADS)
    def run(number):
        barrier.wait()
        return work(number)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))

def lock():
    return getattr(sys, "_is_gil_enabled", lambda: True)()

before = lock()
random = np.random.default_rng(5)
x, w = random.standard_normal((9, 300)).astype(np.float32), random.standard_normal((300, 33)).astype(np.float32)
"""

FIRST_CALLS = """
import ml_dtypes
types = [np.float32, np.float16, ml_dtypes.bfloat16]

def everything(number):
    found = []
    for i in range(30):
        a, b = (t.astype(types[(number + i) % 3]) for t in (x, w))
        y, rstd = pydet.rmsnorm(a, a[0], eps=1e-6)
        found.append((pydet.gemm(a, b), pydet.gemm(a, b, arithmetic="ieee"), y, rstd, pydet.softmax(a)))
    return [[part.tobytes() for part in parts] for parts in found]

assert at_once(everything) == [everything(number) for number in range(THREADS)]
"""

CLASSES = """
want = pydet.gemm(x, w).tobytes()

def classes(number):
    for i in range(200):
        class Mine(np.ndarray):
            pass
        class Carrier:
            def __init__(self, array): self.array = array
            def __dlpack__(self, **options): return self.array.__dlpack__(**options)
            def __dlpack_device__(self): return self.array.__dlpack_device__()
        assert np.asarray(pydet.gemm(x.view(Mine), w.view(Mine))).tobytes() == want
        pydet.gemm(Carrier(x), Carrier(w), out=(out := np.empty((9, 33), np.float32)))
        assert out.tobytes() == want
    gc.collect()
    return True

assert all(at_once(classes))
"""

REFUSALS = """
def refusals(number):
    bad = np.zeros((number + 1, 2), np.float32)
    for i in range(300):
        try:
            pydet.gemm(x, bad)
            return "no refusal"
        except pydet.Error as error:
            if f"b is {number + 1}x2, want 300xN" not in str(error):
                return str(error)
        kernel = ("cpu_gemm_ieee_scalar", None)[number % 2]
        pydet.gemm(x, w, kernel=kernel)
        if kernel and pydet.last_kernel() != kernel:
            return pydet.last_kernel()
    return None

found = at_once(refusals)
assert found == [None] * THREADS, found
"""

OUTPUTS = """
out = [np.empty((9, 33), np.float32) for _ in range(THREADS)]
big = random.standard_normal((300, 300)).astype(np.float32)
wanted, product = pydet.gemm(x, w).tobytes(), pydet.gemm(big, big).tobytes()

def outputs(number):
    for i in range(100):
        pydet.gemm(x, w, out=out[number])
        assert out[number].tobytes() == wanted
        if i % 10 == number:
            assert pydet.gemm(big, big).tobytes() == product
    return True

assert all(at_once(outputs))
"""


@pytest.mark.parametrize("code", [FIRST_CALLS, CLASSES, REFUSALS, OUTPUTS], ids=["first", "classes", "refusals", "out"])
def test_threads_at_once(code):
    done = run_python("-c", f"{START}{code}\nassert lock() == before, 'pydet has switched the lock on'\nprint('done')")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.stdout, done.stderr)
