"""The deep check of a fix of pack05: output and all gradients, for every grouping, against the definition in fp64.

Runs after repro.py on the patched side: dense and varlen, with and without D, Z and MIMO_Out. It is also compared with what the
release computes: for G = 1 and G = H as they are, where the release raises from a copy of q and k for each head.
"""

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from mimo import NAMES, by_definition, inputs, off, run
from repro import CHECKS, CHUNK, FACTS, check, device, dtype, finish, on_cpu, release

#: Relative errors against fp64, and against the release with copies. On an H200 bf16 costs 0.8 %, and 2.5 % in dAngles and dDT.
LIMIT, COPIES = (1e-5, 1e-5) if on_cpu else (0.012, 2e-3)
#: S, H, R, N, P; lengths of the sequences of varlen; the groupings.
(S, H, R, N, P), LENGTHS, GROUPS = (
    ((16, 6, 2, 16, 16), (9, 1, 6), (1, 2, 3, 6)) if on_cpu else ((256, 128, 4, 128, 64), (100, 1, 155), (1, 2, 8, 128))
)
KINDS = {"dense": (2, None), "varlen": (1, LENGTHS)}  # batch and lengths
LOOSE = {} if on_cpu else {"dAngles": 0.035, "dDT": 0.035}


def original():
    """The release's own modules: what the patched ones hide on sys.path is imported for once in their place."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[4])
    patched = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mamba_ssm"}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    own = release()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    FACTS["file"] = file
    return own


def by_kernel(mamba3_mimo, lengths=None, copies=1, **more):
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int() if lengths else None
    options = {"chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": dtype, "cu_seqlens": ends, **more}

    def function(q, k, *rest):
        return mamba3_mimo.mamba3_mimo(q.repeat_interleave(copies, 3), k.repeat_interleave(copies, 3), *rest, **options)

    return function


def largest(errors):
    """NaN where one is, which max() might pass over."""
    return max(errors) if all(map(math.isfinite, errors)) else math.nan


def refusal(function, tensors, grad):
    """What it raises, in a line; None if nothing."""
    try:
        run(function, tensors, grad)
    except Exception as error:  # whatever it is, release and fix raise the same
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def compare(name, mamba3_mimo, tensors, grad, lengths):
    """Output and gradients, against fp64. The output of the kernels, and the gradients."""
    out, found = run(by_kernel(mamba3_mimo, lengths), tensors, grad)
    exact = [None if t is None else t.double() for t in tensors]
    right_out, right = run(by_definition(lengths), exact, grad.double())
    errors = {"output": off(out, right_out)}
    grads = {n: (g, r) for n, g, r in zip(NAMES, found, right, strict=True) if r is not None}
    errors |= {n: off(g, r) if g is not None else math.inf for n, (g, r) in grads.items()}
    FACTS["metrics"].setdefault("errors", {})[name] = errors
    close = [error for n, error in errors.items() if n not in LOOSE]
    check("trigger", f"{name}: output and {len(close) - 1} gradients against fp64", error=largest(close), limit=LIMIT)
    for n, limit in LOOSE.items():
        check("trigger", f"{name}: {n} against fp64", error=errors[n], limit=limit)
    return [out, *found]


def options(kind, batch, lengths, fixed, released):
    """D alone, as a layer with is_outproj_norm has it, whose gate and projection come after a norm; Z alone; MIMO_Out alone; and final states."""
    G = GROUPS[1]
    tensors, grad = inputs(batch, S, G, H, R, N, P, device, dtype)
    each = torch.randn(batch, S, R, H, P, device=device).to(dtype)
    for name, kept in (("D", (9, 12)), ("Z", (9, 13)), ("MIMO_Out", (10,))):
        some = [t if i not in (9, 10, 12, 13) or i in kept else None for i, t in enumerate(tensors)]
        given = grad if name == "MIMO_Out" else each
        # TileLang 0.1.8 learns from the gradients of the others how many sequences there are.
        if lengths and name == "D" and not on_cpu:
            said = {refusal(by_kernel(module, lengths), some, given) for module in (fixed, released)}
            told = " or ".join(f"raises {word}" if word else "does not raise" for word in said)
            check("control", f"{kind}, {name} alone: the backward {told}, as released and fixed", len(said) == 1)
        else:
            compare(f"{kind}, G={G}, {name} alone", fixed, some, given, lengths)
    states = [finals(by_kernel(module, lengths, return_state=True), tensors) for module in (fixed, released)]
    raised = [each for each in states if isinstance(each, str)]
    same = states[0] == states[1] if raised else all(map(torch.equal, *states))
    told = raised[0] if raised else f"output and {len(states[0]) - 1} final states"
    check("trigger", f"{kind}, G={G}, return_state: {told}, bit for bit the release's", same)


def finals(function, tensors):
    """The output and the final states, or what is raised, in a line."""
    try:
        out, *more = function(*tensors)
    except Exception as error:  # whatever it is, release and fix raise the same
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [out, *more]


def of_kind(kind):
    """All checks of one kind; they go to the parent as a line of JSON."""
    (batch, lengths), fixed, released = KINDS[kind], release(), original()
    for G in GROUPS:
        tensors, grad = inputs(batch, S, G, H, R, N, P, device, dtype)
        found = compare(f"{kind}, G={G} of H={H}", fixed, tensors, grad, lengths)
        out, before = run(by_kernel(released, lengths, 1 if G in (1, H) else H // G), tensors, grad)
        errors = [off(a, b.double()) for a, b in zip(found, [out, *before], strict=True)]
        name = f"{kind}, G={G} of H={H}: output and 14 gradients as the release's"
        check("trigger", name if G in (1, H) else f"{name} with a copy for each head", error=largest(errors), limit=COPIES)
    options(kind, batch, lengths, fixed, released)
    if kind == "dense":
        tensors, _ = inputs(2, S, 4, 6, R, N, P, device, dtype)
        try:
            by_kernel(fixed)(*tensors)
            refused = False
        except AssertionError:
            refused = True
        check("control", "G=4 of H=6, which do not divide: the forward refuses it", refused)
    print(json.dumps({"checks": CHECKS, "errors": FACTS["metrics"]["errors"]}))


def ran(kind):
    """`of_kind` in a process of its own, for each compiles for minutes: its checks and errors, or its last line."""
    environment = {**os.environ, "TILELANG_CACHE_DIR": f"{os.environ.get('TILELANG_CACHE_DIR', tempfile.gettempdir())}/{kind}"}
    done = subprocess.run([sys.executable, *sys.orig_argv[1:], kind], capture_output=True, text=True, env=environment)
    if done.returncode:
        return f"exit {done.returncode}: {(done.stdout + done.stderr).splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def main():
    release()
    with ThreadPoolExecutor(len(KINDS)) as pool:
        for kind, found in zip(KINDS, pool.map(ran, KINDS), strict=True):
            check(
                "trigger", f"{kind} ran to its end" + (f" ({found})" if isinstance(found, str) else ""), isinstance(found, dict)
            )
            for row in found["checks"] if isinstance(found, dict) else ():
                numbers = {key: row[key] for key in ("error", "limit") if key in row}
                check(row["role"], row["name"], **(numbers or {"ok": row["ok"]}))
            FACTS["metrics"].setdefault("errors", {}).update(found["errors"] if isinstance(found, dict) else {})
    finish()


if __name__ == "__main__":
    of_kind(sys.argv[-1]) if sys.argv[-1] in KINDS else main()
