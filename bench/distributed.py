"""Row-parallel linear layers by each method of exchange, beside torch.mm and an all-reduce: python -m bench.distributed

    python -m bench.distributed --gpus 2              # NCCL, one process a GPU
    python -m bench.distributed --cpus 4 --rows 1 64  # gloo, one process each

Times are of the slower rank, medians, with the ranks at a barrier before each call; eager calls, so small ones on a GPU
are the host's time. Every result is compared with that of one rank: `differ` counts elements.
"""

import argparse
import os
import socket
import statistics
import time


def measure(call, repeats, device, dist, torch):
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    mine = torch.tensor([statistics.median(times[2:])], device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine) * 1e6, out


def rank_main(rank, given, port):
    import torch
    import torch.distributed as dist

    import pydet
    from pydet.torch.distributed import row_parallel_linear, segment_length, shard_bounds

    world, backend = (given.gpus, "nccl") if given.gpus else (given.cpus, "gloo")
    device = torch.device("cuda", rank) if given.gpus else torch.device("cpu")
    if given.gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["PYDET_NUM_THREADS"] = "1"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world)
    n, k, segments = given.n, given.k, given.segments
    begin, end = shard_bounds(k, segments, rank, world)
    if rank == 0:
        print(f"{world} x {backend}, N {n}, K {k}, {segments} segments, bf16; us")
        print(f"{'M':>6} {'method':>12} {'us':>10} {'x all-reduce':>13} {'differ':>8}")
    for m in given.rows:
        generator = torch.Generator().manual_seed(m)
        x, w = (torch.randn(s, generator=generator).bfloat16().to(device) for s in ((m, k), (n, k)))
        xr, wr = x[:, begin:end].contiguous(), w[:, begin:end].contiguous()
        one = pydet.gemm(x, w.t(), k_chunk=segment_length(k, segments))

        def all_reduced(xr=xr, wr=wr):
            out = torch.mm(xr, wr.t())
            dist.all_reduce(out)
            return out

        plain, out = measure(all_reduced, given.repeats, device, dist, torch)
        results = [("all_reduce", plain, int((out != one).sum()))]
        for method in ("one_shot", "two_shot", "chain"):
            call = lambda method=method, xr=xr, wr=wr: row_parallel_linear(  # noqa: E731
                xr, wr, segments=segments, in_features=k, method=method
            )
            us, out = measure(call, given.repeats, device, dist, torch)
            results.append((method, us, int((out != one).sum())))
        for name, us, differ in results if rank == 0 else []:
            print(f"{m:6} {name:>12} {us:10.1f} {plain / us:13.2f} {differ:8}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this machine, a process each, over NCCL")
    parser.add_argument("--cpus", type=int, default=2, help="without --gpus: processes, over gloo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("-n", type=int, default=4096)
    parser.add_argument("-k", type=int, default=14336)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    import torch.multiprocessing as processes

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes.spawn(rank_main, (given, port), nprocs=given.gpus or given.cpus)


if __name__ == "__main__":
    main()
