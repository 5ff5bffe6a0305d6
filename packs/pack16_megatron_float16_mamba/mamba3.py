"""What Mamba3 hands its kernel, by itself and in a Float16Module, and on a GPU whether the kernel takes it. No verdict."""

import argparse
import sys

import torch
import triton
from repro import FACTS, config_of, device, finish, layers, release

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--half", action="store_true", help="fp16 in place of bf16")


class Reached(Exception):
    """Mamba3 called its kernel. On a CPU the kernel is not run."""


def handed_over(mamba3, layer, dtype):
    """The dtypes of the tensors that the kernel is given, by name, and what it said: None if it ran, or was not run."""
    seen, known = {}, {name: getattr(mamba3, name) for name in ("mamba3_siso_combined", "mamba3_mimo_combined")}

    def spy(kernel):
        def call(**given):
            seen.update({name: str(t.dtype).removeprefix("torch.") for name, t in given.items() if isinstance(t, torch.Tensor)})
            if device == "cpu":
                raise Reached
            return kernel(**given)

        return call

    norm = mamba3.RMSNormGated.forward
    for name, kernel in known.items():
        setattr(mamba3, name, spy(kernel))
    if device == "cpu":  # a Triton kernel, which has no part in this
        mamba3.RMSNormGated.forward = lambda self, x, z=None: x
    try:
        with torch.no_grad():
            out = layer(torch.randn(1, 256, 256, device=device, dtype=dtype))
        said = None if torch.isfinite(out).all() else "its output is not finite"
    except Reached:
        said = None
    except Exception as error:  # a kernel's refusal has no class of its own
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    mamba3.RMSNormGated.forward = norm
    for name, kernel in known.items():
        setattr(mamba3, name, kernel)
    return seen, said


def main(dtype):
    module, mamba_mixer, mamba3 = release()
    for kernels in [m for n, m in sys.modules.items() if n.startswith("mamba_ssm.ops.triton")]:
        for kernel in vars(kernels).values():  # Triton's autotuning has no part in this, and takes minutes on a GPU
            if isinstance(kernel, triton.runtime.Autotuner):
                kernel.configs = kernel.configs[:1]
    built = layers(mamba_mixer, mamba3, config := config_of(dtype))
    mambas = {name: layer for name, layer in built.items() if name.startswith("Mamba3")}
    torch.manual_seed(0)
    found = {name: {"as built": handed_over(mamba3, layer, dtype)} for name, layer in mambas.items()}
    module.Float16Module(config, torch.nn.ModuleDict({name.replace(" ", "_"): layer for name, layer in mambas.items()}))
    for name, layer in mambas.items():
        found[name]["in a Float16Module"] = handed_over(mamba3, layer, dtype)
        for how, (dtypes, said) in found[name].items():
            ran = "its kernel was not run" if device == "cpu" else said or "its kernel runs"
            print(f"{name} {how}: DT is {dtypes.get('DT')}; {ran}")
    FACTS["metrics"] = {
        name: {
            how: {"tensors in fp32": list(d.values()).count("float32"), "dtypes": d, "said": s} for how, (d, s) in row.items()
        }
        for name, row in found.items()
    }
    finish("MEASURED")


if __name__ == "__main__":
    main(torch.float16 if parser.parse_args().half else torch.bfloat16)
