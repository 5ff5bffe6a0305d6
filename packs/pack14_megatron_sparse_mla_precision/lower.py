"""Which of the alternatives compile for sm_90a, with their shared memory and instructions. Needs no GPU, gives no verdict."""

import argparse
import json
import re
import subprocess
import sys

from alternatives import FORMS, load
from repro import FACTS, finish, release

SHAPES = ((512, 64), (64, 64))  # D and tail: 576/512 and 128/64
LIMIT = 232_448  # bytes of shared memory that a block can have on sm_90
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lower", nargs=3, help=argparse.SUPPRESS)


def lower(form, D, tail):
    import tilelang
    from tilelang import tvm

    built = load(release()[1], form).bwd
    passes = {getattr(key, "value", key): value for key, value in (built.pass_configs or {}).items()}
    function = built.get_tir(64, D, tail, 2048, 1, (D + tail) ** -0.5)
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    shared = [
        int(f.attrs["dyn_shared_memory_buf"])
        for f in artifact.device_mod.functions.values()
        if "dyn_shared_memory_buf" in f.attrs
    ]
    text = artifact.kernel_source
    print(json.dumps({"shared_bytes": max(shared), "gemm": len(re.findall(r"tl::gemm_\w+<|mma_sync<|wgmma_\w+<", text))}))


def outcome(form, D, tail):
    done = subprocess.run([sys.executable, __file__, "--lower", form, str(D), str(tail)], capture_output=True, text=True)
    if done.returncode:
        said = re.findall(".*(?:Error|Check failed|assert).*", done.stderr)
        return {"error": (said or [f"exit {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    import tilelang

    release()
    FACTS["evidence"] = "codegen"
    FACTS["metrics"]["tilelang"] = tilelang.__version__
    for D, tail in SHAPES:
        for form in FORMS:
            FACTS["metrics"][f"{D + tail}/{D} {form}"] = found = outcome(form, D, tail)
            fits = "" if found.get("shared_bytes", 0) <= LIMIT else f": more than the {LIMIT} bytes that a block can have"
            print(f"tilelang {tilelang.__version__} {D + tail}/{D} {form:<20} {found}{fits}", flush=True)
    finish("MEASURED")


if __name__ == "__main__":
    options = parser.parse_args()
    if options.lower:
        form, D, tail = options.lower
        lower(form, int(D), int(tail))
    else:
        main()
