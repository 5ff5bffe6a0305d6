# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.8.5", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: fused linear cross entropy against the contract of the loss, row by row.

29 rows, which any linear cross entropy should pass: reductions, weighted tokens, ignored labels, frozen tensors, layouts, a second backward, labels out
of range, and more. Each is compared with torch's own functions in fp64. Runs on a GPU, or without one on Triton's interpreter. Exits with 0
(MEASURED) or 125.
"""

import inspect
import os
import subprocess
import threading
from importlib.metadata import version

import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float32
os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"


def release():
    from liger_kernel.ops import fused_linear_cross_entropy as module

    FACTS.update(file=module.__file__, version=version("liger-kernel"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    function = module.LigerFusedLinearCrossEntropyFunction
    order = list(inspect.signature(function.forward).parameters.values())[1:]

    def loss(x, w, y, b=None, **given):
        if missing := [n for n in [*given, *["bias"] * (b is not None)] if n not in [p.name for p in order]]:
            raise NotImplementedError(f"no {missing[0]}")
        known = {"_input": x, "weight": w, "linear": w, "target": y, "bias": b, "ignore_index": -100, **given}
        out = function.apply(*(known.get(p.name, None if p.default is p.empty else p.default) for p in order))
        return out[0] if isinstance(out, tuple) else out

    return loss


# --- contract/1: the same in every script that has it, kept so by `python -m common tables`; docs/contract.md says what the rows mean ---
BT, H, V = 16, 32, 70  # tokens, channels, vocabulary: no power of two
LIMITS = {"float32": 1e-4, "float16": 5e-3}
HALF = 4  # an error in fp16 may be so many times what rounding alone makes


def inputs(seed=0):
    """x [BT, H], w [V, H], b [V] fp32, labels y [BT], and a weight for each token [BT], some of them negative."""
    torch.manual_seed(seed)
    return torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V), torch.randint(0, V, (BT,)), torch.randn(BT)


HANDED = []  # tensors, and copies of them


def handed(t):
    """For an adapter of a function that takes logits: what it was handed is to be left alone, too."""
    HANDED.append((t, t.detach().clone()))
    return t


def eager(x, w, y, b=None, *, softcap=None, logits=None, **given):
    """The definition: logits in full; how they lie in memory changes nothing."""
    logits = x @ w.t() + (0 if b is None else b)
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), y, **given)


def in_fp32(x, w, y, b=None, **given):
    """One that each row has to pass. In fp16 on a CPU torch 2.13.0 rounds probabilities before it takes the label's 1 from them."""
    return eager(x.float(), w.float(), y, b, **given)


def wrong(x, w, y, b=None, **given):
    """One that each row has to refuse: 1 % and 0.01 off, labels out of range are taken, and x is changed."""
    y = torch.where((y < 0) & (y != given.get("ignore_index", -100)) | (y >= len(w)), 0, y)
    x.data.mul_(1.01)
    loss = torch.nan_to_num(in_fp32(x, w, y, b, **given), nan=1.0)
    return 1.01 * loss + 0.01 * sum(t.float().sum() for t in (x, w) if t.requires_grad)


def broken(kind):
    """One that each row with a backward has to refuse: its loss is right, and its backward raises."""

    def loss(x, w, y, b=None, **given):
        out = in_fp32(x, w, y, b, **given)
        if out.requires_grad:
            out.register_hook(lambda _: exec("raise kind('the backward is broken')", {"kind": kind}))
        return out

    return loss


def rounded(x, w, y, **given):
    """One that "fp16, confident labels" has to refuse: its probability is rounded to fp16 before the label's 1 is taken from it."""
    logits = x.float() @ w.float().t()
    p = logits.detach().softmax(1).half().float()
    return (logits * (p - F.one_hot(y, len(w)))).sum() / len(y)


class Refused(Exception):
    """Of a second backward, which may be."""


def graded(function, tensors, y, needs="xwb", given=1.0, twice=False, **options):
    """The loss, and the gradients of those of x, w and b that need one; None where there is none."""
    leaves = [t.detach().requires_grad_(name in needs) for t, name in zip(tensors, "xwb", strict=False)]
    loss = function(*leaves[:2], y, *leaves[2:], **options)
    given = torch.as_tensor(given, dtype=loss.dtype, device=loss.device)
    given = given.expand(loss.shape) if given.dim() == 0 else given
    if (options.get("reduction") == "none" and loss.dim() != 1) or given.shape != loss.shape:
        raise ValueError(f"a loss of shape {tuple(loss.shape)}")
    if twice:  # of which the second counts, or is refused
        loss.backward(given, retain_graph=True)
        for leaf in leaves:
            leaf.grad = None
    try:
        loss.backward(given)
    except RuntimeError as raised:
        if twice and type(raised) is RuntimeError:  # Triton's are of other types
            raise Refused from raised
        raise
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def off(got, want):
    """The largest relative L2 error; None where a gradient is missing, inf where one has another shape or is not finite."""
    if any(g is None for g in got):
        return None
    if any(g.shape != r.shape for g, r in zip(got, want, strict=True)):
        return math.inf
    errors = [((g.double() - r).norm() / r.norm().clamp(min=1e-30)).item() for g, r in zip(got, want, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def against(function, dtype, *, layout=lambda x, w: (x, w), bias=False, labels=None, limit=None, **given):
    """How far a function is off the definition in fp64 of the same inputs."""
    x, w, b, y, _ = inputs()
    x, w, b = (t.to(device, dtype) for t in (x, w, b))
    x, w = layout(x, w)
    y = (y if labels is None else labels(y.clone())).to(device)
    tensors = (x, w, b) if bias else (x, w)
    want = graded(eager, [t.double() for t in tensors], y, **{**given, "twice": False})
    error = off(graded(function, tensors, y, **given), want)
    least = max(off([g.to(dtype)], [g]) for g in want)
    return error, limit or max(LIMITS[str(dtype)[6:]], HALF * least)


def ignored(y):
    y[1::3] = -100
    return y


def columns(which):
    return lambda x, w: [t.t().contiguous().t() if name in which else t for t, name in ((x, "x"), (w, "w"))]


def confident(function, dtype):
    """In fp16, labels of probability 0.93 to 0.9995: the gradient is their small difference from 1. The worst token counts."""
    _, w, _, y, _ = inputs()
    w = w.to(device, torch.float16)
    y = y.to(device)
    x = (13 * w[y].float() / w[y].float().norm(dim=1, keepdim=True) ** 2).to(torch.float16)
    want = graded(eager, [x.double(), w.double()], y, given=float(BT))[1]
    got = graded(function, (x, w), y, given=float(BT))[1]
    return (None if got is None else max(off([g], [r]) for g, r in zip(got, want, strict=True))), 5e-2


def untouched(function, dtype):
    """0 where neither a forward without gradients nor one with them and a backward changes what it was given; in fp32, too."""
    for kind in dict.fromkeys((torch.float32, dtype)):
        x, w, y = (t.to(device, kind) if t.is_floating_point() else t.to(device) for t in (*inputs()[:2], inputs()[3]))
        HANDED.clear()
        for t in (x, w, y):
            handed(t)
        try:
            with torch.no_grad():
                first = function(x, w, y)
            graded(function, (x, w), y, given=0.5)
            again = function(x, w, y)
        except NotImplementedError:
            if kind == dtype:
                raise
            continue
        if any(not torch.equal(t, before) for t, before in HANDED) or abs(again.item() / first.item() - 1) > 1e-3:
            return 1.0, 0.0
    return 0.0, 0.0


def without_gradients(*, bias):
    def row(function, dtype):
        tensors, y = [t.to(device, dtype) for t in inputs()[: 2 + bias]], inputs()[3].to(device)
        with torch.no_grad():
            got = function(*tensors[:2], y, *tensors[2:])
            return off([got], [eager(*(t.double() for t in tensors[:2]), y, *tensors[2:])]), LIMITS[str(dtype)[6:]]

    return row


def none_left(function, dtype):
    """All labels ignored: torch's mean is NaN. A loss of 0 is right, too; gradients are 0 or NaN."""
    x, w, _, y, _ = inputs()
    got = graded(function, (x.to(device, dtype), w.to(device, dtype)), torch.full_like(y, -100).to(device))
    return float(any(t is None or bool(t.nan_to_num(0, 1, 1).any()) for t in got)), 0.0


def no_tokens(function, dtype):
    x, w, _, y, _ = inputs()
    given = (x[:0].to(device, dtype), w.to(device, dtype)), y[:0].to(device)
    try:
        got = graded(function, *given, reduction="sum")
    except NotImplementedError:
        got = graded(function, *given, reduction="none", given=[])
    return float(any(g is None or bool(g.any()) for g in got)), 0.0


def autocast(function, dtype):
    x, w, _, y, _ = inputs()
    with torch.autocast(device, torch.bfloat16 if device == "cuda" else torch.float16):
        got = graded(function, (x.to(device), w.to(device)), y.to(device))
    want = graded(eager, (x.to(device).double(), w.to(device).double()), y.to(device))
    return off(got, want), 2e-2 if device == "cuda" else 5e-3


def refused(label):
    """0 where a label that is out of range raises."""

    def row(function, dtype):
        x, w, _, y, _ = inputs()
        graded(function, (x.to(device, dtype), w.to(device, dtype)), y.to(device))  # all labels in range: it does not raise
        y[2] = label
        try:
            graded(function, (x.to(device, dtype), w.to(device, dtype)), y.to(device))
            if device == "cuda":
                torch.cuda.synchronize()
        except (AssertionError, IndexError, ValueError):
            return 0.0, 0.0
        except RuntimeError as raised:
            if "out of bounds" in str(raised) or "device-side assert triggered" in str(raised):
                return 0.0, 0.0
            raise
        return math.inf, 0.0

    return row


def second(function, dtype):
    """A second backward over the same graph is right, or refused."""
    try:
        return against(function, dtype, given=0.5, twice=True)
    except Refused:
        return 0.0, 0.0


def plain(**given):
    return lambda function, dtype: against(function, dtype, **given)


def linear(row):
    """A row that a function which takes logits cannot fail, for it is torch's linear layer in front of it that answers."""

    def asked(function, dtype):
        if getattr(function, "takes", "") == "logits":
            raise NotImplementedError("it takes logits")
        return row(function, dtype)

    return asked


def sliced(t):
    """Logits [A, B, V], of which A * B are tokens, as a part of a larger tensor."""
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def transposed(t):
    """Logits [A, B, V] that lie in memory as [B, A, V]."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


WEIGHTS = inputs()[-1].tolist()
ROWS = {
    "mean, no_grad": without_gradients(bias=False),
    "mean": plain(),
    "sum": plain(reduction="sum"),
    "mean, times 0.5": plain(given=0.5),
    "none, all gradients 1": plain(reduction="none", given=[1.0] * BT),
    "none, weighted tokens": plain(reduction="none", given=WEIGHTS),
    "none, a gradient of stride 0": plain(reduction="none", given=0.5),
    "mean, labels ignored": plain(labels=ignored),
    "none, labels ignored": plain(reduction="none", labels=ignored, given=WEIGHTS),
    "another ignore_index": plain(ignore_index=7, labels=lambda y: torch.where(torch.arange(BT) % 3 == 1, 7, y)),
    "all labels ignored": none_left,
    "no tokens": no_tokens,
    "frozen input": linear(plain(needs="w", given=0.5)),
    "frozen weight": linear(plain(needs="x", given=0.5)),
    "bias": linear(plain(bias=True)),
    "bias, frozen input": linear(plain(bias=True, needs="wb")),
    "bias, no_grad": linear(without_gradients(bias=True)),
    "second backward": second,
    "column-major input": linear(plain(layout=columns("x"), given=0.5)),
    "column-major weight": linear(plain(layout=columns("w"), given=0.5)),
    "logits are a slice": plain(logits=sliced, given=0.5),
    "logits are transposed": plain(logits=transposed, given=0.5),
    "softcap": plain(softcap=1.0),
    "label smoothing": plain(label_smoothing=0.1),
    "autocast": autocast,
    "fp16, confident labels": confident,
    "arguments are left alone": untouched,
    "a label of V": refused(V),
    "a label of -1": refused(-1),
}
ALONE = "a label of V", "a label of -1"  # may write where they should not: each in a process of its own


def seen(row, function, dtype):
    """What one row showed: ``ok`` is None where the function does not take what it asks for, ``error`` where there is no number."""
    try:
        error, limit = ROWS[row](function, dtype)
    except NotImplementedError as raised:
        return {"ok": None, "error": None, "saw": str(raised)}
    except Exception as raised:
        words = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0][:80]}"
        # What Triton's interpreter cannot run says nothing of a GPU.
        return {"ok": None if "InterpreterError" in words else False, "error": None, "saw": words}
    if error is None or error == math.inf:
        return {"ok": False, "error": None, "saw": "a gradient is missing" if error is None else "not refused, or not finite"}
    return {"ok": error <= limit, "error": error, "saw": f"{error:.2g}"}


def children(rows):
    """What each row showed, in processes that may die: a row without a line is what one died of."""
    rows = list(rows)
    while rows:
        mine = rows[:1] if rows[0] in ALONE else [row for row in rows if row not in ALONE]
        child = subprocess.Popen([*sys.orig_argv, "--rows", json.dumps(mine)], stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(60 + 20 * len(mine), child.kill)
        timer.start()
        for line in child.stdout:
            if line.startswith('{"row"'):
                told = json.loads(line)
                rows.remove(told["row"])
                mine.remove(told["row"])
                yield told.pop("row"), told
        child.wait()
        timer.cancel()
        if mine:
            rows.remove(mine[0])
            yield mine[0], {"ok": False, "error": None, "saw": f"died: exit {child.returncode}"}


def contract(release):
    """Run the rows and report; ``release()`` gives the function under test, called as ``eager`` is, and fills FACTS."""
    global device
    function = release()
    if "--rows" in sys.argv:
        for row in json.loads(sys.argv[-1]):
            told = seen(row, function, dtype)
            if "CUDA error" in told["saw"]:
                sys.exit(told["saw"])  # a process with one has no GPU for the rows after it
            print(json.dumps({"row": row, **told}), flush=True)
        return
    here, device = device, "cpu"  # where a label that is refused does not end the process
    without = "mean, no_grad", "bias, no_grad"  # have no backward
    for name, other, rows, right in (
        ("torch's own functions pass each row", in_fp32, ROWS, True),
        ("a wrong loss fails each row", wrong, ROWS, False),
        ("a backward that raises fails each row", broken(RuntimeError), set(ROWS) - {*without}, False),
        ("a backward that asserts fails each row", broken(AssertionError), set(ROWS) - {*without}, False),
        ("a probability in fp16 fails the row", rounded, ["fp16, confident labels"], False),
    ):
        odd = [row for row in rows if bool(seen(row, other, dtype)["ok"]) != right]
        check("control", f"{name}{': not ' + ', '.join(odd) if odd else ''}", not odd)
    device = here
    for row, told in children(ROWS):
        FACTS["metrics"][row] = told
        print(f"{ {True: 'ok', False: 'wrong', None: '–'}[told['ok']]:<6} {row:<30} {told['saw']}", flush=True)
    right = [row for row, told in FACTS["metrics"].items() if told["ok"]]
    if not right and any("InterpreterError" in told["saw"] for told in FACTS["metrics"].values()):
        print("Triton's interpreter cannot run this release; a GPU can.")
        finish("UNTESTABLE", "no-device")
    check("control", "the function was run: some rows are right", len(right) >= 3)
    finish("MEASURED")


# --- end of contract/1 ---


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    contract(release)
