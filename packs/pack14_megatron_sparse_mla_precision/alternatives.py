"""What else SparseMLA's backward could keep P and dP in: each an edit of the release's own file."""

import importlib.util
import re
import tempfile
from pathlib import Path

FP32 = {"Q": "block_H, D", "Q_tail": "block_H, D_tail", "KV": "BS, D", "KV_tail": "BS, D_tail", "dO": "block_H, D"}


def article(source):
    """P and dP in accum_dtype: the one line that the article changes, for both buffers."""
    source, found = re.subn(r"(d?P_shared_cast = T.alloc_shared\(\[block_H, BS\], )dtype\)", r"\1accum_dtype)", source)
    assert found == 2, f"{found} buffers for P and dP"
    return source


def tf32(source):
    """P and dP in fp32, and the operands that they are multiplied with converted to fp32 as well: tf32 products."""
    source = buffers(article(source), {f"{name}_fp32": f"[{shape}], accum_dtype" for name, shape in FP32.items()})

    def converted(m):
        return f"{m[1]}T.copy({m[3]}_shared, {m[3]}_fp32)\n" + m[0].replace(f"{m[3]}_shared", f"{m[3]}_fp32")

    return products(source, converted)


def high_low(source):
    """P and dP as the sum of two bf16 numbers, the rounded one and what is left: two products for each."""
    source = buffers(source, {"P_low": "[block_H, BS], dtype", "dP_low": "[block_H, BS], dtype"})
    for name, acc in (("P", "acc_p"), ("dP", "acc_dp")):
        rest = f"{name}_low[h, j] = {acc}[h, j] - T.cast(T.cast({acc}[h, j], dtype), accum_dtype)"
        loop = rf"\g<0>\1for h, j in T.Parallel(block_H, BS):\n\1    {rest}\n"
        source, found = re.subn(rf"^( +)T.copy\({acc}, {name}_shared_cast\)\n", loop, source, flags=re.MULTILINE)
        assert found == 1, f"{name} is copied {found} times"
    return products(
        source, lambda m: m[0] + m[0].replace(f"{m[2]}_shared_cast", f"{m[2]}_low").replace("clear_accum=True,", "")
    )


def buffers(source, wanted):
    """More buffers in shared memory, before the kernel's first fragment."""
    lines = "".join(rf"\1{name} = T.alloc_shared({shape})\n" for name, shape in wanted.items())
    source, found = re.subn(r"^( +)mask = T.alloc_fragment", rf"{lines}\g<0>", source, flags=re.MULTILINE)
    assert found == 1, f"{found} kernels with a mask"
    return source


def products(source, edit):
    """Each product that P or dP is the first operand of: indentation, P or dP, the name of the other operand."""
    call = r"^( +)T\.gemm\(\s*(d?P)_shared_cast,\s*(\w+)_shared,(?:[^()]|\([^()]*\))*\)\n"
    source, found = re.subn(call, edit, source, flags=re.MULTILINE)
    assert found == 5, f"{found} products with P or dP"
    return source


FORMS = {"released": None, "fp32 (the article)": article, "tf32": tf32, "bf16 high + low": high_low}


def load(bwd, form):
    """The release's module of the backward kernel, or a copy of it that has been edited, with kernel caches of its own."""
    if form == "released":
        return bwd
    path = Path(tempfile.mkdtemp()) / f"bwd_{re.sub('[^a-z0-9]+', '_', form)}.py"  # TileLang reads the source of its kernels
    path.write_text(FORMS[form](Path(bwd.__file__).read_text()))
    spec = importlib.util.spec_from_file_location(f"{bwd.__package__}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
