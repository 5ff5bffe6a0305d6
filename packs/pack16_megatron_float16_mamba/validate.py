"""The deep check of a fix of pack16: the wrapped module is what it would be without the marks, but for what is marked.

Runs after repro.py on the patched side: bf16 and fp16, buffers, tied parameters, attributes that other parts of Megatron read, twice
wrapped, and a module without marks, which has to be what ``module.bfloat16()`` makes of it.
"""

import torch
from repro import KEPT, check, config_of, finish, layers, release


def model(mamba_mixer, mamba3, config):
    """The layers of repro.py with buffers, a tied parameter and integers."""
    built = torch.nn.ModuleDict({name.replace(" ", "_"): layer for name, layer in layers(mamba_mixer, mamba3, config).items()})
    linear = built["Linear_in_fp32"]
    linear.tied = built["MambaMixer"].D
    linear.register_buffer("plain", torch.rand(7, device=linear.weight.device))
    linear.register_buffer("marked", torch.rand(7, device=linear.weight.device))
    linear.register_buffer("count", torch.arange(3, device=linear.weight.device))
    linear.marked.keep_in_fp32 = True
    return built


def state(module):
    """Every parameter and buffer by name."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def main():
    module, mamba_mixer, mamba3 = release()
    for dtype in (torch.bfloat16, torch.float16):
        config = config_of(dtype)
        built = model(mamba_mixer, mamba3, config)
        was = {n: (t.detach().clone(), {k: v for k, v in vars(t).items() if k != "grad"}) for n, t in state(built).items()}
        wrapped = module.Float16Module(config, built)
        marked = {f"{layer.replace(' ', '_')}.{n}" for layer, names in KEPT.items() for n in names}
        marked |= {"Linear_in_fp32.tied", "Linear_in_fp32.marked"}
        now = state(wrapped.module)
        check("control", f"{dtype}: {len(was)} tensors, {len(marked)} of them marked", marked < set(was) == set(now))
        kept = [n for n in marked if now[n].dtype == torch.float32 and torch.equal(now[n], was[n][0])]
        check("trigger", f"{dtype}: all {len(marked)} marked are as they were, bit for bit", set(kept) == marked)
        others = [n for n in was if n not in marked]
        cast = {n: was[n][0].to(dtype) if was[n][0].is_floating_point() else was[n][0] for n in others}
        right = all(now[n].dtype == t.dtype and torch.equal(now[n], t) for n, t in cast.items())
        check("trigger", f"{dtype}: the other {len(others)} are cast, and nothing else", right)
        same = all(vars(now[n]) == attributes for n, (_, attributes) in was.items())
        check("trigger", f"{dtype}: attributes are kept (tensor_model_parallel, partition_dim, …)", same)
        tied = wrapped.module["Linear_in_fp32"].tied is wrapped.module["MambaMixer"].D
        check("trigger", f"{dtype}: a tied parameter is still tied", tied)
        for name in marked:
            if hasattr(now[name], "keep_in_fp32"):
                del now[name].keep_in_fp32
        again = state(module.Float16Module(config, wrapped.module).module)
        check(
            "trigger",
            f"{dtype}: without marks all are cast",
            all(t.dtype == dtype for t in again.values() if t.is_floating_point()),
        )
    finish()


if __name__ == "__main__":
    main()
