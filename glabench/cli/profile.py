"""The command `glabench profile`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from glabench.backends.sites import variables_with
from glabench.cli.options import JsonOption, MeasuringOptions
from glabench.cli.output import Messages, check_targets, print_table, write_json
from glabench.errors import GlabenchError, UsageError, allowed_names, count_of
from glabench.inspecting.code import occupancy
from glabench.measure.job import Job
from glabench.profiling.profile import AGREES, Kernel, Profile
from glabench.profiling.request import Request, profile_cell
from glabench.records import Record
from glabench.records.environment import device_name
from glabench.records.metrics import significant
from glabench.scheduling.plan import Plan
from glabench.scheduling.process import ProcessWorker, WorkerDiedError, WorkerTimeoutError
from glabench.sweeps import Sweep
from glabench.sweeps.model import Variant

# What is profiled if no axis says otherwise. A model's width gives the sizes that an op's authors use.
_AXES: Mapping[str, str] = {"seqlen": "2k", "batch": "8", "dtype": "bf16", "pass": "fwd+bwd"}
_ON_CPU: Mapping[str, str] = {"seqlen": "256", "batch": "1", "dtype": "fp32"}
_WIDTH = "1024"
# Kernels that take less than this share of a call are one row.
_LEAST_SHARE = 0.005
_SIZES = {"width", "heads", "head_dim", "key_dim", "value_dim", "inner", "state_size"}


def profile(
    options: MeasuringOptions,
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="The backend; `glabench backends` lists them.")],
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write torch's snapshot of all allocations of a call, for its memory viewer."
        ),
    ] = None,
    all_kernels: Annotated[bool, typer.Option("--all", help="Show those of less than 0.5 % of the time too.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put the profile beside an earlier one, which --json has kept.")
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """Show where the time of one call goes: every kernel, the gaps between them, and the host's side.

    The call is measured as in any run, then profiled in a process of its own, which times nothing. Without axes it is
    the width of a small model: 8 sequences of 2k tokens, forward and backward. On a CPU, torch's operators are shown.

    Example: glabench profile fla-gla --seqlen 4k --batch 32 --heads 4 --key-dim 128 --value-dim 256
    """
    check_targets({"--json": json_to, "--trace": _text(trace), "--memory": _text(memory)})
    before = None if compare is None else _load(compare)
    plan = _plan(options, backend)
    (cell,) = plan.cells
    if memory is not None and cell.device != "cuda":
        raise UsageError("--memory: torch keeps a history of allocations on a GPU alone; leave it out")
    messages = Messages(options.quiet, options.verbose)
    messages.say(f"{cell}, on {device_name(plan.place.environment)}")
    record = _measure(plan, options)
    if record.status not in ("ok", "inaccurate", "suspicious"):
        raise GlabenchError(f"{cell}: {record.status}: {record.reason}")
    request = Request(
        cell, plan.place.device, plan.place.plugins, trace_to=_text(trace and trace.resolve()),
        memory_to=_text(memory and memory.resolve()),
    )  # fmt: skip
    found = profile_cell(request, _variables(plan), plan.settings.cell_timeout_s)
    if json_to is not None:
        write_json(
            {"cell": cell.to_json(), "time_ms": record.time_ms, "status": record.status, **found.to_json()}, json_to
        )
    elif before is not None:
        _show_beside(before, found)
    else:
        _show(found, record, plan, all_kernels)
    for path in (trace, memory):
        if path is not None:
            messages.say(f"wrote {path}")


def _load(path: Path) -> Profile:
    """A profile that --json has kept. Raises UsageError."""
    try:
        return Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as problem:
        raise UsageError(f"--compare: '{path}' is no profile that `glabench profile --json` wrote: {problem}") from None


def _show_beside(before: Profile, now: Profile) -> None:
    """Both profiles by the names of kernels, those that took the longest first."""
    sides = [before.by_name(), now.by_name()]
    names = sorted(sides[0].keys() | sides[1].keys(), key=lambda name: -max(side.get(name, 0.0) for side in sides))
    rows = [_beside(name, sides[0].get(name), sides[1].get(name)) for name in names]
    rows.append(_beside("all, from the first start to the last end", before.span_ms, now.span_ms))
    print_table(("kernel" if now.on_device else "operator", "ms, before", "ms, now", "ratio"), rows)


def _beside(name: str, there: float | None, here: float | None) -> Sequence[str]:
    ratio = "-" if there is None or here is None else f"x{here / there:.3g}"
    return (name, *("-" if ms is None else significant(ms) for ms in (there, here)), ratio)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _plan(options: MeasuringOptions, backend: str) -> Plan:
    """The plan of the one cell that is asked for. Raises UsageError."""
    if "backend" in options.axes:
        raise UsageError("--backend: BACKEND names it already; leave it out")
    width = {} if options.axes.keys() & _SIZES else {"width": _WIDTH}
    sweep = Sweep("profile", {**_AXES, **width}, (Variant(backend),), title="Profile", on_cpu=_ON_CPU)
    request = options.request("profile")
    known = tuple(request.find_place().registry)
    if backend not in known:
        raise UsageError(f"BACKEND: '{backend}' is unknown ({allowed_names(known, backend)})")
    plan = replace(request, sweep=sweep).plan()
    if (refusal := plan.place.unavailable(backend)) is not None:
        raise UsageError(f"BACKEND: {backend} cannot run here: {refusal}")
    if len(plan.cells) > 1:
        raise UsageError(
            f"the axes name {count_of(len(plan.cells), 'cell')}; give one value each: a profile is of one call"
        )
    return plan


def _variables(plan: Plan) -> Mapping[str, str]:
    return variables_with(plan.place.sites.get(plan.cells[0].backend), {})


def _measure(plan: Plan, options: MeasuringOptions) -> Record:
    """The cell's record, from a worker of its own."""
    (cell,) = plan.cells
    job = Job(cell.backend, "profile", plan.place.device, plan.settings, plan.place.plugins)
    worker = ProcessWorker(job, _variables(plan), options.verbose)
    try:
        return worker.measure(cell)
    except (WorkerDiedError, WorkerTimeoutError, ValueError) as problem:
        raise GlabenchError(f"{cell}: {problem}") from None
    finally:
        worker.close()


def _show(found: Profile, record: Record, plan: Plan, all_kernels: bool) -> None:
    gpu = plan.place.environment.get("gpu") or {}
    arch = str(gpu.get("compute_capability", "")).replace(".", "")
    if found.on_device:
        head: Sequence[str] = (
            "kernel", "calls", "ms", "share", "idle before, us", "grid", "threads", "registers", "shared, KiB",
            "programs per SM", "GB/s",
        )  # fmt: skip
    else:
        head = ("operator", "calls", "ms", "share")
    shown = [kernel for kernel in found.kernels if all_kernels or kernel.ms >= _LEAST_SHARE * found.span_ms]
    rows = [_row(kernel, found.span_ms, arch)[: len(head)] for kernel in shown]
    if hidden := [kernel for kernel in found.kernels if kernel not in shown]:
        ms, calls = sum(kernel.ms for kernel in hidden), sum(kernel.calls for kernel in hidden)
        rest = [f"{len(hidden)} others (--all)", str(calls), significant(ms), f"{ms / found.span_ms:.1%}"]
        rows.append([*rest, *[""] * (len(head) - len(rest))])
    print_table(head, rows)
    for line in describe(found, record.time_ms, plan):
        print(line)


def _row(kernel: Kernel, span_ms: float, arch: str) -> Sequence[str]:
    held = None
    if kernel.threads and kernel.registers is not None and kernel.shared_bytes is not None:
        held = occupancy(arch, -(-kernel.threads // 32), kernel.registers, kernel.shared_bytes)
    return (
        kernel.name,
        str(kernel.calls),
        significant(kernel.ms),
        f"{kernel.ms / span_ms:.1%}",
        significant(kernel.gap_ms * 1e3, 2),
        "x".join(map(str, kernel.grid or ())) or "-",
        _known(kernel.threads),
        _known(kernel.registers),
        "-" if kernel.shared_bytes is None else f"{kernel.shared_bytes / 1024:.3g}",
        "-" if held is None else f"{held.programs} ({held.limit})",
        "-" if kernel.bytes is None else significant(kernel.bytes / kernel.ms / 1e6),
    )


def _known(value: Any) -> str:
    return "-" if value is None else str(value)


def describe(found: Profile, time_ms: float | None, plan: Plan) -> list[str]:
    """What the table does not say: the span, how it agrees with the suite's time, the rate, the host's side."""
    (cell,) = plan.cells
    lines = []
    if found.on_device:
        idle = found.span_ms - found.busy_ms
        lines.append(
            f"From the first kernel's start to the last one's end: {significant(found.span_ms)} ms, of which kernels "
            f"run for {significant(found.busy_ms)} and the device is idle for {significant(idle, 2)} ms."
        )
    else:
        lines.append(
            f"A call takes {significant(found.span_ms)} ms under the profiler, of which torch's operators take "
            f"{significant(found.busy_ms)}."
        )
    if time_ms:
        off = found.span_ms / time_ms - 1
        same = "they agree" if abs(off) <= AGREES else "they differ, so take shares, not times, from the table"
        lines.append(
            f"The suite measures {significant(time_ms)} ms; the profile is {abs(off):.1%} {_way(off)}: {same}."
        )
        op = plan.place.registry.op_of(cell.backend)
        gbs, tflops = op.moved_bytes(cell) / time_ms / 1e6, op.flops(cell) / time_ms / 1e9
        lines.append(
            f"At the suite's time, a perfect pass's bytes move at {significant(gbs)} GB/s, and its operations run at "
            f"{significant(tflops)} TFLOP/s."
        )
    host = found.host
    lines.append(
        f"The host, slowed down by the profiler: {significant(host.call_ms, 2)} ms per call"
        + (
            f", {significant(host.launch_ms, 2)} of it in the driver for {host.launches} launches"
            if found.on_device
            else ""
        )
        + f", {significant(host.operators_ms, 2)} in torch's operators, {significant(host.rest_ms, 2)} in Python."
    )
    return lines


def _way(off: float) -> str:
    return "longer" if off >= 0 else "shorter"
