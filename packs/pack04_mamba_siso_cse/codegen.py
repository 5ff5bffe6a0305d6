"""V @ dO^T in the kernel compiled for sm_90, with no GPU: as written, after the inliner, at the end; and what the machine gets.

Once as Triton compiles it, and once with its CSE pass taken out. No verdict.
"""

import hashlib
import inspect
import re

import repro
import triton
from repro import FACTS, check, finish, release


def compiled(module, chunk, n, p, cse=True):
    """The kernel compiled for sm_90: V @ dO^T counted as written, after the inliner and at the end; what the machine gets."""
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    chosen, kernel = module.mamba3_siso_bwd_kernel_dqkv.configs[0], module.mamba3_siso_bwd_kernel_dqkv.fn
    config = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    constexprs = {"CHUNK_SIZE": chunk, "HEADDIM_QK": n, "HEADDIM_V": p, "RECOMPUTE_MASK": False, "HAS_D_OSSM_STATE": False}
    constexprs |= {"RETURN_D_ISSM_STATE": False, "IS_VARLEN": False} | dict.fromkeys(
        ("d_OSSM_State", "d_ISSM_State", "Cu_Seqlens")
    )
    # Strides of 1, as the host makes them: constants, which TMA asks for.
    constexprs |= {f"stride_{name}_qkdim": 1 for name in ("q", "k", "dq", "dk", "ssm_states")}
    constexprs |= {f"stride_{name}_vdim": 1 for name in ("v", "do", "dv")}
    constexprs |= {f"stride_{name}_seqlen": 1 for name in ("da_cs", "da_cs_sum", "qk_dot", "dadt", "dQK_dot")}
    types_of = dict.fromkeys(("Q", "K", "V", "SSM_States", "dO", "dQ", "dK", "dV"), "*bf16")
    types_of |= dict.fromkeys(("DA_CS", "DA_CS_SUM", "QK_Dot", "D", "dADT", "dQK_Dot", "dD"), "*fp32")
    signature = {name: "constexpr" if name in constexprs else types_of.get(name, "i32") for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constexprs}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    given, context = backend.parse_options(config), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    first = [target] if "target" in inspect.signature(source.make_ir).parameters else []  # from Triton 3.5 on
    written = source.make_ir(*first, given, backend.get_codegen_implementation(given), backend.get_module_map(), context)
    stages = {"as written": str(written)}
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    try:
        manager.run(written, "inliner")
    except TypeError:  # Triton 3.5 takes no name.
        manager.run(written)
    stages["after the inliner"] = str(written)
    add_cse = passes.common.add_cse
    passes.common.add_cse = add_cse if cse else lambda manager: None
    try:
        binary = triton.compile(source, target=target, options=config)
    finally:
        passes.common.add_cse = add_cse
    stages["at the end"] = binary.asm["ttir"]
    product = (
        rf"tt\.dot [^\n]*: tensor<{chunk}x{p}x\w+> \* tensor<{p}x{chunk}x\w+>"  # no other has this shape: chunk, n and p differ
    )
    # Less what only says where a line of source was.
    ptx = re.sub(
        r"^\s*(?:\.loc|\.file|//).*\n|^\$L__tmp.*\n|\.section\s+\.debug[\s\S]*", "", binary.asm["ptx"], flags=re.MULTILINE
    )
    return {
        "products": {stage: len(re.findall(product, text)) for stage, text in stages.items()},
        "dots": {stage: text.count("tt.dot ") for stage, text in stages.items()},
        "ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest(),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "shared_bytes": binary.metadata.shared,
        "cubin_bytes": len(binary.asm["cubin"]),
    }


def main():
    release()
    FACTS["evidence"] = "codegen"
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd as bwd

    try:
        found, without = compiled(bwd, 64, 128, 32), compiled(bwd, 64, 128, 32, cse=False)
    except triton.CompilationError as error:
        print(error)
        finish("UNTESTABLE", "compile")
    FACTS["metrics"].update(triton=triton.__version__, compiled=found, without_cse=without)
    for name, what in (("as compiled", found), ("without CSE", without)):
        print(
            f"{name}: V @ dO^T {what['products']}, all dots {what['dots']}; wgmma {what['wgmma']}, mma {what['mma']}, "
            f"shared {what['shared_bytes']} B, cubin {what['cubin_bytes']} B, PTX {what['ptx_sha256'][:12]}"
        )
    check("control", "K @ Q^T is found too: the counting works", found["dots"]["as written"] > found["products"]["as written"])
    finish("MEASURED")


if __name__ == "__main__":
    repro.parser.parse_args()
    main()
