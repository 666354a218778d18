"""python -m bench.cuda_scans: scans on an NVIDIA GPU beside what models call today, as far as it is installed.

selective_scan beside mamba_ssm's chunks and its step of decoding, gated_delta beside those of flash-linear-attention
(fla), the convolution beside fla's and a copy that moves as many bytes; beside Transformers' chunks in PyTorch where
neither is there. Shapes are those of published models. A line each: milliseconds, medians of calls in turn, and the
largest difference, of the largest number. "trained": forward and backward together, by autograd. `--kernels` lists
pydet's own kernels and their times instead, `--only WORD` takes the lines that have a word.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

import pydet
import pydet.torch  # torch.ops.pydet

try:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError:
    mamba_chunk_scan_combined = selective_state_update = None
try:
    from fla.modules.causal_conv1d import causal_conv1d as fla_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
except ImportError:
    fla_conv1d = chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = None
try:
    from transformers.models.mamba2 import modeling_mamba2 as mamba
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
except ImportError:
    mamba = qwen = None

Call = Callable[[], object]
Function = Callable[..., torch.Tensor]

TIMES = 7
# Heads, their width, groups, states.
MAMBAS = {"Mamba-2 2.7B": (80, 64, 1, 128), "Bamba 9B": (128, 64, 1, 128), "Falcon-H1 34B": (32, 128, 2, 256)}
NEXT = (16, 32, 128, 128)  # Qwen3-Next: heads of q and k, of v, keys, width
CHANNELS = {"Mamba-2 2.7B": 5376, "Qwen3-Next": 8192}
PREFILLS = [(1, 4096), (8, 2048), (2, 16384)]
TRAINED = [(1, 4096), (4, 2048)]
DECODED = [1, 64, 256]


def timed(calls: dict[str, Call]) -> dict[str, float]:
    """Milliseconds of each, in turn; what cannot run is left out, in words."""
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            call(), call()
            torch.cuda.synchronize()
            found[name] = []
        except Exception as error:  # a peer that this GPU's memory or its compiler does not take
            print(f"    {name} does not run: {str(error).splitlines()[0][:160] if str(error) else type(error)}")
            torch.cuda.empty_cache()
    for _ in range(TIMES):
        for name, times in found.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(8_000_000)  # what the CPU does before launches is not counted
            begin.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    return ((mine.float() - other.float()).abs().max() / other.float().abs().max()).item()


def line(name: str, calls: dict[str, Call], outputs: Callable[[Call], list[torch.Tensor]] | None = None) -> None:
    """The first call is pydet's."""
    times = timed(calls)
    ours, *others = times
    words = [f"{name}: {times[ours]:.3f} ms"]
    for other in others:
        word = f"{other} {times[other]:.3f} ({times[other] / times[ours]:.2f} x"
        if outputs and other != "copy":
            pairs = zip(outputs(calls[ours]), outputs(calls[other]), strict=True)
            word += f", {max(apart(a, b) for a, b in pairs):.1g} apart"
        words.append(word + ")")
    print(", ".join(words), flush=True)
    torch.cuda.empty_cache()


def forward(name: str, functions: dict[str, Function], operands: list[torch.Tensor]) -> None:
    with torch.no_grad():
        line(name, {key: partial(f, *operands) for key, f in functions.items()}, lambda call: [call()])  # type: ignore


def trained(name: str, functions: dict[str, Function], operands: list[torch.Tensor]) -> None:
    """Of functions of the same operands, all of which have gradients."""
    given = [x.detach().requires_grad_() for x in operands]
    weights = torch.randn_like(next(iter(functions.values()))(*operands))

    def gradients(function: Function) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*given), given, weights)

    line(f"{name} trained", {key: partial(gradients, f) for key, f in functions.items()}, lambda call: list(call()))  # type: ignore


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def ssd_operands(batch: int, tokens: int, heads: int, width: int, groups: int, states: int) -> list[torch.Tensor]:
    x, b, c = (normal(batch, tokens, *more) for more in ((heads, width), (groups, states), (groups, states)))
    return [x, uniform(batch, tokens, heads) / 10, -uniform(heads) * 8, b, c, uniform(heads)]


def ssd(model: str, batch: int, tokens: int, gradients: bool) -> None:
    functions: dict[str, Function] = {"pydet": lambda *given: torch.ops.pydet.selective_scan(*given)[0]}
    if mamba_chunk_scan_combined is not None:
        functions["mamba_ssm"] = lambda x, dt, a, b, c, d: mamba_chunk_scan_combined(x, dt, a, b, c, 256, D=d)
    elif mamba is not None:
        functions["Transformers"] = lambda x, dt, a, b, c, d: mamba.mamba2_chunk_scan(
            x, dt, a, b, c, chunk_size=256, D=d
        ).to(x.dtype)
    run = trained if gradients else forward
    run(f"selective_scan, {model}, {batch}x{tokens}", functions, ssd_operands(batch, tokens, *MAMBAS[model]))


def ssd_step(model: str, batch: int) -> None:
    heads, width, groups, states = MAMBAS[model]
    x, dt, a, b, c, d = ssd_operands(batch, 1, heads, width, groups, states)
    state = torch.randn(batch, heads, width, states, device="cuda")
    out = torch.empty_like(x)
    calls: dict[str, Call] = {
        "pydet": lambda: pydet.selective_scan(x, dt, a, b, c, d, initial=state, final=state, out=out)
    }
    if selective_state_update is not None:
        each = (dt[:, 0, :, None].expand(-1, -1, width), a[:, None, None].expand(-1, width, states))
        none = torch.zeros(heads, device="cuda")[:, None].expand(-1, width)
        calls["mamba_ssm"] = lambda: selective_state_update(
            state, x[:, 0], *each, b[:, 0], c[:, 0], d[:, None].expand(-1, width), dt_bias=none
        )
    calls["copy"] = partial(torch.empty_like(state).copy_, state)
    line(f"selective_scan, {model}, a token of {batch}", calls)


# ---- The gated delta rule --------------------------------------------------------------------------------------------


def delta_operands(batch: int, tokens: int) -> list[torch.Tensor]:
    groups, heads, keys, width = NEXT
    unit = partial(torch.nn.functional.normalize, dim=-1)
    q, k = (unit(normal(batch, tokens, groups, keys)) for _ in range(2))
    return [q * keys**-0.5, k, normal(batch, tokens, heads, width), *delta_gates(batch, tokens, heads)]


def delta_gates(batch: int, tokens: int, heads: int) -> list[torch.Tensor]:
    return [-uniform(batch, tokens, heads), uniform(batch, tokens, heads)]


def delta(batch: int, tokens: int, gradients: bool) -> None:
    functions: dict[str, Function] = {"pydet": lambda *given: torch.ops.pydet.gated_delta(*given)[0]}
    if chunk_gated_delta_rule is not None:
        # Its gradients refuse Hopper with some of Triton's releases, and say so.
        functions["fla"] = lambda *given: chunk_gated_delta_rule(*given, scale=1.0)[0]
    elif qwen is not None:

        def chunks(q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            of_each = (x.repeat_interleave(2, 2) for x in (q * NEXT[2] ** 0.5, k))  # a head of q and k for each of v
            return qwen.torch_chunk_gated_delta_rule(*of_each, *rest)[0]

        functions["Transformers"] = chunks
    run = trained if gradients else forward
    run(f"gated_delta, Qwen3-Next, {batch}x{tokens}", functions, delta_operands(batch, tokens))


def delta_step(batch: int) -> None:
    q, k, v, g, beta = delta_operands(batch, 1)
    state = torch.randn(batch, NEXT[1], NEXT[2], NEXT[3], device="cuda")
    out = torch.empty_like(v)
    calls: dict[str, Call] = {"pydet": lambda: pydet.gated_delta(q, k, v, g, beta, initial=state, final=state, out=out)}
    if fused_recurrent_gated_delta_rule is not None:
        calls["fla"] = lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
        )
    calls["copy"] = partial(torch.empty_like(state).copy_, state)
    line(f"gated_delta, Qwen3-Next, a token of {batch}", calls)


# ---- The convolution -------------------------------------------------------------------------------------------------


def conv(model: str, batch: int, tokens: int, gradients: bool) -> None:
    x, w = normal(batch, tokens, CHANNELS[model]), normal(CHANNELS[model], 4)
    functions: dict[str, Function] = {"pydet": torch.ops.pydet.causal_conv1d}
    if fla_conv1d is not None:
        functions["fla"] = lambda x, w: fla_conv1d(x, w)[0]
    elif mamba is not None:
        functions["Transformers"] = lambda x, w: mamba.causal_conv1d_fn(x.transpose(1, 2), w).transpose(1, 2)
    run = trained if gradients else forward
    run(f"causal_conv1d, {model}, {batch}x{tokens}", functions, [x, w])
    other = torch.empty_like(x)
    passes = 3 if gradients else 1  # x and y forwards; dy and dx, and dy and x, backwards
    line(
        f"    as many bytes as it must move, {passes} copies of x",
        {"copy": lambda: [other.copy_(x) for _ in range(passes)] and None},
    )


# ---- The lines -------------------------------------------------------------------------------------------------------


def lines() -> Iterator[tuple[str, Call]]:
    sizes = [(False, PREFILLS[:1]), (True, TRAINED[:1]), (False, PREFILLS[1:]), (True, TRAINED[1:])]
    for gradients, some in sizes:
        word = "trained" if gradients else "forward"
        for batch, tokens in some:
            for model in MAMBAS if (batch, tokens) == PREFILLS[0] else [*MAMBAS][:1]:
                yield f"{word} selective_scan {model}", partial(ssd, model, batch, tokens, gradients)
            yield f"{word} gated_delta", partial(delta, batch, tokens, gradients)
            yield f"{word} causal_conv1d", partial(conv, "Qwen3-Next", batch, tokens, gradients)
    for batch in DECODED:
        yield "decode selective_scan", partial(ssd_step, "Mamba-2 2.7B", batch)
        yield "decode gated_delta", partial(delta_step, batch)


def kernels() -> None:
    """Each of pydet's kernels in a call forwards and backwards, microseconds."""
    cases: dict[str, tuple[Function, list[torch.Tensor]]] = {
        "selective_scan": (
            lambda *given: torch.ops.pydet.selective_scan(*given)[0],
            ssd_operands(1, 4096, *MAMBAS["Mamba-2 2.7B"]),
        ),
        "gated_delta": (lambda *given: torch.ops.pydet.gated_delta(*given)[0], delta_operands(1, 4096)),
        "causal_conv1d": (torch.ops.pydet.causal_conv1d, [normal(1, 4096, 8192), normal(8192, 4)]),
    }
    for name, (function, operands) in cases.items():
        given = [x.detach().requires_grad_() for x in operands]
        weights = torch.randn_like(function(*operands))

        def call(function: Function = function, given: list[torch.Tensor] = given, dy: torch.Tensor = weights) -> None:
            torch.autograd.grad(function(*given), given, dy)

        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        print(name)
        for event in profile.key_averages():
            print(f"    {event.key[:110]} x {event.count}: {event.device_time_total:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_scans", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="pydet's own kernels and their times")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD", help="lines that have one of these words")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    if options.kernels:
        return kernels()
    for words, run in lines():
        if any(word in words for word in options.only):
            run()
    return None


if __name__ == "__main__":
    main()
