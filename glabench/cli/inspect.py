"""The command `glabench inspect`."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from glabench.cli.options import JsonOption
from glabench.cli.output import check_targets, print_table, write_json
from glabench.errors import ExitCode, UsageError, allowed_names
from glabench.inspecting.request import ARCHS, DTYPES, FAMILIES, GATES, Request, family_for, kernels_of, parse_archs
from glabench.scheduling.revisions import checked_out, parse_range, repository_of, worker_variables

_HEAD = (
    "kernel",
    "registers",
    "stack, B",
    "shared, KiB",
    "programs",
    "limited by",
    "tensor-core products",
    "code, KiB",
)
_CHUNKS = ("16", "32", "64", "128")
Kernel = Mapping[str, Any]


def inspect(
    kernel: Annotated[
        str, typer.Argument(metavar="KERNEL", help="Kernels whose names, here or in a profile, contain this.")
    ] = "",
    arch: Annotated[str, typer.Option(metavar="ARCHS", help=f"Architectures: {', '.join(ARCHS)}.")] = "sm_90",
    key_dim: Annotated[int, typer.Option(min=1, max=512, help="Key head dim K.")] = 64,
    value_dim: Annotated[int, typer.Option(min=1, max=1024, help="Value head dim V.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"Type of the inputs: {', '.join(DTYPES)}.")] = "bf16",
    gates: Annotated[str, typer.Option(help=f"Type of the gates: {', '.join(GATES)}.")] = "fp32",
    chunk: Annotated[str, typer.Option(help="Chunk length C, or auto.")] = "auto",
    family: Annotated[
        str, typer.Option(help=f"Kernels: {', '.join(FAMILIES)}; auto takes those that a call would run.")
    ] = "auto",
    packed: Annotated[bool, typer.Option("--packed", help="As they are for packed sequences.")] = False,
    rev: Annotated[
        str | None, typer.Option(help="Show what differs between two git revisions: main..HEAD, HEAD..WORKTREE.")
    ] = None,
    compile_time: Annotated[
        bool, typer.Option("--compile-time", help="Compile all of them anew, and show how long that takes.")
    ] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code instead.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX instead; not for AMD.")] = False,
    json_to: JsonOption = None,
) -> None:
    """Compile our kernels without a GPU: registers, spills, shared memory, occupancy, products on tensor cores.

    Spills are bytes of stack per thread. Occupancy is how many programs a multiprocessor holds at once, and what allows
    no more. Compiling takes seconds per kernel. If a compiler made one of the mistakes that are known to give wrong
    numbers, the exit code is 4.

    Example: glabench inspect forward --arch sm_90,sm_80 --key-dim 128 --value-dim 256
    """
    given = (
        ("--dtype", dtype, DTYPES), ("--gates", gates, GATES), ("--family", family, FAMILIES),
        ("--chunk", chunk, ("auto", *_CHUNKS)),
    )  # fmt: skip
    for option, value, known in given:
        if value not in known:
            raise UsageError(f"{option}: '{value}' is unknown ({allowed_names(known, value)})")
    if sum((sass, ptx, compile_time)) > 1:
        raise UsageError("--sass, --ptx, --compile-time: give one of them")
    if rev is not None and (sass or ptx or compile_time):
        raise UsageError("--rev: shows what differs; leave out --sass, --ptx and --compile-time")
    if json_to is not None and (sass or ptx):
        raise UsageError("--json: holds what kernels need, not their code; leave out --json, or --sass and --ptx")
    check_targets({"--json": json_to})
    archs = parse_archs(arch)
    if ptx and (amd := [each for each in archs if each.startswith("gfx")]):
        raise UsageError(f"--ptx: {', '.join(amd)} has no PTX; give --sass for its machine code, or another --arch")
    # Each architecture has kernels of its own family, unless one is named.
    requests = [
        Request(
            (each,), key_dim, value_dim, dtype, None if chunk == "auto" else int(chunk),
            family_for(family, (each,), key_dim, value_dim, dtype, chunk), kernel,
            "sass" if sass else "ptx" if ptx else None, gates, packed=packed,
        )
        for each in archs
    ]  # fmt: skip
    if rev is not None:
        _compare(requests, rev, kernel, json_to)
        return
    if sass or ptx:
        _found(_print_text(kernels_of(requests)), kernel)
        return
    found = _found(_compile(requests, compile_time), kernel)
    if json_to is not None:
        write_json(found, json_to)
    else:
        head = (*_HEAD, "compile, s") if compile_time else _HEAD
        print_table(head, [_row(each, len(archs) > 1) for each in found])
    if faulty := [each for each in found if each["faults"]]:
        for each in faulty:
            faults = ", ".join(f"{count} {fault}" for fault, count in each["faults"].items())
            print(f"error: {_name(each, True)} is compiled wrongly: {faults}", file=sys.stderr)
        raise typer.Exit(ExitCode.CELL_FAILED)


def _compile(requests: Sequence[Request], anew: bool) -> list[Kernel]:
    """The kernels; with the seconds that they took to compile if Triton's cache is not to be used."""
    if not anew:
        return [_without(each, "text", "compile_s") for each in kernels_of(requests)]
    with TemporaryDirectory() as cache:
        return [_without(each, "text") for each in kernels_of(requests, {"TRITON_CACHE_DIR": cache})]


def _found(kernels: list[Kernel], only: str) -> list[Kernel]:
    if not kernels:
        raise UsageError(f"KERNEL: no kernel of these sizes has '{only}' in its name; leave it out to see all")
    return kernels


def _print_text(kernels: Iterable[Kernel]) -> list[Kernel]:
    seen = []
    for each in kernels:
        print(f"// {each['kernel']}, {each['arch']}\n{each['text']}", flush=True)
        seen.append(each)
    return seen


def _without(kernel: Kernel, *names: str) -> dict[str, Any]:
    return {name: value for name, value in kernel.items() if name not in names}


def _name(kernel: Kernel, with_arch: bool) -> str:
    return f"{kernel['kernel']} ({kernel['arch']})" if with_arch else str(kernel["kernel"])


def _row(kernel: Kernel, with_arch: bool) -> Sequence[str]:
    held = kernel["occupancy"] or {}
    products = ", ".join(f"{count} {kind}" for kind, count in kernel["products"].items())
    size = kernel["code_bytes"]
    return (
        _name(kernel, with_arch),
        str(kernel["registers"]),
        str(kernel["stack_bytes"]),
        f"{kernel['shared_bytes'] / 1024:.3g}",
        str(held.get("programs", "-")),
        str(held.get("limit", "-")),
        products or "none",
        "-" if size is None else f"{size / 1024:.3g}",
        *([f"{kernel['compile_s']:.3g}"] if "compile_s" in kernel else []),
    )


def _compare(requests: Sequence[Request], rev: str, kernel: str, json_to: str | None) -> None:
    """Shows the kernels whose machine code differs between two revisions."""
    repository = repository_of(Path.cwd())
    sides = []
    for revision in parse_range(rev):
        with checked_out(repository, revision) as tree:
            kernels = kernels_of(requests, worker_variables(tree))
            sides.append({(each["arch"], each["kernel"]): _without(each, "text", "compile_s") for each in kernels})
    first, second = sides
    _found([*first.values(), *second.values()], kernel)
    if json_to is not None:
        write_json({"first": list(first.values()), "second": list(second.values())}, json_to)
        return
    changed = [key for key in first if key in second and first[key]["code"] != second[key]["code"]]
    several = len(requests) > 1
    rows = [_changes(first[key], second[key], several) for key in changed]
    rows += [_only_in(first[key], several, "first") for key in first if key not in second]
    rows += [_only_in(second[key], several, "second") for key in second if key not in first]
    if rows:
        print_table(_HEAD, rows)
    same = len(first.keys() & second.keys()) - len(changed)
    print(f"{same} of {len(first | second)} kernels have the same machine code in both revisions.")


def _changes(before: Kernel, after: Kernel, with_arch: bool) -> Sequence[str]:
    pairs = zip(_row(before, with_arch), _row(after, with_arch), strict=True)
    return [old if old == new else f"{old} -> {new}" for old, new in pairs]


def _only_in(kernel: Kernel, with_arch: bool, which: str) -> Sequence[str]:
    return [f"{_name(kernel, with_arch)}, in the {which} revision alone", *_row(kernel, with_arch)[1:]]
