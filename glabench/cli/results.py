"""The command `glabench results`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.output import Messages, check_targets, write_json
from glabench.devices.provenance import hash_code
from glabench.errors import UsageError
from glabench.records.published import KERNELS, load_index, load_published, load_trees
from glabench.report.claims import make_claims
from glabench.report.results import Kernels, make_results
from glabench.scheduling import revisions
from glabench.scheduling.origins import complete_trees
from glabench.verdicts.claims import load_claims


def results(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Published runs with an index.toml, beside the folder kernels/.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
    claims: Annotated[Path, typer.Option(help="The page of claims to write, if FOLDER has a claims.toml.")] = Path(
        "docs/claims.md"
    ),
) -> None:
    """Make the pages of published runs: what each shows, when, where, with which code, and what claims they bear out.

    Texts are from FOLDER/index.toml and FOLDER/claims.toml, everything else from the runs. Kernels are compared with
    the present ones by the hash of their code; hashes for runs that record none are found in git's history and kept in
    FOLDER/kernels.json.
    """
    messages = Messages()
    check_targets({"--out": str(out), "--claims": str(claims)})
    index = load_index(folder)
    known_claims = load_claims(folder)
    published = load_published(folder, index)
    now = folder.resolve().parent / revisions.KERNELS
    if not now.is_dir():
        raise UsageError(f"FOLDER: '{folder}' has no {revisions.KERNELS} beside it, which runs are compared with")
    known = load_trees(folder)
    trees = complete_trees(known, published, now, messages.say)
    if trees != known:
        write_json(trees, str(folder / KERNELS))
    out.write_text(make_results(index, published, Kernels(hash_code(now), trees), out), encoding="utf-8")
    messages.say(f"wrote {out}")
    if known_claims is not None:
        claims.write_text(make_claims(known_claims, published, claims), encoding="utf-8")
        messages.say(f"wrote {claims}")
