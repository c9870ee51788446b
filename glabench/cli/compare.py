"""`glabench compare`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.measuring import Place, find_place, resolved
from glabench.cli.options import MeasuringOptions, between, share, with_options
from glabench.cli.output import Messages, check_targets, data_console, write_json, write_text
from glabench.cli.rounds import Campaign, Version, campaign_folder, measure_rounds, records_of, rounds_in, turns_in
from glabench.errors import UsageError
from glabench.measure.revisions import (
    checked_out,
    commit_of,
    has_code,
    parse_range,
    plugins_in,
    repository_of,
    worker_variables,
)
from glabench.records.comparison import SAME_WITHIN, check_same_device, clocks, compare_runs, device_name, differences
from glabench.report.comparison import Comparison, draw_ratios, markdown, rich_table, summary, surroundings
from glabench.report.figures import save
from glabench.sweeps import load_sweep

_SHORT_COMMIT = 10
# What concerns two folders that are there already; all other options are for measuring.
_FOR_FOLDERS = frozenset({"runs", "same_within", "any_device", "json_to", "markdown_to", "figure", "quiet", "verbose"})


@with_options
def compare(
    context: typer.Context,
    options: MeasuringOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN_A RUN_B", help="Two run folders, or one that --rev made.", show_default=False),
    ] = None,
    rev: Annotated[
        str | None, typer.Option(help="Measure two git revisions in turns: main..HEAD, HEAD..WORKTREE, WORKTREE.")
    ] = None,
    sweep: Annotated[str, typer.Option(help="What --rev measures: a preset, or a .toml file.")] = "gate",
    rounds: Annotated[int, between("--rounds", 1, 100, "Times that --rev measures each revision, in turns.")] = 4,
    same_within: Annotated[float, share("--same-within", "How near to 1 a ratio counts as the same.")] = SAME_WITHIN,
    any_device: Annotated[bool, typer.Option("--any-device", help="Compare runs of different GPUs all the same.")] = (
        False
    ),
    out: Annotated[Path | None, typer.Option(help="With --rev: where its runs go, by default under runs/.")] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
    markdown_to: Annotated[str | None, typer.Option("--markdown", help="Write as Markdown, - for stdout.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the ratios: a path that ends in .png or .svg.")] = None,
) -> None:
    """Compare two runs, or two git revisions, cell by cell: faster, slower, same, or unclear.

    With --rev both revisions are checked out side by side, and their kernels (kernels/, and plugins of the repository)
    are measured by this glabench in fresh processes, in turns: A B, B A, and so on. A run folder may also be a folder
    of rounds, each a run of the same cells.
    """
    if figure is not None and figure.suffix not in (".png", ".svg"):
        raise UsageError(f"--figure: '{figure}' ends in neither .png nor .svg")
    check_targets({"--json": json_to, "--markdown": markdown_to, "--figure": None if figure is None else str(figure)})
    if rev is None:
        _refuse_measuring_options(context)
        found = _compare_folders(runs or [], same_within, any_device)
    elif runs:
        raise UsageError("RUN_A RUN_B: give either two run folders or --rev, not both")
    else:
        place = find_place(options.device, options.plugin)
        found = _compare_revisions(rev, sweep, rounds, same_within, campaign_folder(out, "compare"), options, place)
    if json_to is not None:
        write_json(found.to_json(), json_to)
    if markdown_to is not None:
        write_text(markdown(found), markdown_to)
    if figure is not None:
        save(draw_ratios(found), figure.parent, figure.stem, (figure.suffix,))
    if "-" not in (json_to, markdown_to) and not options.quiet:
        console = data_console()
        console.print(rich_table(found))
        for line in surroundings(found):
            console.print(line, markup=False)
        console.print(summary(found), markup=False, style="bold")


def _refuse_measuring_options(context: typer.Context) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name not in _FOR_FOLDERS and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{parameter.opts[0]}: is for measuring, which only --rev does; leave it out or give --rev"
            )


def _compare_folders(runs: list[Path], same_within: float, any_device: bool) -> Comparison:
    if len(runs) == 1:
        sides = [turns_in(runs[0], side) for side in ("A", "B")]
        paired = len(sides[0]) == len(sides[1])
    elif len(runs) == 2:
        sides, paired = [rounds_in(path) for path in runs], False
    else:
        raise UsageError(
            f"RUN_A RUN_B: needs two run folders, the folder of an earlier --rev, or --rev; got {len(runs)}"
        )
    environments = [side[0].environment() for side in sides]
    check_same_device(environments[0], environments[1], any_device)
    records = [[found for found in records_of(side) if found] for side in sides]
    for side, found in zip(sides, records, strict=True):
        if not found:
            raise UsageError(f"RUN_A RUN_B: '{side[0].path}' has no records yet")
    paired = paired and len(records[0]) == len(records[1])
    shown = [f"{runs[0]}, A", f"{runs[0]}, B"] if len(runs) == 1 else [str(path) for path in runs]
    names = [str(environment.get("version") or name) for environment, name in zip(environments, shown, strict=True)]
    return Comparison(
        names[0],
        names[1],
        compare_runs(records[0], records[1], same_within, paired),
        differences(environments[0], environments[1]),
        (clocks(records[0]), clocks(records[1])),
    )


def _compare_revisions(
    rev: str, sweep_name: str, rounds: int, same_within: float, folder: Path, options: MeasuringOptions, place: Place
) -> Comparison:
    name_a, name_b = parse_range(rev)
    repository = repository_of(Path.cwd())
    commits = {name: commit_of(repository, name) for name in (name_a, name_b)}
    sweep, cells = resolved(load_sweep(sweep_name), options, place)
    messages = Messages(options.quiet, options.verbose)
    messages.say(f"{sweep.title}: {len(cells)} cells, {rounds} rounds of each revision on {device_name(place.known)}")
    with ExitStack() as stack:
        versions = {}
        for side, name in (("A", name_a), ("B", name_b)):
            tree = stack.enter_context(checked_out(repository, name))
            if not has_code(tree, repository, options.plugin or ()):
                raise UsageError("--rev: this repository has neither kernels/gla_kernels nor a --plugin to compare")
            plugins = plugins_in(tree, repository, options.plugin or ())
            versions[side] = Version(worker_variables(tree), plugins, f"{name} ({commits[name][:_SHORT_COMMIT]})")
        campaign = Campaign(sweep, cells, options.settings(place.device), place, folder, messages, options.verbose)
        folders = measure_rounds(campaign, versions, rounds)
    a, b = records_of(folders["A"]), records_of(folders["B"])
    return Comparison(
        str(versions["A"].label),
        str(versions["B"].label),
        compare_runs(a, b, same_within, paired=True),
        clocks_mhz=(clocks(a), clocks(b)),
    )
