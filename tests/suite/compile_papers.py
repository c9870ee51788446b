"""python compile_papers.py C K V DTYPE...: compiles the kernels of `two_pass.py` for sm_90, without a GPU.

Prints a JSON list per kernel: its name, bytes of stack and of shared memory, and descriptors that are wrong.
"""

import json
import sys
from typing import Any

import triton
from gla_kernels.inspection.ahead import resources
from gla_kernels.inspection.sass import disassemble, faulty_descriptors
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glabench.backends.papers import MOST_COLUMNS, rows_of_blocks, two_level, two_pass

_POINTERS = {"bf16": "*bf16", "fp32": "*fp32"}


def compile_kernel(kernel: Any, constants: dict[str, Any], pointer: str, warps: int) -> Any:
    """The compiled kernel, for aligned tensors of whole blocks of tokens."""
    kinds = {"scale": "fp32", "T": "i32", "H": "i32"}
    names = list(enumerate(kernel.arg_names))
    signature = {n: "constexpr" if n in constants else kinds.get(n, pointer) for _, n in names}
    values = {(place,): constants[n] for place, n in names if n in constants}
    whole = [(place,) for place, n in names if signature[n] == pointer or n == "T"]
    source = ASTSource(kernel, signature, values, {place: [["tt.divisibility", 16]] for place in whole})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def main() -> None:
    C, K, V = map(int, sys.argv[1:4])
    for dtype in sys.argv[4:]:
        precision = "ieee" if dtype == "fp32" else "tf32"
        known = {"C": C, "R": rows_of_blocks(C, dtype == "fp32"), "K": K, "V": V, "PRECISION": precision}
        known |= {"BK": min(K, MOST_COLUMNS), "BV": min(V, MOST_COLUMNS)}
        known |= {"WITHIN": True, "ACROSS": True, "GATED": False, "REVERSE": True}
        for kernel in (two_pass._outputs, two_pass._value_gradients, two_pass._key_gradients, two_level._states):
            own = {name: value for name, value in known.items() if name in kernel.arg_names}
            if kernel is two_level._states:
                own |= {"BK": min(known["BK"], two_level.state_rows(C)), "b": None}
            compiled = compile_kernel(kernel, own, _POINTERS[dtype], 8 if kernel is two_level._states and C > 64 else 4)
            needed = resources(compiled)
            found = [
                kernel.__name__,
                needed.stack_bytes,
                needed.shared_bytes,
                faulty_descriptors(disassemble(compiled)),
            ]
            print(json.dumps(found))


if __name__ == "__main__":
    main()
