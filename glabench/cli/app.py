"""The app and its commands."""

from typing import Annotated

import typer

from glabench import __version__
from glabench.cli import backends, baseline, check, chunk_sweep, compare, env, report, run, speed, sweeps, validate

_EPILOG = (
    "Exit codes: 0 fine, 1 regression (check), 2 wrong usage, 3 nothing to run, 4 some cell failed (its record says "
    "why), 5 accuracy (check), 6 unclear (check --strict), 130 interrupted."
)

app = typer.Typer(
    name="glabench",
    help="Measures how fast, how memory-hungry and how accurate sequence-mixing layers are.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"glabench {__version__}")
        raise typer.Exit


@app.callback()
def _glabench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("speed", epilog=_EPILOG)(speed.speed)
app.command("chunk-sweep", epilog=_EPILOG)(chunk_sweep.chunk_sweep)
app.command("run", epilog=_EPILOG)(run.run)
app.command("compare")(compare.compare)
app.command("check", epilog=_EPILOG)(check.check)
app.add_typer(baseline.baseline, name="baseline")
app.command("validate")(validate.validate)
app.command("report")(report.report)
app.command("backends")(backends.backends)
app.command("sweeps")(sweeps.sweeps)
app.command("env")(env.env)
