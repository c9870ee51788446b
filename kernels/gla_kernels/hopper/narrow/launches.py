"""The launches of the plain form for narrow heads on Hopper: over whole sequences, or over pieces of them.

Few heads of a long sequence would leave most of the GPU idle. So sequences are cut: first the state that each piece
adds is computed, a scan gives the states at the borders, and then pieces are independent (see `wide/pieces.py`, which
does the same for wide heads). So is a backward of several packed sequences from checkpoints, whatever the heads.
"""

from collections.abc import Sequence

import torch

from gla_kernels.hopper.wide.pieces import SUMS_OF_SEQUENCES, Run, cut, cut_into, groups, is_whole, whole
from gla_kernels.launching.buffers import Flags, Gradients, Inputs, named_strides
from gla_kernels.launching.call import Call, arranged, decided_once
from gla_kernels.launching.plans import LEAST_NARROW_PIECES, pieces_gain
from gla_kernels.portable.launches import gates_of, head_gates_of, scan


@decided_once
def choose_pieces(call: Call, multiple: int = 1) -> Run:
    """Whole sequences or, if these occupy too little of the GPU, pieces of a multiple of `multiple` chunks.

    A backward takes these, a forward only if it gains.
    """
    if not call.has_few_narrow_heads:
        return whole(call)
    run = cut_into(call, call.narrow_programs // call.H, multiple)
    # Of packed sequences, as many pieces as sequences may be nearly empty.
    pieces = run.count - call.sequences if call.varlen else run.count
    return run if pieces >= LEAST_NARROW_PIECES * call.sequences else whole(call)


@decided_once
def forward_pieces(call: Call, checkpoints: bool) -> Run:
    """The pieces of a forward, at whose borders checkpoints are if it keeps any."""
    chunks = call.chunks // call.sequences if call.varlen else call.chunks  # of a sequence of average length
    if not pieces_gain(chunks, call.sequences * call.H, call.multiprocessors, call.gated or call.head_gated):
        return whole(call)
    return choose_pieces(call, call.checkpoint_chunks if checkpoints else 1)


def forward_clears(call: Call, checkpoints: bool) -> bool:
    """Whether a forward, with checkpoints or not, sets its flags to 0 itself: `_borders` does, for pieces."""
    return call.gated and not is_whole(call, forward_pieces(call, checkpoints))


def backward_clears(call: Call) -> bool:
    """The same for a backward from all states."""
    return call.gated and not is_whole(call, choose_pieces(call))


@decided_once
def recomputed_groups(call: Call) -> Sequence[Run]:
    """Runs of pieces of `call.every` chunks for a backward from checkpoints; none if all sequences take a piece a time.

    Of several packed sequences, each may have all tokens for all that is known when kernels are launched. A piece a
    time would take launches for that many pieces, most of which no sequence has.
    """
    if call.plan.family != "hopper":
        return ()
    packed = call.varlen and call.sequences > 1 and call.chunks > call.checkpoint_chunks
    return tuple(groups(call)) if packed or not is_whole(call, choose_pieces(call, call.checkpoint_chunks)) else ()


@decided_once
def form(call: Call) -> tuple[object, ...]:
    """The part of a call's sizes that decides which kernels it launches."""
    runs = (forward_pieces(call, False), forward_pieces(call, True), choose_pieces(call))
    scans = (None if is_whole(call, run) else call.tile_of_scan(run.chunks) for run in runs)
    sums = (sums_made(call, checkpoints) for checkpoints in (False, True))
    return *scans, *sums, bool(recomputed_groups(call)), call.tile_of_scan(call.checkpoint_chunks), starts_early(call)


# The same of a piece. With as many as of a sequence, 1, 32k, 16, 64, 64 took longer than with a kernel for the sums.
SUMS_OF_PIECES = 8


@decided_once
def sums_made(call: Call, checkpoints: bool) -> int:
    """How many chunks a program of a forward's first kernel makes the sums of gates for; 0 if another kernel has to.

    A program reads the gates of one head, and with them, in units of 32 bytes, those of others. That is 8 times as much
    with 8 heads or more, which does not show if programs are alone on their multiprocessors, or of short pieces.
    """
    run = forward_pieces(call, checkpoints)
    if not call.head_gated or (is_whole(call, run) and call.sequences * call.H > call.multiprocessors):
        return 0
    most = SUMS_OF_SEQUENCES if is_whole(call, run) else SUMS_OF_PIECES
    return most if min(run.chunks, call.chunks) <= most else 0


def starts_early(call: Call) -> bool:
    """Whether programs for whole sequences may start before the kernel before has ended.

    If there are nearly as many as multiprocessors, some would come to lie in twos on one, and take longest, while
    others are idle. With a gate per head, forward + backward of 8, 4k, 16, 64, 64 took 0.40 ms in place of 0.30, of
    6, 2k, 16, 64, 64 0.20 in place of 0.14. Half as many find multiprocessors enough that are empty.
    """
    programs = call.sequences * call.H
    return not call.multiprocessors < 2 * programs <= 2 * call.multiprocessors


def _borders(
    call: Call, inputs: Inputs, x: torch.Tensor, y: torch.Tensor, run: Run, initial: torch.Tensor | None,
    final: torch.Tensor | None, *, reverse: bool, sums: int = 0, cleared: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The state before each piece, from k and v; in reverse its gradient after it, from q and do.

    Fills `final`, and sets `cleared` to 0. `sums`: see `sums_made`.
    """
    from gla_kernels.hopper.narrow.recurrence import gla_recurrence_hopper

    local, borders = call.new_states(inputs.q, run.count), call.new_states(inputs.q, run.count)
    decays = borders.new_empty(borders.shape[:3]) if call.gated or call.head_gated else None
    arguments = call.numbers | gates_of(call, inputs) | head_gates_of(inputs, sums == 0) | named_strides(x=x, y=y) | {
        "x": x, "y": y, "end": local, "decays": decays, "cu_seqlens": inputs.cu_seqlens,
        "N": call.sequences, "piece_chunks": run.chunks,
    }  # fmt: skip
    programs, kernel = (run.count * call.H,), gla_recurrence_hopper
    switches = {"REVERSE": reverse, "SUMS": sums}
    call.launch(kernel, call.plan.forward, programs, arranged(kernel, arguments), switches)
    scan(call, inputs, run.chunks, local, decays, borders, initial, final, reverse=reverse, cleared=cleared)
    return borders


def run_forward(
    call: Call, inputs: Inputs, flags: Flags, *, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None, checkpoints: torch.Tensor | None,
) -> None:  # fmt: skip
    """Runs the forward over whole sequences or, if these are cut, over their pieces. Outputs of None are left out."""
    run = forward_pieces(call, checkpoints is not None)
    if is_whole(call, run):
        _forward(
            call, inputs, flags, None, o=o, initial=initial, final=final, states=states, checkpoints=checkpoints
        )  # fmt: skip
        return
    sums = sums_made(call, checkpoints is not None)
    borders = _borders(
        call, inputs, inputs.k, inputs.v, run, initial, final, reverse=False, sums=sums, cleared=flags.uncleared
    )  # fmt: skip
    _forward(call, inputs, flags, run, o=o, initial=borders, states=states, checkpoints=checkpoints)


def _forward(
    call: Call, inputs: Inputs, flags: Flags, pieces: Run | None, *, o: torch.Tensor, initial: torch.Tensor | None,
    states: torch.Tensor | None, checkpoints: torch.Tensor | None, final: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Runs the kernel over `pieces`; if None, over whole sequences."""
    from gla_kernels.hopper.narrow.forward import gla_forward_hopper

    rows = (call.sequences if pieces is None else pieces.count) * call.H
    sums = sums_made(call, checkpoints is not None) if pieces is None else 0
    arguments = inputs.arguments | gates_of(call, inputs) | head_gates_of(inputs, sums == 0) | call.numbers | {
        "o": o, "initial": initial, "final": final, "states": states,
        "checkpoints": checkpoints, "flags": flags.rows, "marks": flags.marks,
        "count": call.chunks if pieces is None else pieces.chunks, "checkpoint_chunks": call.checkpoint_chunks,
        "rows": rows, "N": call.sequences, "base": 0 if pieces is None else pieces.base,
    }  # fmt: skip
    if sums and states is None and checkpoints is None:
        arguments["g"] = None  # no other kernel reads sums
    switches = {
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
        "PIECES": pieces is not None,
        "SUMS": sums,
    }
    # A program assumes one length for all its rows (a row is a head of a sequence), so packed rows need a program each,
    # and pieces too. Without gates a program per row was faster.
    several = call.gated and not call.varlen and pieces is None
    programs = min(rows, call.narrow_programs) if several else rows
    kernel = gla_forward_hopper
    early = pieces is not None or starts_early(call)
    call.launch(kernel, call.plan.forward, (programs,), arranged(kernel, arguments), switches, early=early)


def run_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, states: torch.Tensor, flags: Flags, failed: torch.Tensor,
    gradients: Gradients, *, dfinal: torch.Tensor | None, dinitial: torch.Tensor | None,
) -> None:  # fmt: skip
    """Runs the backward from the states of all chunks, over whole sequences or, if these are cut, over their pieces."""
    run = choose_pieces(call)
    if is_whole(call, run):
        _backward(
            call, inputs, do, states, None, flags, failed, gradients, None, dfinal=dfinal, dinitial=dinitial
        )  # fmt: skip
        return
    cleared = failed if backward_clears(call) else None
    after = _borders(call, inputs, inputs.q, do, run, dfinal, dinitial, reverse=True, cleared=cleared)
    _backward(call, inputs, do, states, None, flags, failed, gradients, run, dfinal=after)


def run_backward_from_checkpoints(
    call: Call, inputs: Inputs, do: torch.Tensor, checkpoints: torch.Tensor, flags: Flags, failed: torch.Tensor,
    gradients: Gradients, *, dfinal: torch.Tensor | None, dinitial: torch.Tensor | None,
) -> None:  # fmt: skip
    """Runs the backward from checkpoints, whose programs recompute the states of `call.every` chunks at a time."""
    runs = recomputed_groups(call)
    if not runs:
        states = inputs.q.new_empty(call.state_shape(call.sequences * call.checkpoint_chunks))
        _backward(
            call, inputs, do, states, checkpoints, flags, failed, gradients, None, dfinal=dfinal, dinitial=dinitial
        )  # fmt: skip
        return
    after = _borders(call, inputs, inputs.q, do, cut(call, call.checkpoint_chunks), dfinal, dinitial, reverse=True)
    # Behind the borders, whose own scratch memory is free again.
    states = inputs.q.new_empty(call.state_shape(runs[0].count * runs[0].chunks))
    for run in runs:
        these = slice(run.base, run.base + run.count)
        _backward(
            call, inputs, do, states, checkpoints, flags, failed, gradients, run, dfinal=after[these]
        )  # fmt: skip


def _backward(
    call: Call, inputs: Inputs, do: torch.Tensor, states: torch.Tensor, checkpoints: torch.Tensor | None, flags: Flags,
    failed: torch.Tensor, gradients: Gradients, pieces: Run | None, *, dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Runs the kernel over `pieces`; if None, over whole sequences. With checkpoints, `states` is scratch memory."""
    from gla_kernels.hopper.narrow.backward import gla_backward_hopper
    from gla_kernels.hopper.narrow.head_backward import simple_gla_backward_hopper

    kernel = simple_gla_backward_hopper if call.head_gated else gla_backward_hopper
    arguments = inputs.arguments | gates_of(call, inputs) | gradients.arguments | call.numbers
    if call.head_gated:
        for stride in ("g_b", "g_t", "g_h"):  # sums have none
            del arguments[stride]
    else:
        arguments |= {"flags": flags.rows, "failed": failed}
    arguments |= named_strides(do=do) | {
        "do": do, "states": states, "checkpoints": checkpoints, "dfinal": dfinal, "dinitial": dinitial,
        "count": call.chunks if pieces is None else pieces.chunks, "checkpoint_chunks": call.checkpoint_chunks,
        "N": call.sequences, "base": 0 if pieces is None else pieces.base,
    }  # fmt: skip
    switches = gradients.switches | {
        "RECOMPUTE": checkpoints is not None,
        "HAS_DFINAL": dfinal is not None,
        "STORE_DINITIAL": dinitial is not None,
        "PIECES": pieces is not None,
    }
    rows = (call.sequences if pieces is None else pieces.count) * call.H
    early = pieces is not None or starts_early(call)
    call.launch(kernel, call.plan.backward, (rows,), arranged(kernel, arguments), switches, early=early)
