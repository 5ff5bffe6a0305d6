"""The release's SparseMLA kernels, and what else the backward could keep P and dP in: each an edit of the release's own file.

Shapes: q [B, S, H, D + tail], kv [B, S, 1, D + tail], do [B, S, H, D] bf16; indices [B, S, 1, topk] int32, -1 for none.
"""

import importlib
import importlib.util
import re
import tempfile
from pathlib import Path

import torch

OPS = "megatron.core.transformer.experimental_attention_variant.ops"
CASTS = " {0}_shared_cast = T.alloc_shared([block_H, BS], {1})"


def _article(source):
    """P and dP in accum_dtype: the one line that the article changes, for both buffers."""
    for name in ("P", "dP"):
        source = _once(source, CASTS.format(name, "dtype"), CASTS.format(name, "accum_dtype"))
    return source


def _tf32(source):
    """P and dP in fp32, and the operands that they are multiplied with converted to fp32 as well: tf32 products."""
    source = _article(source)
    alloc = ""
    for name, shape in (
        ("Q", "block_H, D"),
        ("Q_tail", "block_H, D_tail"),
        ("KV", "BS, D"),
        ("KV_tail", "BS, D_tail"),
        ("dO", "block_H, D"),
    ):
        alloc += f"            {name}_fp32 = T.alloc_shared([{shape}], accum_dtype)\n"
    source = re.sub(r"^ +mask = T.alloc_fragment.*\n", lambda m: alloc + m[0], source, count=1, flags=re.MULTILINE)

    def both(match):
        rows = f"{match[1]}T.copy({match[3]}_shared, {match[3]}_fp32)\n"
        return rows + match[0].replace(f"{match[3]}_shared", f"{match[3]}_fp32")

    return _gemms(source, both)


def _split(source):
    """P and dP as the sum of two bf16 numbers, the rounded one and what is left: two products for each."""
    alloc = "".join(f"            {name}_low = T.alloc_shared([block_H, BS], dtype)\n" for name in ("P", "dP"))
    source = re.sub(r"^ +mask = T.alloc_fragment.*\n", lambda m: alloc + m[0], source, count=1, flags=re.MULTILINE)
    for name, acc in (("P", "acc_p"), ("dP", "acc_dp")):
        copy = f"                T.copy({acc}, {name}_shared_cast)\n"
        low = f"{acc}[h_i, bi_i] - T.cast(T.cast({acc}[h_i, bi_i], dtype), accum_dtype)"
        loop = f"                for h_i, bi_i in T.Parallel(block_H, BS):\n                    {name}_low[h_i, bi_i] = {low}\n"
        source = _once(source, copy, copy + loop)
    return _gemms(source, lambda m: m[0] + m[0].replace(f"{m[2]}_shared_cast", f"{m[2]}_low").replace("clear_accum=True,", ""))


def _once(source, old, new):
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    return source.replace(old, new)


def _gemms(source, edit):
    """Each product that P or dP is the first operand of: indentation, P or dP, the name of the other operand."""
    source, count = re.subn(
        r"^( +)T\.gemm\(\s*(d?P)_shared_cast,\s*(\w+)_shared,(?:[^()]|\([^()]*\))*\)\n", edit, source, flags=re.MULTILINE
    )
    assert count == 5, f"{count} products with P or dP"
    return source


LOADED = {}
FORMS = {"released": lambda source: source, "fp32 (the article)": _article, "tf32": _tf32, "bf16 high + low": _split}


def load(form):
    """The release's backward module, or a copy of it that has been edited, with kernel caches of its own."""
    if form in LOADED:
        return LOADED[form]
    released = importlib.import_module(f"{OPS}.tilelang_sparse_mla_bwd")
    if form == "released":
        return LOADED.setdefault(form, released)
    path = Path(tempfile.mkdtemp()) / f"bwd_{re.sub('[^a-z0-9]+', '_', form)}.py"  # TileLang reads the source of its kernels
    path.write_text(FORMS[form](Path(released.__file__).read_text()))
    spec = importlib.util.spec_from_file_location(f"{OPS}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return LOADED.setdefault(form, module)


def attention(q, kv, do, indices, rounded=lambda t: t):
    """dq [1, S, H, D + tail] and dkv [1, S, 1, D + tail] in fp64; ``rounded`` is what P and dP go through before they are multiplied."""
    C, D, topk = q.shape[3], do.shape[3], indices.shape[3]
    dq, dkv = torch.empty_like(q, dtype=torch.float64), torch.zeros_like(kv, dtype=torch.float64)
    for rows in torch.arange(q.shape[1], device=q.device).split(max(1, 2**16 // topk)):
        at, x, d = indices[0, rows, 0].long(), q[0, rows].double(), do[0, rows].double()
        keys = kv[0, at.clamp(min=0), 0].double()
        p = (x @ keys.mT * C**-0.5).masked_fill((at < 0)[:, None], float("-inf")).softmax(-1)
        dp = d @ keys[..., :D].mT
        ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)) * C**-0.5)
        dq[0, rows] = ds @ keys
        each = ds.mT @ x
        each[..., :D] += rounded(p).mT @ d
        dkv[0, :, 0].index_add_(0, at.clamp(min=0).flatten(), each.masked_fill((at < 0)[..., None], 0).flatten(0, 1))
    return dq, dkv


def launched(form, q, kv, do, indices):
    """What the release's kernels, with the backward of ``form``, give: dq bf16, dkv fp32 as it is summed and bf16 as it is handed out.

    And a function that runs the backward kernel once more.
    """
    (H, C), D, topk = q.shape[2:], do.shape[3], indices.shape[3]
    fwd, bwd = importlib.import_module(f"{OPS}.tilelang_sparse_mla_fwd"), load(form)
    given = {"heads": H, "dim": D, "tail_dim": C - D, "topk": topk, "kv_group": 1, "sm_scale": C**-0.5}
    out, lse = fwd._get_sparse_mla_fwd_kernel(**given, block_I=64, num_stages=2, threads=256)(q, kv, indices)
    delta = bwd._get_preprocess_kernel(H, D)(out, do)
    dkv = torch.zeros_like(kv, dtype=torch.float32)
    kernel = bwd._get_bwd_kernel(H, D, C - D, topk, 1, C**-0.5, 32)
    dq = kernel(q, kv, do, indices, lse, delta, dkv)
    return dq, dkv, bwd._get_postprocess_kernel(D, C - D, 1)(dkv), lambda: kernel(q, kv, do, indices, lse, delta, dkv.clone())


def emulated(form, q, kv, do, indices):
    """The same without a GPU: fp64 throughout, but for P and dP, which are rounded as ``form`` keeps them, and what is handed out."""

    def rounded(t):
        high = t.bfloat16().double()
        return high if form == "released" else high + (t - high).bfloat16().double()

    dq, dkv = attention(q, kv, do, indices, rounded)
    return dq.bfloat16(), dkv.float(), dkv.bfloat16()
