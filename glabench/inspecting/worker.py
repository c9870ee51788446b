"""Compiles the kernels of a tree and prints what is known of each as a line of JSON; run in a process of its own.

python -m glabench.inspecting.worker REQUEST..., JSON objects with the fields of `request.Request`. Which kernels there
are, how they are compiled, and which faults of compilers to look for, is known to `gla_kernels.inspection` of the tree
that PYTHONPATH names.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from inspect import signature
from typing import Any

from glabench.inspecting.code import amd_instructions, code_bytes, code_hash, occupancy, products
from glabench.inspecting.request import Request, parse_request


def full_name(call: Any, variant: Any) -> str:
    """A kernel's name, with the gates it is for and its form if that is not the plain one."""
    of_values, per_head = (getattr(call, name, False) for name in ("value_gated", "head_gated"))
    gates = "value-gated " if of_values else "gated " if call.gated else "per-head " if per_head else ""
    return f"{gates}{variant.form + ' ' if variant.form != 'plain' else ''}{variant.name}"


def _calls(request: Request, arch: str) -> Iterator[Any]:
    """Calls with gates per channel, without gates and, if there are kernels for them, per head and of values too."""
    import torch
    from gla_kernels.inspection import ahead
    from gla_kernels.launching.plans import hopper_plan, triton_plan
    from gla_kernels.portable.forward import gla_forward_kernel

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[request.dtype]
    K, V, bfloat16_gates = request.key_dim, request.value_dim, request.gates == "bf16"
    choices = signature(ahead.call_of).parameters
    # In older kernels, a gate per head became one per channel before it came to those of some families.
    everywhere = "HEAD_GATED" in gla_forward_kernel.arg_names
    options = {"varlen": True} if request.packed else {}
    for gated in (True, False):
        special = hopper_plan(K, V, dtype, request.chunk) if request.family == "hopper" else None
        plan = special or triton_plan(K, V, dtype, request.chunk, gated, ahead.SHARED[arch])
        yield ahead.call_of(K, V, gated, dtype, plan, bfloat16_gates, **options)
        of_narrow_heads = plan.family == "hopper" and "head_gated" in choices
        takes = everywhere or getattr(plan, "takes_head_gates", of_narrow_heads)
        if not gated and takes:
            yield ahead.call_of(K, V, False, dtype, plan, bfloat16_gates, head_gated=True, **options)
    # Beside gates of values, calls take no length of chunks.
    if "value_gated" in choices and request.chunk is None:
        from gla_kernels.value_gated.states import value_gated_states

        alone = "KEYS_GATED" in value_gated_states.arg_names  # older kernels read gates of keys in any case
        for gated in (True, False) if alone else (True,):
            yield ahead.call_of(K, V, gated, dtype, plan, bfloat16_gates, value_gated=True, **options)


def describe(call: Any, variant: Any, arch: str, show: str | None) -> dict[str, Any]:
    """What is known of a kernel once it is compiled; with its code as text if asked for."""
    from gla_kernels.inspection import ahead
    from gla_kernels.inspection.sass import disassemble

    start = time.perf_counter()
    compiled = ahead.compile_kernel(call, variant, arch)
    compile_s = time.perf_counter() - start
    needs, warps = ahead.resources(compiled), variant.tile.warps
    is_amd = arch.startswith("gfx")
    whole = compiled.asm["amdgcn"] if is_amd else disassemble(compiled)
    code = amd_instructions(whole) if is_amd else whole
    held = occupancy(arch, warps, needs.registers, needs.shared_bytes, getattr(needs, "tensor_columns", 0))
    return {
        "arch": arch if is_amd else f"sm_{arch}",
        "kernel": full_name(call, variant),
        "form": variant.form,
        "warps": warps,
        **asdict(needs),
        "occupancy": None if held is None else asdict(held),
        "products": products(code),
        "code_bytes": code_bytes(whole),
        "code": code_hash(code),
        "faults": _faults(compiled, call, variant, code),
        "compile_s": round(compile_s, 2),
        "text": {None: None, "sass": code, "ptx": compiled.asm.get("ptx")}[show],
    }


def _faults(compiled: Any, call: Any, variant: Any, code: str) -> dict[str, int]:
    """How often compilers made a mistake that they are known to make; empty if they did not, or for AMD."""
    from gla_kernels.inspection import sass
    from gla_kernels.inspection.ptx import overflowing_pairs, waits_first

    ptx = compiled.asm.get("ptx")
    if ptx is None:
        return {}
    unwritten_registers = getattr(sass, "unwritten_registers", None)  # which earlier trees do not look for
    early = getattr(variant, "early", True)
    allowed = getattr(variant, "reads_early", ())
    if allowed and call.varlen:  # boundaries of sequences
        allowed += ("ld.global",)
    counts = {
        "pairs that overflow": len(overflowing_pairs(ptx)),
        "reads before the wait": int(call.plan.family != "triton" and early and not waits_first(ptx, *allowed)),
        # The exact form's products are too small for `wgmma`, whose descriptors these are.
        "faulty descriptors": 0 if variant.form == "exact" else len(sass.faulty_descriptors(code)),
        "registers unwritten on a way": len(unwritten_registers(code)) if unwritten_registers else 0,
    }
    return {name: count for name, count in counts.items() if count}


def main() -> None:
    """Prints a line per kernel, in the order in which they are compiled."""
    from gla_kernels.inspection import ahead

    for request in map(parse_request, sys.argv[1:]):
        for arch in request.archs:
            for call in _calls(request, arch):
                for variant in ahead.variants(call):
                    if request.wants(full_name(call, variant), variant.kernel.__name__):
                        print(json.dumps(describe(call, variant, arch, request.show)), flush=True)


if __name__ == "__main__":
    main()
