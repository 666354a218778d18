"""Norms of rows that begin anywhere: widths around each team's of CUDA's kernels for them, whose bits are the CPU's."""

import pytest

import pydet
from test_cuda import torch  # noqa: F401

# Of teams that hold whole vectors a row of n may lie in one of 8 more than it fills: n + 7 is up to a team's width, or
# past it. Of those that hold single elements n is.
WIDTHS = [9, 121, 122, 249, 250, 505, 506, 1017, 1018, 2041, 2042, 4089, 4090, 8185, 8186, 16377, 16378, 20001]
TEAMS = [128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384]
WIDTHS += [width + more for width in TEAMS for more in (0, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_begin_anywhere(torch, dtype):
    """One row, the first, the last and some of two chains; from a whole vector on and behind one; a gap behind rows."""
    dtype, words = getattr(torch, dtype), lambda x: x.cpu().contiguous().view(torch.uint8)
    for i, n in enumerate(WIDTHS):
        m, start, gap = [(1, 0, 0), (2, 3, 0), (33, 5, 0), (37, 1, 3)][i % 4]
        rows = torch.randn(4, (m * (n + gap) + start + 15) // 16 * 16).to(dtype)  # all as far behind a vector
        weight, bias = torch.randn(2, n).to(dtype)

        def of(device, m=m, n=n, start=start, gap=gap, rows=rows, weight=weight, bias=bias):
            wide = rows.to(device)
            places = [one[start : start + m * (n + gap)].view(m, n + gap)[:, :n] for one in wide]
            x, dy, added, dx = places
            w, b = weight.to(device), bias.to(device)
            y, rstd, total = pydet.rmsnorm(x, w, eps=1e-6, residual=added)
            found = [y, rstd, total, *pydet.rmsnorm(x, w, eps=1e-6, out=(dx, rstd.clone()))]
            found = [one.clone() for one in found]
            # Each kernel that such rows may go to, whichever is chosen.
            long = 8192 if dtype == torch.float32 else 12288
            held = {"strided": (1, 5120), "staged": (5121, long), "unaligned": (1, 16384), "apart": (1, 16377)}
            for way, (least, most) in held.items():
                kernel = f"cuda_rmsnorm_backward_{way}" if device == "cuda" and least <= n <= most else None
                gradients = pydet.rmsnorm_backward(dy, x, w, rstd, dresidual=added, out=dx, kernel=kernel)
                found += [one.clone() for one in gradients]
            found += pydet.rmsnorm_backward(dy, x, None, rstd)[:1]
            y, mean, rstd, total = pydet.layernorm(x, w, b, eps=1e-6, residual=added)
            found += [y, mean, rstd, total, pydet.layernorm(x, eps=1e-6)[0]]
            # Without a residual, in another place than x too, by each kernel.
            out = added.new_zeros(m, n + 1)[:, :n]
            for way, most in (("staged", 50000), ("unaligned", 12288), ("adjacent", 4096)):
                forced = device == "cuda" and n <= most
                if way == "adjacent":
                    forced = forced and gap == 0 and n > 32 and dtype != torch.float32
                for target in (dx, out) if way == "staged" else (dx,):
                    kernel = f"cuda_rmsnorm_{way}" if forced else None
                    found += [
                        one.clone() for one in pydet.rmsnorm(x, w, eps=1e-6, out=(target, rstd.clone()), kernel=kernel)
                    ]
                    kernel = f"cuda_layernorm_{way}" if forced else None
                    places = (target, mean.clone(), rstd.clone())
                    found += [one.clone() for one in pydet.layernorm(x, w, b, eps=1e-6, out=places, kernel=kernel)]
            found.append(pydet.layernorm(x, eps=1e-6, kernel="cuda_layernorm_staged" if device == "cuda" else None)[0])
            for way, (least, most) in held.items():
                kernel = f"cuda_layernorm_backward_{way}" if device == "cuda" and least <= n <= most else None
                gradients = pydet.layernorm_backward(
                    dy, x, w, mean, rstd, dresidual=added, out=dx, has_bias=way != "apart", kernel=kernel
                )
                found += [one.clone() for one in gradients if one is not None]
            return found

        for number, (ours, theirs) in enumerate(zip(of("cuda"), of("cpu"), strict=True)):
            assert words(ours).equal(words(theirs)), f"result {number} of {m} x {n}"
