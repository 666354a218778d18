"""Embeddings as NUMERICS.md ("Embedding") writes them: token after token."""

import numpy as np

import reference


def embedding(w, ids):
    return np.asarray(w)[ids]


def embedding_backward(dout, ids, rows=None, *, padding_idx=None, out_dtype=None, out=None, accumulate=False):
    """dw, of out's shape and type where it is given."""
    columns = dout.shape[-1]
    rows, dtype = (out.shape[0], out.dtype) if out is not None else (rows, out_dtype or dout.dtype)
    sums = np.array(out, np.float32) if accumulate else np.zeros((rows, columns), np.float32)
    touched = np.full(rows, not accumulate)
    with np.errstate(all="ignore"):
        for token, row in zip(np.ravel(ids), reference.widen(dout).reshape(-1, columns), strict=True):
            if 0 <= token < rows and token != padding_idx:
                sums[token] = sums[token] + row
                touched[token] = True
    dw = np.empty((rows, columns), dtype) if out is None else np.array(out)
    dw[touched] = reference.round_to(sums, np.dtype(dtype))[touched]
    return dw
