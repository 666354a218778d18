"""A layer of a mixture of experts in PyTorch, forward and backward: a token's result and gradient are its own.

    python examples/experts.py

On a GPU where there is one. Tokens are sorted by expert; where each expert's tokens end stays on the device. A token's
results are added in the order of its slots, in fp32 from +0: the product of a row of weights and a matrix of results.
"""

import torch

import pydet.torch

EXPERTS, SLOTS, HIDDEN, INNER = 8, 2, 256, 384


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = pydet.torch.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) / HIDDEN**0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, expert = self.router(x).float().softmax(-1).topk(SLOTS)
        ids, order = expert.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(EXPERTS, device=x.device), right=True, out_int32=True)

        copies = x[:, None].expand(-1, SLOTS, -1).reshape(-1, HIDDEN)  # its gradient sums over the slots of a token
        gate, up = pydet.torch.grouped_mm(copies[order], self.gate_up, offs=ends).chunk(2, -1)
        rows = pydet.torch.grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=ends)

        rows = rows[order.argsort()].view(-1, SLOTS, HIDDEN)  # as the slots were
        return pydet.torch.gemm(weights.to(rows.dtype)[:, None], rows, arithmetic="ieee")[:, 0]


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, x = Mixture().to(device, torch.bfloat16), torch.randn(100, HIDDEN, device=device).bfloat16()
    dy = torch.randn(100, HIDDEN, device=device).bfloat16()

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = x[rows].clone().requires_grad_()
        y = layer(part)
        return y.detach(), torch.autograd.grad(y, part, dy[rows])[0]

    whole = run(slice(0, 100))
    found = [0, 0]
    for t in range(0, 100, 9):
        for i, (one, all_) in enumerate(zip(run(slice(t, t + 1)), whole, strict=True)):
            found[i] += differing(one, all_[t : t + 1])
    print(f"{device}: 12 tokens alone and among 100: {found[0]} elements of y differ, {found[1]} of dx")
    assert found == [0, 0]


if __name__ == "__main__":
    main()
