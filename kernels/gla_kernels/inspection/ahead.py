"""Which kernels a call may launch, compiled without a GPU: their registers, spills and shared memory.

`glabench inspect` shows them.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gla_kernels.hopper.wide import passes as wide
from gla_kernels.hopper.wide.pieces import SUMS_OF_SEQUENCES, fits_one_backward, parks_dstates, specializes
from gla_kernels.launching.call import Call, named
from gla_kernels.launching.plans import (
    SCAN,
    SCAN_OF_MANY,
    SUMS,
    TAIL,
    WIDE_BACKWARD,
    LaunchPlan,
    Tile,
    exact_tile,
    narrower_state_tile,
    operands,
    recurrence_stages,
    recurrent_tile,
    strong_tile,
    wide_frames_tile,
    wide_gradients_tile,
    wide_readout_tile,
    wide_recurrence_tile,
)
from gla_kernels.operators.launches import strong_kernel
from gla_kernels.portable.backward import gla_backward_kernel
from gla_kernels.portable.exact import gla_forward_exact
from gla_kernels.portable.exact_backward import gla_backward_exact, gla_backward_exact_recomputing
from gla_kernels.portable.forward import gla_forward_kernel
from gla_kernels.portable.recurrence import gla_recurrent_kernel
from gla_kernels.portable.scan import scan_pieces
from gla_kernels.portable.sums import head_gate_sums
from gla_kernels.portable.tail import clear_tails_kernel
from gla_kernels.value_gated.chunks import value_gated_chunks
from gla_kernels.value_gated.launches import CHUNK, value_gated_chunks_tile, value_gated_tile
from gla_kernels.value_gated.states import value_gated_states

# Bytes of shared memory that a program may have, by architecture: CUDA programming guide, technical specifications;
# AMD's CDNA 3 instruction set, local data share.
SHARED = {
    "80": 163 * 1024, "86": 99 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024, "120": 99 * 1024,
    "gfx942": 64 * 1024,
}  # fmt: skip

# In the name of a variant that makes the sums of a gate per head.
_SUMS = ", with sums of gates"

# Copies to shared memory: of rows 16 bytes at a time, past the L1 cache; of sums of gates 4 bytes, through it.
_COPIES_OF_ROWS, _COPIES = ("cp.async.cg",), ("cp.async.cg", "cp.async.ca")

_POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
_SCALARS = (
    "T",
    "H",
    "N",
    "first_chunk",
    "count",
    "checkpoint_chunks",
    "base",
    "stride",
    "piece_chunks",
    "rows",
    "words",
    "items",
)
_STEPS = ("_b", "_t", "_h", "_p", "_width")
_INPUTS = (
    *("q", "k", "v", "x", "y", "z", "do", "out", "framed_q", "framed_k", "scores"),
    *("late", "early", "other_late", "other_early", "late_out", "early_out"),
)
_GATES = ("dg", "gates", "gv", "other_gates", "gates_out")
# What `clear_tails_kernel` gets in a backward.
_TAILS = {"a": "dq", "b": "dk", "c": "dv", "d": "dg"}


@dataclass(frozen=True)
class Resources:
    """What a kernel needs: registers per thread, bytes of stack per thread (spills), bytes of shared memory.

    `tensor_columns`: of the memory in which products add up on sm_100. Triton leaves a kernel that needs more than 512
    empty, and refuses to launch it.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int = 0


@dataclass(frozen=True)
class Variant:
    """A kernel as a call may launch it: its name, what it computes, its tile and its switches.

    `form`: the plain form, what that leaves out of chunks with strong gates, or the exact form. `absent`: tensors that
    it is launched without. `options`: Triton's, beside those of the tile. `early`: whether it may start before the
    previous kernel has ended, in families whose kernels do. `reads_early`: the instructions by which it then reads
    inputs before it waits for that kernel, so it must not be the first of a call.
    """

    name: str
    form: Literal["plain", "strong", "exact"]
    kernel: Any
    tile: Tile
    switches: dict[str, Any]
    absent: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict)
    early: bool = True
    reads_early: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValueGatedCall(Call):
    """A call with gates of values, alone or with those of keys (`gated`), for compiling.

    Of its plan, its kernels have the length of chunks.
    """

    value_gated: bool = True


def variants(call: Call) -> Iterator[Variant]:
    """The kernels of a call, with every optional input and output, so that all of their code is compiled.

    A forward keeps states; for wide heads, variants that keep checkpoints instead are included. So is, for every kernel
    that writes dg, the variant for gates that need no gradient.
    """
    for variant in _with_all_gradients(call):
        gates = call.gated or call.head_gated
        yield replace(variant, switches=variant.switches | {"STORE_DG": gates})
        if gates and "STORE_DG" in variant.kernel.arg_names:
            yield replace(variant, name=f"{variant.name}, no dg", switches=variant.switches | {"STORE_DG": False})


def _with_all_gradients(call: Call) -> Iterator[Variant]:
    forward = dict.fromkeys(("HAS_INITIAL", "STORE_O", "STORE_FINAL", "STORE_STATES"), True)
    forward |= dict.fromkeys(("FROM_CHECKPOINT", "STORE_CHECKPOINTS"), False)
    backward = {"FROM_CHECKPOINT": False, "HAS_DFINAL": True, "STORE_DINITIAL": True}
    if isinstance(call, ValueGatedCall):
        yield from _value_gated_variants(call)
        return
    if call.plan.family == "wide":
        yield from _wide_variants(call, forward)
    elif call.plan.family == "hopper":
        yield from _narrow_variants(call, forward, backward)
    else:
        recurrent = forward | {"V_FIRST": False}
        yield Variant("recurrence", "plain", gla_recurrent_kernel, recurrent_tile(call.K, call.V), recurrent)
        yield Variant("forward", "plain", gla_forward_kernel, call.plan.forward, forward)
        yield Variant("backward", "plain", gla_backward_kernel, call.plan.backward, backward)
    if call.gated:
        for name in ("forward", "backward"):
            reverse = name == "backward"
            tile = strong_tile(call.K, call.V, call.plan, reverse)
            yield Variant(name, "strong", strong_kernel(call, reverse), tile, {})
        tile = exact_tile(call.K, call.V, call.plan)
        yield Variant("forward", "exact", gla_forward_exact, tile, forward)
        yield Variant("backward", "exact", gla_backward_exact, tile, backward)
        yield Variant("backward from checkpoints", "exact", gla_backward_exact_recomputing, tile, backward)
    yield from _small_variants(call)


def _small_variants(call: Call) -> Iterator[Variant]:
    """The kernels around those of a family: for pieces of sequences, for gates per head, for packed sequences."""
    gates = call.gated or call.head_gated
    if call.plan.family != "triton":
        switches: dict[str, Any] = {"GATED": gates, "HAS_INITIAL": True, "STORE_FINAL": True, "CLEAR": call.gated}
        for tile, pieces in ((SCAN, ""), (SCAN_OF_MANY, " of many pieces")):
            switches["BLOCK"] = tile.block_v
            for reverse in (False, True):
                name = f"{'reverse ' if reverse else ''}scan{pieces}"
                yield Variant(name, "plain", scan_pieces, tile, switches | {"REVERSE": reverse})
    if call.head_gated:
        yield Variant("sums of gates", "plain", head_gate_sums, SUMS, {})
    yield Variant("tails", "plain", clear_tails_kernel, TAIL, {}, absent=() if gates else ("d",), early=False)


def _value_gated_variants(call: Call) -> Iterator[Variant]:
    tile = value_gated_tile(call.K, call.V, call.operands.dtype)
    chunks_tile = value_gated_chunks_tile(call.K, call.V, call.operands.dtype)
    options = {"num_stages": tile.stages}
    alone = "" if call.gated else ", values alone"
    for reverse in (False, True):
        name = "reverse states" if reverse else "states"
        switches = {"REVERSE": reverse, "KEYS_GATED": call.gated}
        yield Variant(name + alone, "plain", value_gated_states, tile, switches, options=options)
    keys, values = (call.K, tile.block_k), (call.V, tile.block_v)
    for name, of_keys, absent in (
        ("outputs", False, ("late", "dstates", "early_out", "gates_out")),
        ("gradients of values", False, ("late_out",)),
        ("gradients of keys", True, ()),
    ):
        (D, BD), (E, BE) = (keys, values) if of_keys else (values, keys)
        sizes = {"D": D, "E": E, "BD": BD, "BE": BE, "KEYS": of_keys, "FORWARD": "dstates" in absent}
        sizes |= {"OWN_GATED": call.gated or not of_keys, "OTHER_GATED": call.gated or of_keys}
        if not call.gated:
            absent = (*absent, *(("gates", "gates_out") if of_keys else ("other_gates",)))
        for form in ("plain", "strong"):
            framed = sizes | {"FRAMED": form == "plain"}
            yield Variant(name + alone, form, value_gated_chunks, chunks_tile, framed, absent, options)


def _narrow_variants(call: Call, forward: dict[str, bool], backward: dict[str, bool]) -> Iterator[Variant]:
    from gla_kernels.hopper.narrow.backward import gla_backward_hopper
    from gla_kernels.hopper.narrow.forward import gla_forward_hopper
    from gla_kernels.hopper.narrow.head_backward import simple_gla_backward_hopper
    from gla_kernels.hopper.narrow.launches import SUMS_OF_PIECES
    from gla_kernels.hopper.narrow.recurrence import gla_recurrence_hopper

    backward_kernel = simple_gla_backward_hopper if call.head_gated else gla_backward_hopper
    for of_pieces in (False, True):
        name, pieces = ", pieces" * of_pieces, {"PIECES": of_pieces}
        forwards = forward | pieces | {"STORE_FINAL": not of_pieces}
        for sums in (0,) if of_pieces or not call.head_gated else (0, SUMS_OF_SEQUENCES):
            yield Variant(
                f"forward{name}{_SUMS if sums else ''}", "plain", gla_forward_hopper, call.plan.forward,
                forwards | {"SUMS": sums},
                reads_early=_COPIES if of_pieces else (),
            )  # fmt: skip
        for recompute in (False, True):
            backwards = backward | pieces | {"STORE_DINITIAL": not of_pieces, "RECOMPUTE": recompute}
            whence = " from checkpoints" * recompute
            yield Variant(
                f"backward{whence}{name}", "plain", backward_kernel, call.plan.backward, backwards,
                reads_early=_COPIES if of_pieces and not recompute else (),
            )  # fmt: skip
    for reverse in (False, True):
        name = "reverse recurrence" if reverse else "recurrence"
        for sums in (0,) if reverse or not call.head_gated else (0, SUMS_OF_PIECES):
            yield Variant(
                f"{name}{_SUMS if sums else ''}", "plain", gla_recurrence_hopper, call.plan.forward,
                {"REVERSE": reverse, "SUMS": sums},
                reads_early=_COPIES_OF_ROWS if call.head_gated and not reverse and not sums else (),
            )  # fmt: skip


def _wide_variants(call: Call, forward: dict[str, bool]) -> Iterator[Variant]:
    from gla_kernels.hopper.wide.backward import wide_backward
    from gla_kernels.hopper.wide.forward import wide_forward
    from gla_kernels.hopper.wide.frames import wide_frames
    from gla_kernels.hopper.wide.gradients import wide_gradients
    from gla_kernels.hopper.wide.head_forward import head_forward
    from gla_kernels.hopper.wide.readout import wide_readout
    from gla_kernels.hopper.wide.recurrence import wide_recurrence
    from gla_kernels.hopper.wide.specialized import specialized_forward
    from gla_kernels.hopper.wide.walk import wide_walk

    def tiles(state: Tile) -> dict[str, Tile]:
        narrower = narrower_state_tile(state)
        return {"": narrower} | ({} if narrower == state else {"wider ": state})

    def staged(tile: Tile) -> dict[str, Tile]:
        alone, others = (
            replace(tile, stages=recurrence_stages(tile.block_v, call.gated, alone)) for alone in (True, False)
        )
        return {"": alone} | ({} if others == alone else {", many programs": others})

    checkpoints = forward | {"STORE_STATES": False, "STORE_CHECKPOINTS": True}
    steps = dict.fromkeys(("HAS_INITIAL", "STORE_END", "STORE_STATES"), True)
    steps |= {"SCRATCH": False, "STORE_DECAYS": call.gated or call.head_gated, "CHECK": call.gated, "PARK": False}
    for reverse in (False, True):
        way, backwards = {"REVERSE": reverse}, "reverse " if reverse else ""
        kept = {"STORE_EXCESS": reverse and call.gated}
        for wider, state in tiles(wide_recurrence_tile(call.V)).items():
            for many, tile in staged(state).items():
                name = f"{wider}{backwards}recurrence{many}"
                yield Variant(name, "plain", wide_recurrence, tile, steps | way | kept)
        if wide.walks(call):
            yield Variant(f"{backwards}frames", "plain", wide_frames, wide_frames_tile(call.gated), way)
            switches = steps | way | {"STORE_CHECKPOINTS": False}
            yield Variant(f"{backwards}walk", "plain", wide_walk, call.plan.forward, switches)
        elif not wide.fused(call):
            yield Variant(f"{backwards}readout", "plain", wide_readout, wide_readout_tile(call.K), way)
    if wide.walks(call):
        switches = steps | checkpoints | {"REVERSE": False}
        yield Variant("walk, checkpoints", "plain", wide_walk, call.plan.forward, switches)
    elif wide.fused(call):
        for wider, tile in tiles(call.plan.forward).items():
            if call.gated:
                yield Variant(f"{wider}forward", "plain", wide_forward, tile, forward)
                yield Variant(f"{wider}forward, checkpoints", "plain", wide_forward, tile, checkpoints)
                continue
            nothing = forward | dict.fromkeys(("HAS_INITIAL", "STORE_STATES"), False)
            specialized = specializes(call, tile)
            kernel = specialized_forward if specialized else head_forward
            for sums in (0, SUMS_OF_SEQUENCES) if specialized and call.head_gated else (0,):
                made, of_sums = {"SUMS": sums}, _SUMS if sums else ""
                yield Variant(f"{wider}forward{of_sums}", "plain", kernel, tile, forward | made)
                yield Variant(f"{wider}forward, checkpoints{of_sums}", "plain", kernel, tile, checkpoints | made)
                yield Variant(
                    f"{wider}forward, nothing given or kept{of_sums}", "plain", kernel, tile, nothing | made,
                    ("initial", "states"),
                    reads_early=_COPIES_OF_ROWS if call.head_gated and not call.varlen and not sums else (),
                )  # fmt: skip
    tile = wide_gradients_tile(call.V, call.gated, call.plan.backward)
    for parked in {False, parks_dstates(call)}:
        yield Variant("gradients" + ", parked" * parked, "plain", wide_gradients, tile, {"PARKED": parked})
    if parks_dstates(call):
        for wider, tile in tiles(wide_recurrence_tile(call.V)).items():
            switches = steps | {"REVERSE": True, "PARK": True, "STORE_EXCESS": True}
            switches |= {"STORE_STATES": False, "STORE_DECAYS": False}
            yield Variant(f"{wider}reverse recurrence, parked", "plain", wide_recurrence, tile, switches)
    if fits_one_backward(call):
        backward = {"HAS_AFTER": True, "STORE_BEFORE": True, "SCRATCH": False}
        yield Variant("backward", "plain", wide_backward, WIDE_BACKWARD, backward)


def compile_kernel(call: Call, variant: Variant, arch: str) -> Any:
    """Compiles one kernel of `call` for an architecture, "90" (sm_90) or "gfx942"; no GPU needed.

    Returns Triton's compiled kernel, whose `asm` holds the stages down to the cubin or AMD's machine code.
    """
    kernel = variant.kernel
    # Without a switch for packed sequences, a kernel is for these alone.
    unpacked = "VARLEN" in kernel.arg_names and not call.varlen
    absent = dict.fromkeys(("cu_seqlens", *variant.absent) if unpacked else variant.absent)
    if not call.gated:
        absent |= dict.fromkeys(("parked", "excesses"))
        absent |= {} if call.head_gated else dict.fromkeys(("g", "decays", "frame_factors"))
    absent |= {"gates": None} if "SUMS" in kernel.arg_names and not variant.switches["SUMS"] else {}
    absent |= {} if variant.switches["STORE_DG"] else {"dg": None}
    amd = {"PRECISION": operands(call.dtype, amd=True).precision} if _is_amd(arch) else {}
    constants = named(kernel, call.constants(variant.tile) | variant.switches | absent | amd)
    signature = {name: type_of(call, variant.kernel, name, constants) for name in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    whole = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith(_STEPS)]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in whole}
    values = {places[name]: value for name, value in constants.items()}
    source = _source(kernel, signature, values, aligned)
    options = variant.tile.options_on(amd=_is_amd(arch)) | variant.options
    target = GPUTarget("hip", arch, 64) if _is_amd(arch) else GPUTarget("cuda", int(arch), 32)
    return triton.compile(source, target=target, options=options)


def _is_amd(arch: str) -> bool:
    return arch.startswith("gfx")


def type_of(call: Call, kernel: Any, name: str, constants: dict[str, Any]) -> str:
    """An argument's type in Triton's notation."""
    if name in constants:
        return "constexpr"
    if name in _SCALARS or name.endswith(_STEPS):
        return "i32"
    if name in ("flags", "failed", "raised", "marks", "strong", "cleared"):
        return "*i32"
    if name == "cu_seqlens":
        return "*i64"
    name = _TAILS.get(name, name)
    outputs = {"o": call.key_parts, "dv": call.key_parts, "dq": call.value_parts, "dk": call.value_parts}
    if name in _INPUTS or outputs.get(name) == 1:
        return _POINTER[call.dtype]
    # Of gates per head, all but the recurrence read sums.
    reads_sums = call.head_gated and kernel is not gla_recurrent_kernel
    if name == "sums" or (name == "g" and reads_sums):
        return _POINTER[call.sums_dtype]
    as_given = (*_GATES, "g")
    in_parts = name == "dg" and (call.gate_parts if call.head_gated else call.value_parts) > 1
    if name in as_given and not in_parts and call.bfloat16_gates:
        return "*bf16"
    if name in ("states", "dstates", "parked"):
        return _POINTER[call.operands.dtype]
    return "fp32" if name in ("scale", "late_scale", "other_scale") else "*fp32"


def _source(kernel: Any, signature: dict[str, str], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled: Any) -> Resources:
    """A compiled kernel's resources: from AMD's assembly, or read with the `cuobjdump` that comes with Triton."""
    if "amdgcn" in compiled.asm:
        found = {
            key: int(value)
            for key, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"])
        }
        return Resources(found["vgpr_count"], found["private_segment_fixed_size"], compiled.metadata.shared)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run([tool, "-res-usage", cubin.name], check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return Resources(found["REG"], found["STACK"], compiled.metadata.shared, columns)


def call_of(
    K: int, V: int, gated: bool, dtype: torch.dtype, choice: LaunchPlan, bfloat16_gates: bool = False,
    head_gated: bool = False, value_gated: bool = False, varlen: bool = False,
) -> Call:  # fmt: skip
    """A call with head dims K and V and an arbitrary shape, with `varlen` of packed sequences, for compiling."""
    kind = Call
    if value_gated:
        kind, choice = ValueGatedCall, replace(choice, family="triton", chunk_size=CHUNK)
    return kind(
        2, 4096, 4, K, V, 2, varlen, gated, K**-0.5, dtype, choice, bfloat16_gates, head_gated=head_gated
    )  # fmt: skip
