"""The gate's second look at what it doubts: in turns with the baseline's own code, or simply once more."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from glabench.cli.rounds import Campaign, Version, compile_cache, measure_rounds, records_of
from glabench.errors import UsageError
from glabench.measure.revisions import (
    checked_out,
    differs_from_present,
    plugins_in,
    repository_with,
    worker_variables,
)
from glabench.records import Ceilings, Record
from glabench.records.baseline import Baseline
from glabench.records.gate import (
    CONFIRMING_ROUNDS,
    Finding,
    Limits,
    Outcome,
    check_cells,
    check_first_calls,
    confirmed,
    suspects,
)
from glabench.sweeps import Cell

_IN_TURNS = "measured in turns with the baseline's revision"


@dataclass(frozen=True)
class SecondLook:
    """How to look again: the campaign of the first look, what it was held against, and the present code."""

    campaign: Campaign
    held: Baseline
    limits: Limits
    yardstick: str | None
    present: Version
    ceilings: Ceilings

    def at_times(self, now: Sequence[Sequence[Record]], findings: Sequence[Finding]) -> list[Finding]:
        """The findings of `check_cells` after a look at the doubtful times; the others stay as they are.

        With a yardstick, which takes the machine off already, that is one more round beside it.
        """
        doubtful = suspects(findings, self.limits)
        if not doubtful:
            return list(findings)
        self.campaign.messages.say(f"{len(doubtful)} cells are measured once more")
        with nullcontext() if self.yardstick is not None else self._code_of_baseline() as before:
            if before is not None:
                sides = {"before": before, "now": self.present}
                measured = self._measured(doubtful, "again", sides, CONFIRMING_ROUNDS)
                found, how = check_cells(measured["before"], measured["now"], self.limits, paired=True), _IN_TURNS
            else:
                beside = [c for c in self.campaign.cells if c in doubtful or c.backend == self.yardstick]
                more = self._measured(beside, "again", {"round": self.present}, 1)["round"]
                found = check_cells(self.held.rounds, [*now, *more], self.limits, self.yardstick)
                how = "with one more round"
        again = {finding.cell: finding for finding in found}
        return [confirmed(f, again.get(f.cell), how) if f.cell in doubtful else f for f in findings]

    def at_first_calls(self, findings: Mapping[str, Finding]) -> list[Finding]:
        """The findings of `check_first_calls` after a look at the slow ones, again with nothing compiled before.

        A backend one of whose cells has no time in this look stays under suspicion: that cell may be the slow one.
        """
        slow = [backend for backend, finding in findings.items() if finding.outcome is not Outcome.FINE]
        if not slow:
            return list(findings.values())
        self.campaign.messages.say(f"first calls of {', '.join(slow)} are measured once more")
        cells = [cell for cell in self.campaign.cells if cell.backend in slow]
        with self._code_of_baseline() as before, TemporaryDirectory(prefix="glabench-cache-") as cache:
            sides = {} if before is None else {"before": before}
            sides = {
                side: replace(version, variables={**version.variables, **compile_cache(f"{cache}/{side}")})
                for side, version in {**sides, "now": self.present}.items()
            }
            measured = self._measured(cells, "first-calls", sides, 1)
        again = check_first_calls(measured.get("before", self.held.rounds), measured["now"], self.limits)
        for record in measured["now"][0]:
            if not record.samples_ms:
                again.pop(record.cell.backend, None)
        how = "compiled once more" if before is None else _IN_TURNS
        return [confirmed(f, again.get(b), how) if b in slow else f for b, f in findings.items()]

    def _measured(
        self, cells: Sequence[Cell], name: str, sides: Mapping[str, Version], rounds: int
    ) -> dict[str, list[list[Record]]]:
        folders = measure_rounds(self.campaign.on(cells, name), sides, rounds, self.ceilings)
        return {side: records_of(of_side) for side, of_side in folders.items()}

    @contextmanager
    def _code_of_baseline(self) -> Iterator[Version | None]:
        """The baseline's revision, checked out; None where it cannot tell anything.

        It cannot if the repository lacks the revision, or if the code that workers take from it is the present one:
        the cause may then lie in the rest of the code, and would be on both sides.
        """
        revision, plugins = self.held.revision, self.present.plugins
        repository = repository_with(revision)
        found = None
        with ExitStack() as stack:
            if repository is not None and revision is not None:
                try:
                    tree = stack.enter_context(checked_out(repository, revision))
                    if differs_from_present(tree, repository, plugins):
                        found = Version(worker_variables(tree), plugins_in(tree, repository, plugins), "baseline")
                except UsageError as problem:
                    self.campaign.messages.say(f"the baseline's revision cannot be checked out ({problem})")
            yield found
