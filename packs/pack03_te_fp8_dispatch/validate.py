"""The deep check of pack03's fix: values, one FP8 operand, other formats, storages, other dtypes, gradients, padded rows; plain tensors as released.

Runs after repro.py on the patched side. A refusal is as good as a warning, as in repro.py.
"""

import builtins
import contextlib
import dis
import gc
import importlib
import inspect
import sys
import weakref
from pathlib import Path
from unittest import mock

import repro
import torch
from repro import calls, check, finish, fp8, inputs, refuses, used
from torch.utils._python_dispatch import TorchDispatchMode

KEYLESS = 7  # a row that attends to no key, whose output and gradient are zero


def as_released():
    """repro's three modules of megatron-core as they are released, with all that they import: what hides it on sys.path is left out for once."""
    patched, ours = (
        {"dsa": repro.dsa, "mla": repro.mla, "fwd": repro.fwd},
        lambda: [n for n in sys.modules if n.split(".")[0] == "megatron"],
    )
    overlay, known = str(Path(repro.dsa.__file__).parents[5]), {name: sys.modules.pop(name) for name in ours()}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    own = {name: importlib.import_module(module.__name__) for name, module in patched.items()}
    assert all(own[name].__file__ != module.__file__ for name, module in patched.items())
    for name in ours():
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(known)
    return own


def plain(pair, want):
    """Whether both are plain tensors that lie somewhere, with the values that are wanted."""
    return all(type(t) is torch.Tensor and t.data_ptr() and torch.equal(t, w) for t, w in zip(pair, want, strict=True))


def alike(a, b):
    """Whether two lists of arguments are the same, tensors by their values."""
    same = lambda x, y: torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y  # noqa: E731
    return len(a) == len(b) and all(map(same, a, b))


def judged(at, call, given, want, others):
    """One launch with the values of ``want`` [B, S, H, 576], which lie somewhere, and with the ``others`` of plain tensors; a warning; or a refusal."""
    out, launched, warned = used(call, *given)
    if not launched:
        check("trigger", f"{at}: refused", refuses(at.split(":")[0].split(", ")[-1], out))
        return
    with torch.no_grad():
        again = used(call, *given)
    same = [len(again[1]) == 1 and again[2] and plain(again[1][0][:2], map(padded, want))]
    right = (
        all(same)
        and len(launched) == 1
        and plain(launched[0][:2], map(padded, want))
        and alike([*outs(out), *rest(launched[0])], others)
    )
    check(
        "trigger",
        f"{at}: the kernel gets what dequantize() gives, plain, with {len(warned)} warning(s), and without gradients",
        right and warned,
    )


def outs(out):
    """The attention's output, and the log-sum-exp that SparseMLA returns besides."""
    return out if isinstance(out, tuple) else (out,)


def rest(launch):
    """What a kernel is built and called with beside query and key."""
    return [*launch[2].values(), *launch[3]]


def trained(role, at, call, given, want, order, others):
    """A backward: its kernels get ``want``, and else what plain tensors' get, which it returns; query and key get the gradients that come back, in their ``order``."""
    leaves = [t.detach().requires_grad_() for t in given[:2]]
    out, launched, warned = used(call, *leaves, *given[2:])
    if not launched:  # as many checks as of what is taken
        refused = role == "trigger" and refuses(at.split(":")[0].split(", ")[-1], out)
        for what in ("", ", with gradients", ", and no gradient comes"):
            check(role, f"{at}: refused{what}", refused)
        return None
    check(role, f"{at}, with gradients: {len(warned)} warning(s)", bool(warned) == (role == "trigger"))
    torch.manual_seed(1)
    out = outs(out)[0]
    gradient, wide = torch.randn(out.shape, dtype=torch.bfloat16, device=repro.device), [padded(t) for t in want]
    back = [torch.randn_like(t) for t in wide]
    arrive = [b[:, : t.shape[-3]].reshape(t.shape).clone() for b, t in zip(back, want, strict=True)]
    arrive[0][..., KEYLESS, :, :] = 0
    with backward(back) as handed:
        got, launched, _ = used(lambda: torch.autograd.grad(out, leaves, gradient))
    same = len(handed) == len(launched) == 1 and plain(handed[0][:2], wide) and plain(launched[0][:2], wide)
    found = [*handed[0][2:], *rest(launched[0])] if same else None
    check(role, f"{at}: the backward's kernels get the same, plain", same and (others is None or alike(found, others)))
    check(role, f"{at}: its gradients arrive", isinstance(got, tuple) and plain(got, map(order, arrive)))
    return found


@contextlib.contextmanager
def backward(back):
    """The backward's kernels give ``back``; yields what they are handed, query and key first, and what they are built with."""
    handed = []
    kernels = {
        "_get_bwd_kernel": lambda *how: lambda *given: handed.append((*given, *how)) or back[0],
        "_get_postprocess_kernel": lambda *how: lambda dkv: back[1],
        "_sparse_mla_delta_batched": lambda o, do: (o.float() * do.float()).sum(-1),
    }
    with mock.patch.dict(repro.mla.sparse_mla_bwd.__globals__, kernels):
        yield handed


def in_flight():
    """Two layers' forwards, and then their backwards: each has its own tensors."""
    for role, name, made in (("control", "bf16", lambda t: t), ("trigger", "FP8", fp8)):
        first, second = ([*ways(*(t if t.dtype == torch.int64 else t * i for t in batch(2)), made)] for i in (1, 2))
        for layers in zip(first, second, strict=True):
            outputs, right = [], []
            for _, call, (q, k, *more), turned in layers:
                leaves = [t.detach().requires_grad_() for t in (q, k)]
                out, launched, _ = used(call, *leaves, *more)
                outputs += (
                    [(outs(out)[0], leaves, [made(t).dequantize() if made is fp8 else t for t in turned])] if launched else []
                )
            for out, leaves, want in outputs[::-1]:
                with backward([torch.zeros_like(t) for t in want]) as handed:
                    used(lambda out=out, leaves=leaves: torch.autograd.grad(out.sum(), leaves))
                right.append(len(handed) == 1 and all(map(torch.equal, handed[0][:2], want)))
            what = layers[0][0]
            refused = role == "trigger" and not launched and refuses(what, out)
            done = refused or (len(right) == 2 and all(right))
            check(role, f"{what}, {name}: two forwards before their backwards", done)


def kept(released):
    """Of bf16 as much is saved for the backward as the release saves, by save_for_backward; and a gradient comes where only one operand needs it."""
    for i, (what, call, (q, k, *more), turned) in enumerate(ways(*batch(2))):
        saved = []
        for modules in (released, {name: getattr(repro, name) for name in released}):
            with mock.patch.multiple(repro, **modules):
                (call, (q, k, *more)), count = [*ways(*batch(2))][i][1:3], []
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: count.append(t.shape) or t, lambda t: t)
                with hooks:
                    used(call, *(t.detach().requires_grad_() for t in (q, k)), *more)
                saved.append(count)
        check("control", f"{what}: bf16 saves {len(saved[0])} tensors for the backward", saved[0] and saved[0] == saved[1])
        for which in (0, 1):
            leaves = [t.detach().requires_grad_(which == n) for n, t in enumerate((q, k))]
            out = outs(used(call, *leaves, *more)[0])[0]
            back = [torch.randn_like(t) for t in turned]
            with backward(back):
                got, _, _ = used(lambda out=out, leaf=leaves[which]: torch.autograd.grad(out, leaf, torch.ones_like(out)))
            check(
                "control",
                f"{what}: bf16, of which operand {which} needs a gradient, gets one",
                isinstance(got, tuple) and got[0].any(),
            )


class Reads(TorchDispatchMode):
    """Counts what the host reads of a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def waits():
    """FP8 makes the host wait for the device no more often than bf16 does: a read fails while a CUDA graph is captured."""
    for (what, call, given, _), (*_, given8, _) in zip(calls(*inputs(2)), calls(*inputs(2), fp8), strict=True):
        count = []
        for arguments in (given, given8):
            with Reads() as reads:
                used(call, *arguments)
            count.append(reads.count)
        check("trigger", f"{what}: the host reads {count[1]} numbers of FP8, of bf16 {count[0]}", count[1] <= count[0])


def broken():
    """What cannot be dequantized goes not to a kernel."""

    def cannot(self, *, dtype=None):
        raise NotImplementedError("no dequantize")

    def made(values):
        tensor = other_kind(values)
        type(tensor).dequantize = cannot
        return tensor

    for what, call, given, _ in calls(*inputs(2), made):
        out, launched, _ = used(call, *given)
        check(
            "trigger",
            f"{what}: what cannot be dequantized goes to no kernel",
            not launched and (out is None or isinstance(out, Exception)),
        )


def without_transformer_engine():
    """megatron-core does without it, and takes bf16 then as ever."""
    ours = [n for n in sys.modules if n.split(".")[0] in ("megatron", "transformer_engine", "transformer_engine_torch")]
    with mock.patch.dict(sys.modules):
        for name in ours:
            del sys.modules[name]
        sys.modules |= {"transformer_engine": None, "transformer_engine_torch": None}
        launches = []
        with contextlib.suppress(ImportError):
            own = {n: importlib.import_module(getattr(repro, n).__name__) for n in ("dsa", "mla", "fwd")}
            with mock.patch.multiple(repro, **own):
                given = [*calls(*inputs(2))] if own["dsa"].SparseMLA else []
                launches = [(used(call, *more)[1], turned) for _, call, more, turned in given]
    same = [len(launched) == 1 and all(map(torch.equal, launched[0][:2], turned)) for launched, turned in launches]
    check("control", "without transformer-engine installed, bf16 reaches the kernel", len(same) == 2 and all(same))


def names():
    """Each global name that a function of the changed modules reads is there: no function is left with one that went."""
    gone = []
    for module in {repro.dsa, repro.mla, repro.fwd, sys.modules[repro.mla.sparse_mla_bwd.__module__]}:
        codes = [compile(Path(module.__file__).read_text(), module.__file__, "exec")]
        for code in codes:
            codes += [each for each in code.co_consts if inspect.iscode(each)]
            read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
            gone += [f"{name} in {code.co_name}" for name in read if name not in vars(module) and not hasattr(builtins, name)]
    check("control", f"all names that are read are there{f': not {gone}' * bool(gone)}", not gone)


def indexer(released):
    """The dispatcher's other user of its gate: of bf16 as released."""
    torch.manual_seed(0)
    q, k, weights = (torch.randn(16, 2, *size, device=repro.device) for size in ((8, 128), (128,), (8,)))
    starts, ends = (
        torch.zeros(16, dtype=torch.int32, device=repro.device),
        torch.arange(1, 17, dtype=torch.int32, device=repro.device),
    )

    def best(q, k, w, starts, ends, topk, use_relu):
        return torch.einsum("qhd,kd->qk", q.float(), k.float()).topk(topk).indices.int()

    found = []
    for dsa in (released["dsa"], repro.dsa):
        with mock.patch.object(dsa, "lighting_indexer_indices", best):
            found += [
                dsa.fused_qk_topk_lighting(q.to(dtype), k.to(dtype), weights, 4, starts, ends, 8)
                for dtype in (torch.bfloat16, torch.float32)
            ]
    check(
        "control",
        "the indexer does with bf16 and fp32 what the release's does",
        alike(found[:2], found[2:]) and found[0] is not None,
    )


class Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def other_kind(values):
    """A tensor of another format: of the class that all formats are of, with a dequantize() of its own. Real ones need a GPU, or their kernels do."""
    base = importlib.import_module("transformer_engine.pytorch.tensor").QuantizedTensor

    class OtherTensor(base):
        def dequantize(self, *, dtype=None):
            return Dequantize.apply(self)

        def detach(self):
            return made(self.values)

        def contiguous(self, *_, **__):
            return self

    def made(values):
        tensor = OtherTensor(values.shape, values.dtype)
        tensor.values = values
        return tensor

    return made(values)


def kinds(values):
    """Name -> a quantized tensor of ``values``, and what it dequantizes to."""
    known = fp8(values)
    yield "Float8Tensor", known, known.dequantize()
    yield "another QuantizedTensor", other_kind(known.dequantize()), known.dequantize()
    base = next(c for c in type(known).__mro__ if c.__name__ in ("Float8TensorStorage", "Float8TensorBase"))
    made = {"data": known._data, "fp8_scale_inv": known._scale_inv, "fp8_dtype": known._fp8_dtype}
    if "fake_dtype" in base.__new__.__code__.co_varnames:
        made["fake_dtype"] = torch.bfloat16
    scale = (values.float().abs().max() / 57344).reshape(1)
    data, e5m2 = (
        (values.float() / scale).to(torch.float8_e5m2).view(torch.uint8),
        sys.modules["transformer_engine_torch"].DType.kFloat8E5M2,
    )
    of_e5m2 = type(known)(shape=values.shape, data=data, fp8_scale_inv=scale, fp8_dtype=e5m2, dtype=torch.bfloat16)
    yield "Float8Tensor of e5m2", of_e5m2, of_e5m2.dequantize()
    yield "its storage, no torch.Tensor", base(**made), known.dequantize()


def padded(tensor):
    """As SparseMLA hands it on: in four dimensions, with rows up to a bucket of 256."""
    missing = max(0, 256 - tensor.shape[-3])
    return torch.nn.functional.pad(tensor if tensor.ndim == 4 else tensor[None], (0, 0, 0, 0, 0, missing))


def ways(*given):
    """As repro.calls; of one batch without its dimension, too."""
    yield from calls(*given)
    if given[0].shape[1] == 1:
        *_, (_, call, (q, k, indices, scale), turned) = calls(*given)
        yield "SparseMLA in three dimensions", call, (q[0], k[0], indices[0], scale), [t[0] for t in turned]


def tensors():
    """How many tensors Python knows."""
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def changed(at, call, q8, k8, more, order, others):
    """Nothing is kept or remembered of an FP8 tensor: its bytes may change, as kernels change them, or its scale; its bytes may be another one's, too; and it may go."""

    def again(what, query, key):
        judged(f"{at}: {what}", call, (query, key, *more), [order(t.dequantize()) for t in (query, key)], others)

    used(call, q8, k8, *more)
    before = tensors()
    used(call, q8, k8, *more)
    check("trigger", f"{at}: no tensor is left of a call", tensors() <= before)
    k8._data.copy_(k8._data.flip(0))
    again("a key that has changed since", q8, k8)
    k8._data.data.copy_(k8._data.flip(-1))  # no version is counted
    again("a key that a kernel has changed since", q8, k8)
    k8._scale_inv.mul_(2)
    again("a key whose scale has changed since", q8, k8)
    same = {"shape": k8.shape, "data": k8._data, "fp8_dtype": k8._fp8_dtype, "dtype": k8.dtype}
    again("a key of the same bytes and another scale", q8, type(k8)(fp8_scale_inv=k8._scale_inv * 2, **same))
    kept = [weakref.ref(t._data) for t in (q8, k8)]
    del q8, k8, same
    gc.collect()
    check("trigger", f"{at}: query and key are given up when their owner does", not any(each() for each in kept))


class Subclass(torch.Tensor):
    """No quantized tensor: it holds what it says."""


class Dispatched(torch.Tensor):
    """Nor is this one, which sees what is done with it."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def still_taken():
    """Plain tensors that the release takes, and in each case launches one kernel for: few heads, which it pads; a subclass; views."""
    query, key, indices = inputs(2)
    few, twice = inputs(2, H=8)[0], torch.cat((key, key / 2))
    turned, rows = [t.permute(1, 0, 2, 3) for t in (query, key)], indices[:, :, None].int()
    for what, call, given in (
        ("8 heads, the dispatcher", repro.dsa.fused_sparse_mla_absorbed, (few, key, indices, repro.SCALE, repro.VALUE)),
        *(
            (f"a subclass ({kind.__name__}), {name}", call, given)
            for kind in (Subclass, Dispatched)
            for name, call, given, _ in calls(query, key, indices, lambda t, kind=kind: torch.Tensor._make_subclass(kind, t))
        ),
        ("views, SparseMLA", repro.mla.SparseMLA.apply, (*turned, rows, repro.SCALE)),
        ("512 keys, the dispatcher", repro.dsa.fused_sparse_mla_absorbed, (query, twice, indices, repro.SCALE, repro.VALUE)),
        ("512 keys, SparseMLA", repro.mla.SparseMLA.apply, (turned[0], twice.permute(1, 0, 2, 3), rows, repro.SCALE)),
    ):
        q, kv = (t if "SparseMLA" in what else t.permute(1, 0, 2, 3) for t in given[:2])
        _, launched, warned = used(call, *given)
        same = len(launched) == 1 and torch.equal(launched[0][0][:, :, : q.shape[2]], q) and torch.equal(launched[0][1], kv)
        contiguous = same and all(t.is_contiguous() for t in launched[0][:2])
        check("control", f"{what}: bf16 reaches the kernel, contiguous, and without a warning", contiguous and not warned)
    for name, call, given, turned in calls(query, twice, indices, fp8):
        out, launched, warned = used(call, *given)
        whole = launched and warned and plain(launched[0][:2], [fp8(t).dequantize() for t in turned])
        check(
            "trigger", f"512 keys in FP8, {name}: all reach the kernel, or none", whole or (not launched and refuses(name, out))
        )
    # Plain tensors may have no address: of the device "meta", and where there are no batches.
    for where, nowhere in (
        ("meta", [t.to("meta") for t in (query, key, indices)]),
        ("no batch", [query[:, :0], key[:, :0], indices[:0]]),
    ):
        for name, call, given, _ in calls(*nowhere):
            _, launched, warned = used(call, *given)
            same = len(launched) == 1 and all(type(t) is torch.Tensor and t.dtype == torch.bfloat16 for t in launched[0][:2])
            check("control", f"{where}, {name}: bf16 reaches the kernel without a warning", same and not warned)


def turned_down(released):
    """What the dispatcher has no kernel for goes not to one, of plain tensors either."""
    query, key, indices = inputs(2)
    heads = torch.cat((query, query[:, :, :8]), 2)
    for what, given in (
        ("512 channels", (query[..., :512], key[..., :512], indices, repro.SCALE, repro.VALUE)),
        ("256 channels of values", (query, key, indices, repro.SCALE, 256)),
        ("60 keys a token", (query, key, indices[..., :60], repro.SCALE, repro.VALUE)),
        ("24 heads", (heads, key, indices, repro.SCALE, repro.VALUE)),
        ("no scale", (query, key, indices, None, repro.VALUE)),
    ):
        each = []
        for modules in (released, {name: getattr(repro, name) for name in released}):
            with mock.patch.multiple(repro, **modules):
                out, launched, warned = used(repro.dsa.fused_sparse_mla_absorbed, *given)
                each.append([type(out), len(warned), *(value for launch in launched for value in rest(launch))])
        check("control", f"{what}: the dispatcher does with bf16 what the release's does", alike(*each))


def batch(*sizes):
    """As repro.inputs, with a row that attends to no key."""
    query, key, indices = inputs(*sizes)
    indices = indices.clone()
    indices[:, KEYLESS] = -1
    return query, key, indices


def main():
    released = as_released()
    turned_down(released)
    indexer(released)
    names()
    without_transformer_engine()
    in_flight()
    kept(released)
    waits()
    broken()
    for B, S, H in ((1, 256, 16), (2, 512, 16), (1, 100, 128)):
        own = []  # what the release's own modules hand out, build, launch and hand back
        with mock.patch.multiple(repro, **released):
            for name, call, (q, k, *more), turned in ways(*batch(B, S, H)):
                order = (lambda t: t) if name != "the dispatcher" else (lambda t: t.permute(1, 0, 2, 3))
                out, launched, _ = used(call, q, k, *more)
                after = trained("control", f"B={B}, S={S}, H={H}, {name}: released", call, (q, k, *more), turned, order, None)
                own.append(([*outs(out), *rest(launched[0])], after))
        for (name, call, (q, k, *more), turned), (others, after) in zip(ways(*batch(B, S, H)), own, strict=True):
            at, direct = f"B={B}, S={S}, H={H}, {name}", name != "the dispatcher"
            order = (lambda t: t) if direct else (lambda t: t.permute(1, 0, 2, 3))
            for what, pair in (("bf16", (q, k)), ("parameters", map(torch.nn.Parameter, (q, k)))):
                out, launched, warned = used(call, *pair, *more)
                same = len(launched) == 1 and all(map(torch.equal, launched[0][:2], map(padded, turned)))
                same = same and not warned and alike([*outs(out), *rest(launched[0])], others)
                check("control", f"{at}: {what} as they are, as the release does, and without a warning", same)
            trained("control", f"{at}: bf16", call, (q, k, *more), turned, order, after)
            for (kind, q8, q_is), (_, k8, k_is) in zip(kinds(q), kinds(k), strict=True):
                if direct and "storage" in kind:
                    continue  # autograd.Function takes what is no tensor as it is, and then has no gradient to give it
                both = {"": (q8, k8), " for the query alone": (q8, k), " for the key alone": (q, k8)}
                for which, given in both.items():
                    want = [order(is8 if t is t8 else t) for t, t8, is8 in zip(given, (q8, k8), (q_is, k_is), strict=True)]
                    judged(f"{at}: {kind}{which}", call, (*given, *more), want, others)
                    if "storage" not in kind:
                        trained("trigger", f"{at}: {kind}{which}", call, (*given, *more), want, order, after)
            changed(at, call, fp8(q), fp8(k), more, order, others)
    still_taken()
    query, key, indices = inputs(1)
    for dtype in (torch.float16, torch.float32):
        for role, what, given in (
            ("trigger", "FP8 that stands for ", (fp8(query, dtype), fp8(key, dtype))),
            ("control", "", (query.to(dtype), key.to(dtype))),
        ):
            out, launched, _ = used(repro.dsa.fused_sparse_mla_absorbed, *given, indices, repro.SCALE, repro.VALUE)
            check(role, f"{what}{dtype} goes not to the kernel for bf16", not launched and out is None)
    finish()


if __name__ == "__main__":
    repro.release()
    main()
