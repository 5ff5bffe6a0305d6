"""The deep check of pack03's fix: values, one FP8 operand, other formats, storages, other dtypes, gradients, padded rows; plain tensors as before.

Runs after repro.py on the patched side. A refusal is as good as a warning, as in repro.py.
"""

import repro
import torch
from repro import calls, check, finish, fp8, inputs, used


def judged(name, call, given, want):
    """One launch with the values of ``want``, which lie somewhere, and a warning; or a refusal."""
    out, launched, warned = used(call, *given)
    if not launched:
        check("trigger", f"{name}: refused", out is None or "quantize" in str(out))
        return None
    pairs = list(zip(launched[0], want, strict=True))
    right = all(type(t) is torch.Tensor and t.data_ptr() and torch.equal(t, w) for t, w in pairs)
    check("trigger", f"{name}: the kernel gets what dequantize() gives, plain, with {len(warned)} warning(s)", right and warned)
    return out


def kinds(values):
    """Name -> a quantized tensor of ``values``, and what it dequantizes to; of formats that only a GPU can make, one that says what they say."""
    known = fp8(values)
    yield "Float8Tensor", known, known.dequantize()
    kind = type("OtherQuantizedTensor", (repro.tensors.Float8Tensor,), {"__slots__": ()})
    e4m3 = known._fp8_dtype
    other = kind(shape=values.shape, data=known._data, fp8_scale_inv=known._scale_inv, fp8_dtype=e4m3, dtype=torch.bfloat16)
    yield "another QuantizedTensor", other, known.dequantize()
    base = next(c for c in type(known).__mro__ if c.__name__ in ("Float8TensorStorage", "Float8TensorBase"))
    made = {"data": known._data, "fp8_scale_inv": known._scale_inv, "fp8_dtype": e4m3}
    if "fake_dtype" in base.__new__.__code__.co_varnames:
        made["fake_dtype"] = torch.bfloat16
    yield "its storage, no torch.Tensor", base(**made), known.dequantize()


def reaches(output, leaf):
    """Whether a backward of ``output`` gives ``leaf`` a gradient: it is among the variables at the ends of the graph."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            if getattr(node, "variable", None) is leaf:
                return True
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    return False


def padded(tensor):
    """As SparseMLA hands it on: rows up to a bucket of 256."""
    missing = 256 - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing > 0 else tensor


def main():
    for B, S in ((1, 256), (2, 256), (2, 100)):
        for name, call, (q, k, *rest), turned in calls(*inputs(B, S)):
            at, direct = f"B={B}, S={S}, {name}", name == "SparseMLA"
            shown = padded if direct else lambda t: padded(t.permute(1, 0, 2, 3))
            for (kind, q8, q_is), (_, k8, k_is) in zip(kinds(q), kinds(k), strict=True):
                if direct and "storage" in kind:
                    continue  # autograd.Function takes what is no tensor as it is, and then has no gradient to give it
                judged(f"{at}: {kind}", call, (q8, k8, *rest), (shown(q_is), shown(k_is)))
                judged(f"{at}: {kind} for the query alone", call, (q8, k, *rest), (shown(q_is), shown(k)))
                judged(f"{at}: {kind} for the key alone", call, (q, k8, *rest), (shown(q), shown(k_is)))
            trains = fp8(q).requires_grad_()
            out = judged(f"{at}: with gradients", call, (trains, k, *rest), (shown(trains.dequantize().detach()), shown(k)))
            first = out[0] if isinstance(out, tuple) else out
            refused = not isinstance(first, torch.Tensor)
            check("trigger", f"{at}: a backward reaches the FP8 tensor", refused or reaches(first, trains))
            _, launched, warned = used(call, q, k, *rest)
            same = len(launched) == 1 and all(map(torch.equal, launched[0], map(padded, turned)))
            check("control", f"{at}: bf16 as it is, and without a warning", same and not warned)
    query, key, indices = inputs(1)
    for dtype in (torch.float16, torch.float32):
        name = f"{dtype} goes not to the kernel for bf16"
        out, launched, _ = used(repro.dispatched, fp8(query, dtype), fp8(key, dtype), indices, repro.SCALE, repro.VALUE)
        check("trigger", f"FP8 that stands for {name}", not launched and out is None)
        out, launched, _ = used(repro.dispatched, query.to(dtype), key.to(dtype), indices, repro.SCALE, repro.VALUE)
        check("control", name, not launched and out is None)
    finish()


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.tensors, repro.QuantizedTensor = repro.release()
    repro.dispatched, repro.SparseMLA, repro.fwd = repro.consumer()
    main()
