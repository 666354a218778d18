"""Folds through peers' memory on several streams, in graphs, beside NCCL and sleeping ranks: every result compared.

    python tests/stress_exchange.py [--gpus N] [--seconds 60] [--seed 0]     # a process a GPU, over NCCL
    python tests/stress_exchange.py --gpus 1                                 # two processes on one GPU, over gloo

Each rank draws the same calls: of one of several groups, on one of four streams, or the replay of a graph whose
branches hold folds of several groups. Streams of one rank alone sleep now and then, and so does its host. What a call
must give is computed once on each GPU by one fold of all ranks' parts. Then the ranks disagree on purpose, and replay
without an order: each result is right, or NaN with a sentence, and later ones are right. The status is 1 if any is not.
"""

import argparse
import collections
import datetime
import functools
import json
import os
import random
import socket
import sys
import time
import traceback

STREAMS, RESULTS = 4, 10**7
SIZES = (1, 9, 1000, 4096, 65536, 131075, 262144, 1 << 20)


class Case:
    """One all_reduce, reduce_scatter or layer, its inputs on this rank, and what it must give."""

    def __init__(self, run, number, draw):
        import pydet
        import pydet.torch.distributed as pd

        torch, world, rank = run.torch, run.world, run.rank
        self.torch, self.group = torch, run.groups[number % len(run.groups)]
        n, own = SIZES[number % len(SIZES)], draw.choice((1, 2, 4))
        self.pushes = False
        generator = torch.Generator("cpu").manual_seed(1000 + number)
        parts = torch.randn(world * own, n, generator=generator).to(run.device)
        mine = parts[rank * own : (rank + 1) * own].contiguous()
        options = {"group": self.group, "out_dtype": draw.choice((torch.float32, torch.bfloat16))}
        options["order"], options["method"] = draw.choice(("ordered", "tree")), draw.choice(run.methods)
        if options["order"] == "ordered" and draw.random() < 0.3:
            options["method"] = "peer_stream"
        if draw.random() < 0.2 and n >= world:
            shares = parts[:world, : n // world * world].contiguous()
            given, each = shares[rank].clone(), n // world
            self.call = lambda: pd.reduce_scatter(given, torch.zeros(each, device=run.device), group=self.group)
            self.wanted = pydet.fold(shares)[rank * each : (rank + 1) * each]
        elif run.pushes and number % 3 == 0:
            relays = world == 2 and number % 2 == 1  # they share their memory with the pushes
            self.pushes, self.group = not relays, run.dist.group.WORLD
            m, n, k = draw.choice((600, 1100) if relays else (64, 128)), draw.choice((128, 520)), 256 * world
            x, w = (torch.randn(s, k, generator=generator).to(run.device, torch.bfloat16) for s in (m, n))
            xr, wr = (t.chunk(world, 1)[rank].contiguous() for t in (x, w))
            method = "relay" if relays else "push"
            self.call = lambda: pd.row_parallel_linear(xr, wr, segments=2 * world, method=method)
            self.wanted = pydet.gemm(x, w.t(), k_chunk=128)
        else:
            self.call = lambda: pd.all_reduce(mine, **options)
            self.wanted = pydet.fold(parts, order=options["order"], out_dtype=options["out_dtype"])

    def differing(self, got, but_nan=False):
        words = {2: self.torch.int16, 4: self.torch.int32}[got.element_size()]
        differ = got.reshape(-1).view(words) != self.wanted.reshape(-1).view(words)
        return (differ & ~got.reshape(-1).isnan() if but_nan else differ).sum()


class Run:
    def __init__(self, rank, given, port):
        import torch
        import torch.distributed as dist

        import pydet.torch.distributed as pd
        from pydet.torch.distributed.symmetric import peers_of

        self.rank, self.world, self.given, self.torch, self.dist, self.pd = (
            rank,
            max(2, given.gpus),
            given,
            torch,
            dist,
            pd,
        )
        self.alone = given.gpus < 2
        self.device = torch.device("cuda", 0 if self.alone else rank)
        torch.cuda.set_device(self.device)
        limit = datetime.timedelta(seconds=60)
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": self.world, "timeout": limit}
        if self.alone:
            dist.init_process_group("gloo", **where)
        else:
            dist.init_process_group("nccl", device_id=self.device, **where)
        self.groups = [dist.new_group(timeout=limit) for _ in range(3)]
        if not self.alone:
            self.groups.append(dist.group.WORLD)
        for group in self.groups:
            if peers_of(group, self.device) is None:
                raise SystemExit("stress_exchange: the ranks have no memory of each other")
        self.methods = ("peer_one_shot", "peer_two_shot", "auto")
        self.pushes = not self.alone and not given.folds
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        zero = lambda: torch.zeros((), dtype=torch.int64, device=self.device)
        self.differ, self.results = collections.defaultdict(zero), 0  # by stream
        self.own = random.Random(f"{given.seed} {rank}")  # what the other ranks do not draw
        self.beside = torch.zeros(1 << 20, device=self.device), torch.cuda.Stream()

    def say(self, **entry):
        if self.rank == 0:
            print(json.dumps(entry), flush=True)

    def together(self, value):
        """The largest of all ranks' values."""
        worst = self.torch.tensor([float(value)], device=self.device)
        self.dist.all_reduce(worst, self.dist.ReduceOp.MAX, group=self.groups[0])
        return float(worst)

    def disturb(self):
        if self.own.random() < 0.1:
            with self.torch.cuda.stream(self.own.choice(self.streams)):
                self.torch.cuda._sleep(self.own.randint(1000, 2000000))
        if self.own.random() < 0.05:
            time.sleep(self.own.random() * 0.01)

    def nccl(self, draw):
        """An all-reduce of NCCL's beside the folds, where it has the GPUs for one."""
        if not self.alone and draw.random() < 0.2:
            values, stream = self.beside
            with self.torch.cuda.stream(stream):
                self.dist.all_reduce(values, group=self.groups[1])

    def captured(self, cases):
        """A graph of the cases in two branches, what they give, and its stream."""
        torch, stream, branch = self.torch, self.torch.cuda.Stream(), self.torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            branch.wait_stream(stream)
            outs = []
            for i, case in enumerate(cases):
                with torch.cuda.stream(branch if i % 2 else stream):
                    outs.append(case.call())
            stream.wait_stream(branch)
        return graph, list(zip(cases, outs, strict=True)), stream

    def count(self, case, got):
        self.differ[self.torch.cuda.current_stream()] += case.differing(got)
        self.results += got.numel()

    def wrong(self):
        self.torch.cuda.synchronize()
        return sum(map(int, self.differ.values()))


def mixed(run):
    """Calls of all groups on all streams, and replays in an order that an event keeps."""
    torch, draw = run.torch, random.Random(run.given.seed)
    cases = [Case(run, i, draw) for i in range(24)]
    for case in cases:  # what is new to all is agreed on
        run.count(case, case.call())
    run.say(part="warm", wrong=run.wrong())
    graph, captured, replays = run.captured([case for case in cases if not case.pushes][:7])
    calls = 0
    while True:
        for _ in range(50):
            run.disturb()
            run.nccl(draw)
            calls += 1
            if draw.random() < 0.1:  # a replay, behind all that was called and before all that follows
                for stream in run.streams:
                    replays.wait_stream(stream)
                with torch.cuda.stream(replays):
                    graph.replay()
                    for case, out in captured:
                        run.count(case, out)
                for stream in run.streams:
                    stream.wait_stream(replays)
                continue
            case = draw.choice(cases)
            with torch.cuda.stream(draw.choice(run.streams)):
                run.count(case, case.call())
        torch.cuda.synchronize()
        if run.together(time.monotonic() - run.start > run.given.seconds and run.results > RESULTS):
            break
    run.say(part="mixed", calls=calls, results=run.results, wrong=run.wrong())
    return [case for case in cases if case.group is run.groups[0] and not case.pushes]


def heard(call):
    """The sentence of a call's refusal, or ''."""
    import pydet

    try:
        call()
    except pydet.Error as problem:
        return str(problem)
    return ""


def disagreements(run):
    """Known to all but different; known to one alone; then right calls. Each is over at once and has its sentence."""
    torch, pd, group, last = run.torch, run.pd, run.groups[0], run.rank == run.world - 1
    make = lambda *shape: torch.ones(2, *shape, device=run.device)
    reduce = lambda x: pd.all_reduce(x, group=group)
    right = lambda: int((reduce(make(3000)) != 2 * run.world).sum())
    for shape in ((8, 64), (4, 128)):
        reduce(make(*shape))
    torch.cuda.synchronize()
    problems = []

    def settled(name, sentence, wanted, start):
        took = time.monotonic() - start
        if not any(words in sentence for words in wanted) or took > 30:
            problems.append(f"{name}: {sentence!r} after {took:.1f} s")
        later = [right() for _ in range(5)]
        if any(later):
            problems.append(f"{name}: later calls have {later} wrong results")

    start = time.monotonic()
    out = reduce(make(4, 128) if last else make(8, 64))
    sentence = heard(lambda: pd.check_exchanges(group=group))
    if not out.isnan().all():
        problems.append("two shapes: a result that is not NaN")
    settled("two shapes", sentence, ["did not agree at a call"], start)
    start = time.monotonic()
    out, sentence = None, heard(lambda: reduce(make(5, 77) if last else make(8, 64)))
    sentence = sentence or heard(lambda: pd.check_exchanges(group=group))
    settled("terms of one", sentence, ["terms that are new to it"], start)
    start = time.monotonic()
    sentence = heard(lambda: reduce(make(8, 64).double() if last else make(8, 64)))
    sentence = sentence or heard(lambda: pd.check_exchanges(group=group))
    wanted = ["want float32"] if last else ["terms that are new to it"]
    settled("a refusal of one", sentence, wanted, start)
    run.say(part="disagreements", problems=problems, last=sentence)
    return problems


def unordered(run, cases):
    """Replays beside eager calls of one group, nothing between: right, or NaN with a sentence on all ranks."""
    torch, group, wrong, refused = run.torch, run.groups[0], 0, 0
    graph, captured, replays = run.captured(cases[:3])
    for _ in range(20):
        results, sentence = [], ""
        take = lambda case, results=results: results.append((case, case.call()))
        with torch.cuda.stream(replays):
            graph.replay()
        with torch.cuda.stream(run.streams[0]):
            for case in cases[-3:]:
                sentence = sentence or heard(functools.partial(take, case))
        torch.cuda.synchronize()
        sentence = sentence or heard(lambda: run.pd.check_exchanges(group=group))
        some, all_of_them = run.together(bool(sentence)), not run.together(not sentence)
        refused += bool(some)
        wrong += some != all_of_them
        for case, out in [*captured, *results]:
            wrong += int(case.differing(out, but_nan=bool(sentence)))
        if some:
            cases[0].call()  # begins anew: until then all is NaN, replays too
            torch.cuda.synchronize()
    later = sum(int(case.differing(case.call())) for case in cases)
    run.say(part="unordered", rounds=20, refused=refused, wrong=wrong, later=later)
    return [f"unordered: {wrong} wrong, {later} later"] if wrong or later else []


def rank_main(rank, given, port):
    os.environ.setdefault("PYDET_NUM_THREADS", "1")
    try:
        run = Run(rank, given, port)
        run.start = time.monotonic()
        cases = mixed(run)
        problems = disagreements(run) + unordered(run, cases)
        wrong = run.together(run.wrong() + len(problems))
        if problems:
            print(f"rank {rank}: {problems}", flush=True)
        run.say(part="all", results=run.results, seconds=round(time.monotonic() - run.start), wrong=int(wrong))
        sys.stdout.flush()
        os._exit(1 if wrong else 0)  # captured graphs are in NCCL's way as it clears up
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=None, help="all of this machine by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of mixed calls, and until 10^7 results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folds", action="store_true", help="no products: of a library that has the folds alone")
    given = parser.parse_args()
    import torch
    import torch.multiprocessing as processes

    if not torch.cuda.is_available():
        sys.exit("stress_exchange: no GPU")
    given.gpus = torch.cuda.device_count() if given.gpus is None else given.gpus
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = processes.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, given, port)) for r in range(max(2, given.gpus))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))


if __name__ == "__main__":
    main()
