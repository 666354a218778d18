"""pydet.jax: jit, grad and vmap have the bits of the eager calls on NumPy arrays; and the interface's layout."""

import os
import re
import subprocess

import numpy as np
import pytest

jax = pytest.importorskip("jax") if "jax" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("jax")

import jax.numpy as jnp  # noqa: E402
from capi import ROOT  # noqa: E402

import pydet  # noqa: E402
import pydet.jax as pj  # noqa: E402

DTYPES = [np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param} device here")
    with jax.default_device(found):
        yield request.param


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32).astype(dtype)


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, got.shape, want.shape)
    differing = (got.view(f"u{got.itemsize}") != want.view(f"u{got.itemsize}")).sum()
    assert differing == 0, f"{differing} of {got.size} elements differ"


def vjp(function, operands, *cotangents):
    result, pull = jax.vjp(function, *operands)
    return result, pull(cotangents[0] if len(cotangents) == 1 else cotangents)


# ---- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_chunk", [None, 16])
def test_gemm(device, dtype, k_chunk):
    a, b, dc = normal(3, 5, 40, dtype=dtype), normal(3, 40, 9, dtype=dtype), normal(3, 5, 9, dtype=dtype, seed=1)
    options = {"arithmetic": "ieee" if dtype == np.float32 else "sm90", "k_chunk": k_chunk}
    for bias in (None, normal(9), normal(3, 5, 9, dtype=dtype, seed=2)):
        want = pydet.gemm(a, b, bias=bias, **options)
        same(pj.gemm(a, b, bias, **options), want)
        same(jax.jit(lambda a, b, bias=bias: pj.gemm(a, b, bias, **options))(a, b), want)
    want = pydet.gemm(a, b, out_dtype="float32", **options)
    same(pj.gemm(a, b, out_dtype=jnp.float32, **options), want)
    _, (da, db) = vjp(lambda a, b: pj.gemm(a, b, **options), (a, b), jnp.asarray(dc))
    same(da, pydet.gemm_da(dc, b, **options))
    same(db, pydet.gemm_db(a, dc, **options))
    same(pj.gemm_da(dc, b, **options), da)
    same(pj.gemm_db(a, dc, **options), db)
    y, (da, db) = vjp(jax.jit(lambda a, b: pj.gemm(a, b, **options)), (a, b[0]), jnp.asarray(dc))
    same(y, pydet.gemm(a, b[0], **options))
    same(da, pydet.gemm_da(dc, b[0], **options))
    same(db, pydet.gemm_db(a.reshape(15, 40), dc.reshape(15, 9), **options))


def test_linear(device, dtype):
    x, w, bias, dy = (normal(*s, dtype=dtype) for s in ((2, 7, 48), (24, 48), (24,), (2, 7, 24)))
    arithmetic = "ieee" if dtype == np.float32 else "sm90"
    function = jax.jit(lambda x, w, bias: pj.linear(x, w, bias, arithmetic=arithmetic))
    y, (dx, dw, dbias) = vjp(function, (x, w, bias), jnp.asarray(dy))
    rows, drows = x.reshape(14, 48), dy.reshape(14, 24)
    same(y, pydet.skinny_gemm(x, w, bias=bias, arithmetic=arithmetic))
    same(dx.reshape(14, 48), pydet.gemm_da(drows, w.T, arithmetic=arithmetic))
    same(dw, np.ascontiguousarray(pydet.gemm_db(rows, drows, arithmetic=arithmetic).T))
    same(dbias, pydet.gemm_db(np.ones((14, 1), dtype), drows, arithmetic=arithmetic)[0])
    same(pj.linear(x[0, 0], w, arithmetic=arithmetic), pydet.skinny_gemm(x[0, 0], w, arithmetic=arithmetic))


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(device, dtype, weighted):
    x, residual, dy, dsum = (normal(4, 3, 40, dtype=dtype, seed=s) for s in range(4))
    weight = normal(40) if weighted else None
    operands = (x, weight) if weighted else (x,)
    keywords = {"eps": 1e-5, "weight_offset": 1.0}
    y, gradients = vjp(jax.jit(lambda *o: pj.rms_norm(*o, **keywords)), operands, jnp.asarray(dy))
    want, rstd = pydet.rmsnorm(x, weight, **keywords)
    dx, dweight = pydet.rmsnorm_backward(dy, x, weight, rstd, weight_offset=1.0)
    same(y, want)
    for ours, theirs in zip(gradients, (dx, dweight), strict=False):
        same(ours, theirs)
    function = jax.jit(lambda x, r, *w: pj.rms_norm(x, *w, residual=r, **keywords))
    (y, total), gradients = vjp(function, (x, residual, *operands[1:]), jnp.asarray(dy), jnp.asarray(dsum))
    want, rstd, want_total = pydet.rmsnorm(x, weight, residual=residual, **keywords)
    dx, dweight = pydet.rmsnorm_backward(dy, want_total, weight, rstd, weight_offset=1.0, dresidual=dsum)
    same(y, want), same(total, want_total)
    for ours, theirs in zip(gradients, (dx, dx, dweight), strict=False):
        same(ours, theirs)


def test_vmap(device, dtype):
    a, b, bias = normal(4, 3, 5, 16, dtype=dtype), normal(4, 16, 6, dtype=dtype), normal(4, 6)
    same(jax.vmap(pj.gemm)(a[:, 0], b), pydet.gemm(a[:, 0], b))
    same(jax.vmap(pj.gemm, in_axes=(None, 0))(a[0, 0], b), pydet.gemm(a[0, 0], b))
    same(jax.vmap(pj.gemm, in_axes=(0, None))(a, b[0]), pydet.gemm(a, b[0]))
    each = [pydet.gemm(a[i, 0], b[i], bias=bias[i]) for i in range(4)]
    same(jax.vmap(pj.gemm)(a[:, 0], b, bias), np.stack(each))
    same(jax.vmap(pj.gemm, in_axes=(0, 0, None))(a[:, 0], b, bias[0]), pydet.gemm(a[:, 0], b, bias=bias[0]))
    same(jax.vmap(jax.vmap(pj.gemm, in_axes=(0, None)))(a, b), np.stack([pydet.gemm(a[i], b[i]) for i in range(4)]))
    w = normal(4, 6, 16, dtype=dtype, seed=4)
    same(jax.vmap(pj.linear, in_axes=(1, None), out_axes=1)(a[0], w[0]), pydet.skinny_gemm(a[0], w[0]))
    same(jax.vmap(pj.linear)(a[:, 0], w), np.stack([pydet.skinny_gemm(a[i, 0], w[i]) for i in range(4)]))
    x, weights = a[:, 0], normal(4, 16)
    norm = lambda x, w: pj.rms_norm(x, w, eps=1e-5)  # noqa: E731
    each = [pydet.rmsnorm(x[i], weights[i], eps=1e-5)[0] for i in range(4)]
    same(jax.vmap(norm)(x, weights), np.stack(each))
    same(
        jax.vmap(norm, in_axes=(None, 0))(x[0], weights),
        np.stack([pydet.rmsnorm(x[0], w, eps=1e-5)[0] for w in weights]),
    )
    same(jax.vmap(norm, in_axes=(0, None))(x, weights[0]), pydet.rmsnorm(x, weights[0], eps=1e-5)[0])
    # The weight's batch inside that of the rows.
    each = np.stack([np.stack([pydet.rmsnorm(r, w, eps=1e-5)[0] for w in weights]) for r in x])
    same(jax.vmap(jax.vmap(norm, in_axes=(None, 0)), in_axes=(0, None))(x, weights), each)
    rows = np.stack([x, x[::-1]])
    each = np.stack([[pydet.rmsnorm(y[i], weights[i], eps=1e-5)[0] for i in range(4)] for y in rows])
    same(jax.vmap(jax.vmap(norm), in_axes=(0, None))(rows, weights), each)


def test_vmap_of_gradients(device):
    """Per-example gradients under jit."""
    x, w, weight = normal(4, 5, 16), normal(6, 16), normal(16)

    def loss(w, weight, x):
        return pj.linear(pj.rms_norm(x, weight, eps=1e-5), w).sum()

    dws, dweights = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, None, 0)))(w, weight, x)
    for i in range(4):
        h, rstd = pydet.rmsnorm(x[i], weight, eps=1e-5)
        dy = np.ones((5, 6), np.float32)
        same(dws[i], np.ascontiguousarray(pydet.gemm_db(dy, h)))
        _, dweight = pydet.rmsnorm_backward(pydet.gemm(dy, w), x[i], weight, rstd)
        same(dweights[i], dweight)


def test_empty(device):
    same(pj.gemm(np.zeros((0, 4), np.float32), np.zeros((4, 3), np.float32)), np.zeros((0, 3), np.float32))
    same(pj.gemm(np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)), np.zeros((2, 3), np.float32))
    same(pj.rms_norm(np.zeros((0, 4), np.float32), eps=1e-5), np.zeros((0, 4), np.float32))


# ---- Bad input -------------------------------------------------------------------------------------------------------


def refuses(pattern, call, *arguments, **options):
    with pytest.raises(pydet.Error, match=pattern):
        call(*arguments, **options)


def test_bad_input():
    a, b = normal(3, 4), normal(4, 5)
    refuses(r"gemm: a is \(3, 4\), b is \(3, 5\): what is summed", pj.gemm, a, normal(3, 5))
    refuses(r"want matrices", pj.gemm, a[0], b)
    refuses(r"batches do not broadcast", pj.gemm, normal(2, 3, 4), normal(3, 4, 5))
    refuses(r"b is bfloat16, want float32", pj.gemm, a, b.astype(jnp.bfloat16))
    refuses(r"a is int32", pj.gemm, a.astype(np.int32), b.astype(np.int32))
    refuses(r"a is float64, want float32", pj.gemm, a.astype(np.float64), b)
    refuses(r"a is list, want an array", pj.gemm, [[1.0]], b)
    refuses(r"bias is \(4,\), want \(5,\)", pj.gemm, a, b, normal(4))
    refuses(r"arithmetic is 'sm91'", pj.gemm, a, b, arithmetic="sm91")
    refuses(r"k_chunk is -16", pj.gemm, a, b, k_chunk=-16)
    refuses(r"k_chunk is 8", pj.gemm, a, b, k_chunk=8)
    refuses(r"k_chunk is traced", jax.jit(lambda k: pj.gemm(a, b, k_chunk=k)), 16)
    refuses(r"eps is traced", jax.jit(lambda e: pj.rms_norm(a, eps=e)), 1e-5)
    refuses(r"eps is -1", pj.rms_norm, a, eps=-1.0)
    refuses(r"weight is \(3,\), want \(4,\)", pj.rms_norm, a, normal(3), eps=1e-5)
    refuses(r"residual is \(4, 5\)", pj.rms_norm, a, eps=1e-5, residual=b)
    refuses(r"linear: x is \(3, 4\), w is \(4, 5\)", pj.linear, a, b)
    refuses(r"bias is \(4,\), want \(4, 5\)|bias is \(5,\), want \(4,\)", pj.linear, a, normal(4, 4), normal(5))
    batched = lambda a, b: pj.gemm(a, b).sum()  # noqa: E731
    refuses(r"no gradient where batch dimensions broadcast", jax.grad(batched), normal(2, 3, 4), normal(1, 4, 5))
    same(pj.gemm(normal(2, 3, 4), normal(1, 4, 5)), pydet.gemm(normal(2, 3, 4), normal(1, 4, 5)))


def test_what_the_library_refuses_has_its_sentence():
    """The tensor cores' arithmetics take no float32, which only the library knows."""
    with pytest.raises(Exception, match=r"gemm: .*sm90"):
        jax.block_until_ready(pj.gemm(normal(3, 4), normal(4, 5), arithmetic="sm90"))


# ---- The interface ---------------------------------------------------------------------------------------------------

STRUCTURES = {
    "extension": ("Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "version": ("Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "metadata": ("Metadata", {"version": "api_version", "traits": "traits", "state_type": "state_type_id"}),
    "metadata_extension": ("Metadata_Extension", {"base": "extension_base", "metadata": "metadata"}),
    "buffer": ("Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "list": ("Args", {"size": "size", "types": "types", "items": "args"}),
    "name": ("ByteSpan", {"text": "ptr", "length": "len"}),
    "scalar": ("Scalar", {"dtype": "dtype", "value": "value"}),
    "attributes": ("Attrs", {"size": "size", "types": "types", "names": "names", "items": "attrs"}),
    "error_arguments": ("Error_Create_Args", {"message": "message", "code": "errc"}),
    "stream_arguments": ("Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "ordinal_arguments": ("DeviceOrdinal_Get_Args", {"context": "ctx", "ordinal": "device_ordinal"}),
    "api": (
        "Api",
        {
            "version": "api_version",
            "internal": "internal_api",
            "make_error": "XLA_FFI_Error_Create",
            "get_stream": "XLA_FFI_Stream_Get",
            "get_ordinal": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "call": (
        "CallFrame",
        {
            **{"api": "api", "context": "ctx", "stage": "stage"},
            **{"arguments": "args", "results": "rets", "attributes": "attrs"},
        },
    ),
}
NUMBERS = {
    "METADATA": "Extension_Metadata",
    **{name: f"DataType_{name}" for name in ("F16", "F32", "BF16", "S64", "F64", "U8")},
    "SCALAR": "AttrType_SCALAR",
    "INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "INTERNAL": "Error_Code_INTERNAL",
    "EXECUTE": "ExecutionStage_EXECUTE",
}


def interface_checks():
    """C++ that compiles only if our structures lie as those of JAX's header."""
    lines = ["#include <cstddef>", '#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"']
    for ours, (theirs, members) in STRUCTURES.items():
        for mine, other in members.items():
            where = f"offsetof(pydet_xla_{ours}, {mine}) == offsetof(XLA_FFI_{theirs}, {other})"
            size = f"sizeof(pydet_xla_{ours}::{mine}) == sizeof(XLA_FFI_{theirs}::{other})"
            lines += [f'static_assert({where} && {size}, "{ours}.{mine}");']
    lines += [f'static_assert(int(PYDET_XLA_{a}) == int(XLA_FFI_{b}), "{a}");' for a, b in NUMBERS.items()]
    return "\n".join(lines) + "\nstatic_assert(XLA_FFI_API_MAJOR == 0);\n"


def compiles(source, tmp_path):
    file = tmp_path / "layout.cpp"
    file.write_text(source)
    include = ["-I", jax.ffi.include_dir(), "-I", ROOT / "native"]
    return subprocess.run(["c++", "-std=c++17", "-fsyntax-only", *include, file], capture_output=True, text=True)


def test_layout_of_the_interface(tmp_path):
    done = compiles(interface_checks(), tmp_path)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "native/xla_ffi.h").read_text()
    declared = set(re.findall(r"^typedef struct pydet_xla_(\w+) {", text, re.M))
    assert declared == set(STRUCTURES)


def test_layout_check_can_fail(tmp_path):
    wrong = interface_checks().replace("offsetof(pydet_xla_buffer, rank)", "offsetof(pydet_xla_buffer, dims)")
    assert compiles(wrong, tmp_path).returncode != 0


def test_importing_pydet_does_not_import_jax():
    import sys

    subprocess.run([sys.executable, "-c", "import sys, pydet; assert 'jax' not in sys.modules"], check=True)


def test_without_jax():
    import sys

    source = "import sys; sys.modules['jax'] = None; import pydet.jax"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode != 0 and "pydet.jax wants JAX, which is not installed: pip install jax" in done.stderr
