"""pydet.torch.distributed through peers' memory on a machine without a GPU: processes that share memory, over gloo.

The kernel is C++ (emulated/), streams do what they are told at once; the rest is what runs on GPUs: the agreement on
new terms, the words of folds, what each rank hears where they disagree, and the calls after that. PYDET_LIBRARY names
the library that `make cuda-emulated` links.
"""

import contextlib
import ctypes
import datetime
import mmap
import os
import traceback

import pytest

from test_torch_distributed import free_port, start

pytestmark = pytest.mark.skipif(
    "emulated" not in os.environ.get("PYDET_LIBRARY", ""), reason="PYDET_LIBRARY is not that of make cuda-emulated"
)
LIMIT_S = 60


class Stream:
    cuda_stream = 0

    def wait_event(self, event):
        pass

    def record_event(self, event):
        pass

    def synchronize(self):
        pass


def at_once(monkey, folder):
    """What the package asks of CUDA, where memory is the CPU's and everything has ended when it returns."""
    import torch

    from pydet.torch.distributed import symmetric

    monkey.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkey.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkey.setattr(torch.cuda, "Event", object)
    monkey.setattr(torch.cuda, "Stream", lambda device=None: Stream())
    monkey.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkey.setattr(torch.cuda, "is_available", lambda: True)
    monkey.setattr(torch.cuda, "current_device", lambda: 0)
    monkey.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkey.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    zeros = torch.zeros
    monkey.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    copies = {
        "cuMemcpyDtoH_v2": lambda to, at, size: ctypes.memmove(to, at.value, size.value),
        "cuMemsetD8_v2": lambda at, value, size: ctypes.memset(at.value, value.value, size.value),
        "cuMemcpyDtoDAsync_v2": lambda to, at, size, stream: ctypes.memmove(to, at, size),
        "cuEventCreate": lambda event, flags: None,
        "cuEventRecord": lambda event, stream: None,
        "cuStreamWaitEvent": lambda stream, event, flags: None,
    }
    monkey.setattr(symmetric, "driver", lambda name, *arguments: copies[name](*arguments))
    monkey.setattr(symmetric, "_find", lambda group, device: Shared.of(group, device, folder))
    monkey.setattr(symmetric, "_shared_memory", lambda *asked: Symmetric.of(*asked[:3], folder))


class Symmetric:
    """Memory of each rank in a file, as PyTorch's handle gives it."""

    made = 0

    @classmethod
    def of(cls, elements, dtype, group, folder):
        import torch
        import torch.distributed as dist

        handle, size = cls(), elements * dtype.itemsize
        handle.buffers, cls.made = [], cls.made + 1
        for rank in range(dist.get_world_size(group)):
            with open(f"{folder}/symmetric-{cls.made}-{rank}", "ab+") as file:
                file.truncate(size)
                handle.buffers.append(torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype))
        dist.barrier(group)
        return handle.buffers[dist.get_rank(group)], handle

    def get_buffer(self, rank, shape, dtype):
        return self.buffers[rank].view(dtype).view(shape)


class Shared:
    """Peers of processes, whose memory lies in files that all of them map."""

    @staticmethod
    def of(group, device, folder):
        import torch.distributed as dist

        from pydet.torch.distributed import symmetric

        class Peers(symmetric.Peers):
            def _pointers(self, size):
                kept, found = [], []
                for rank in range(self.world):
                    with open(f"{folder}/{rank}-{size}", "ab+") as file:
                        file.truncate(size)
                        kept.append(mmap.mmap(file.fileno(), size))
                    found.append(ctypes.addressof(ctypes.c_char.from_buffer(kept[-1])))
                self.kept.append(kept)
                dist.barrier(self.group)
                return found

        if dist.get_world_size(group) == 1:
            return None
        made = Peers(group, device)
        made.timeout_ms = 1000 * LIMIT_S
        assert made.reserve(16)
        return made


def rank_main(rank, world, folder, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        ctypes.CDLL(os.environ["PYDET_LIBRARY"]).emulated_in_order(1)
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=LIMIT_S))
        with pytest.MonkeyPatch.context() as monkey:
            at_once(monkey, folder)
            products(rank, world)
            asked_again(rank, world)
            queue.put((rank, list(disagreements(rank, world)), None))
            dist.barrier()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def products(rank, world):
    """Row-parallel products by every method of peers have the bits of one process: slabs of a relay, one, several."""
    import torch

    import pydet
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import relay

    methods = ["auto", "peer_one_shot", "peer_two_shot", "peer_stream", "push"] + ["relay"] * (world == relay.RANKS)
    relay.SLABS, segments = ((0, 16),), 8
    for m, n, k in ((16, 40, 256), (100, 24, 400), (160, 8, 1024)):
        x, w, b = (torch.randn(shape, generator=torch.Generator().manual_seed(m)) for shape in ((m, k), (n, k), (n,)))
        x, w = x.bfloat16(), w.bfloat16()
        begin, end = pd.shard_bounds(k, segments, rank, world)
        one = pydet.gemm(x, w.t(), bias=b, k_chunk=pd.segment_length(k, segments), arithmetic="sm90")
        for method in methods:
            for relay.APART in (0, 1, 2, 9) if method == "relay" else (2,):
                y = pd.row_parallel_linear(
                    x[:, begin:end].contiguous(), w[:, begin:end].contiguous(), b, in_features=k, method=method,
                    arithmetic="sm90",
                )  # fmt: skip
                pd.check_exchanges()
                assert y.equal(one), f"{method} {m}x{n}x{k}, {relay.APART} apart"
        dy, relay.APART = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16(), 1
        whole, wt, one_dw = torch.ones(m, n).bfloat16(), w.t().contiguous(), None
        for method in methods:  # the gradient of x sums over the columns that are shared out; dw is made meanwhile
            given, own = whole.clone().requires_grad_(), w[:, begin:end].t().contiguous().requires_grad_()
            made = pd.column_parallel_linear(given, own, out_features=k, method=method, arithmetic="sm90")
            made.backward(dy[:, begin:end].contiguous())
            want = pydet.gemm(dy, wt, k_chunk=pd.segment_length(k, segments), arithmetic="sm90")
            one_dw = pydet.gemm_db(dy[:, begin:end].contiguous(), whole, arithmetic="sm90")
            assert given.grad.equal(want) and own.grad.equal(one_dw), f"gradients by {method} {m}x{n}x{k}"
    late_results(rank, world)
    without_memory(rank, world)


def asked_again(rank, world):
    """Terms that all ranks know: a problem of one rank is raised there alone, or told where the ranks always ask."""
    import torch

    import pydet
    from pydet.torch.distributed.exchange import together

    last = rank == world - 1

    def ask(bad, **how):
        def terms():
            if bad and last:
                raise MemoryError("none left")
            return 3, "terms", "name"

        return together("op", None, torch.device("cpu"), terms, **how)[0]

    def refused(**how):
        problem = (MemoryError, "^none left") if last else (pydet.Error, f"^op: rank {world - 1} refused: none left")
        with pytest.raises(problem[0], match=problem[1]):
            ask(True, **how)

    refused(known_as="name")
    assert ask(False, known_as="name") == 3
    if last:
        with pytest.raises(MemoryError, match=r"^none left"):
            ask(True, known_as="name")
    assert ask(False, known_as="name") == 3
    refused(always=True)
    assert ask(False, always=True) == 3


def late_results(rank, world):
    """A push may follow a relay whose results the other rank has not read yet: it waits for it."""
    import time

    import torch

    import pydet
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import relay, symmetric

    if world != relay.RANKS:
        return
    x, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16() for shape in ((64, 256), (24, 256))
    )
    begin, end = pd.shard_bounds(256, 8, rank, world)
    one = pydet.gemm(x, w.t(), k_chunk=32, arithmetic="sm90")
    awaited = symmetric.Peers.launch_awaited

    def late(*given):
        time.sleep(0.2 * rank)
        return awaited(*given)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(symmetric.Peers, "launch_awaited", late)
        for method in ("relay", "push", "relay", "push"):
            xr, wr = (t[:, begin:end].contiguous() for t in (x, w))
            y = pd.row_parallel_linear(xr, wr if method == "relay" else -wr, method=method, arithmetic="sm90")
            pd.check_exchanges()
            assert y.equal(one if method == "relay" else -one), f"{method} after another"


def without_memory(rank, world):
    """Where there is no memory for a relay a product that would be one is folded; asked for by name it is refused."""
    import torch

    import pydet
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import relay, symmetric

    if world != relay.RANKS:
        return
    peers = symmetric.known_peers(None)
    x, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(8)).bfloat16() for shape in ((80, 512), (32, 512))
    )
    begin, end = pd.shard_bounds(512, 8, rank, world)
    xr, wr = (t[:, begin:end].contiguous() for t in (x, w))
    one = pydet.gemm(x, w.t(), k_chunk=64, arithmetic="sm90")
    call = lambda method: pd.row_parallel_linear(xr, wr, method=method, arithmetic="sm90")
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(symmetric, "_shared_memory", lambda *asked: None)
        monkey.setattr(relay, "LEAST_ROWS", 80)
        peers.staged = None
        for _ in range(2):
            assert call("auto").equal(one)
            assert not peers.relaying
        with pytest.raises(pydet.Error, match="method is 'relay', want one of auto, "):
            call("relay")
    peers.relaying = True
    assert call("relay").equal(one)


def disagreements(rank, world):
    """(what the last rank does otherwise, what this rank hears, whether its results were NaN, the wrong ones later)."""
    import time

    import torch

    import pydet
    import pydet.torch.distributed as pd

    last = rank == world - 1
    sums = lambda *shape: torch.ones(2, *shape)

    def heard(call):
        try:
            return call(), ""
        except pydet.Error as problem:
            return None, str(problem)

    def later():
        """Each of the known terms, and new ones, some calls ahead of the check."""
        wrong = 0
        for shape in ((8, 64), (4, 128), (3, 1000), (8, 64)):
            wrong += int((pd.all_reduce(sums(*shape)) != 2 * world).sum())
        shard = torch.zeros(500)
        pd.reduce_scatter(torch.ones(500 * world), shard)
        return wrong + int((shard != world).sum())

    assert later() == 0

    def tell(name, mine, others):
        begun = time.monotonic()
        out, sentence = heard(others if last else mine)
        if out is not None:
            sentence = heard(pd.check_exchanges)[1]
        assert time.monotonic() - begun < LIMIT_S / 2, f"{name} took as long as the limit"
        return name, sentence, None if out is None else bool(out.isnan().all()), later()

    usual = lambda: pd.all_reduce(sums(8, 64))
    yield tell("two shapes that both know", usual, lambda: pd.all_reduce(sums(4, 128)))
    yield tell("terms that one knows", usual, lambda: pd.all_reduce(sums(5, 77)))
    yield tell("what one refuses", usual, lambda: pd.all_reduce(sums(8, 64).double()))
    shard = torch.zeros(500)
    yield tell("two functions", usual, lambda: pd.reduce_scatter(torch.ones(500 * world), shard))
    out = usual() if not last else pd.all_reduce(sums(4, 128))
    sentence = heard(lambda: pd.all_reduce(sums(3, 1000)))[1]
    yield "without a check the next call says it", sentence, bool(out.isnan().all()), later()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_disagree_after_the_first_call(world, tmp_path):
    pytest.importorskip("torch")
    processes, queue = start(world, rank_main, world, str(tmp_path), free_port())
    answers = {}
    for _ in processes:
        rank, found, problem = queue.get(timeout=180)
        assert problem is None, f"rank {rank}:\n{problem}"
        answers[rank] = {name: rest for name, *rest in found}
    for rank, found in answers.items():
        last = rank == world - 1
        other = world - 1 if not last else None
        for name, (sentence, nan, wrong) in found.items():
            assert wrong == 0, f"{name}: {wrong} wrong results later"
            if name == "what one refuses" and last:
                assert sentence.startswith("all_reduce: sums is torch.float64, want float32"), sentence
                continue
            assert "the ranks did not agree at a call: " in sentence, f"{name}: {sentence!r}"
            assert "results are NaN" in sentence and f"rank {rank} had " in sentence
            assert other is None or f"rank {other} had " in sentence
            if "know" in name or "check" in name:
                assert nan or (last and name == "terms that one knows"), name
        assert "sums (2, 8, 64)" in found["two shapes that both know"][0]
        assert "sums (2, 4, 128)" in found["two shapes that both know"][0]
        assert "terms that are new to it" in found["terms that one knows"][0]
        assert "reduce_scatter" in found["two functions"][0] and "all_reduce" in found["two functions"][0]
