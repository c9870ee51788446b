"""A comparison: all findings of two sides, with a summary and an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from glabench.errors import ExitCode
from glabench.sweeps.model import Cell
from glabench.verdicts.findings import EXIT_CODES, FAILING, Finding, Limits, Verdict, worst
from glabench.verdicts.machine import Machine
from glabench.verdicts.statistics import PROCESS_SPREAD, median_of_known

if TYPE_CHECKING:
    import pandas as pd

_WORST_FIRST = list(reversed(Verdict))
_UNSOUND = frozenset({Verdict.FAILED, Verdict.INACCURATE})


@dataclass(frozen=True)
class Comparison:
    """The findings of two sides, `base` and `new`."""

    base: str
    new: str
    limits: Limits
    # One per cell, then one per backend for what is judged by its sum, such as first calls.
    findings: tuple[Finding, ...]
    # Differences between the environments: name, base value, new value.
    differences: tuple[tuple[str, Any, Any], ...] = ()
    # MHz, median SM clocks during sampling, of the base and of the new side.
    clocks_mhz: tuple[float | None, float | None] = (None, None)
    # Further remarks, such as that the measured code is the same.
    notes: tuple[str, ...] = ()
    # What all cells have in common, if the sides were not measured in turns and enough cells show it.
    machine: Machine | None = None
    # The spread between processes that a second look counts with, as a share.
    processes: float = PROCESS_SPREAD

    @property
    def cells(self) -> list[Finding]:
        """The findings of cells."""
        return [finding for finding in self.findings if finding.cell is not None]

    @property
    def worst_first(self) -> list[Finding]:
        """All findings, worst verdict first."""
        return sorted(self.findings, key=lambda finding: _WORST_FIRST.index(finding.verdict))

    def table(self) -> pd.DataFrame:
        """One row per cell: its fields, the verdict, the ratio with its interval, and both values of every metric."""
        import pandas as pd

        return pd.DataFrame([finding.to_json() for finding in self.cells])

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "base": self.base,
            "new": self.new,
            "limits": dict(self.limits.by_metric),
            "verdicts": dict(Counter(str(finding.verdict) for finding in self.cells)),
            "notes": list(self.notes),
            "machine": self.machine.to_json() if self.machine else None,
            "sm_clock_mhz": dict(zip(("base", "new"), self.clocks_mhz, strict=True)),
            "environment": [{"name": name, "base": base, "new": new} for name, base, new in self.differences],
            "findings": [finding.to_json() for finding in self.findings],
        }

    def summary(self) -> str:
        """One line: the number of cells per verdict, sums that became worse, the median ratio of all cells.

        If that median is far from 1, the machine has probably changed, not a kernel. It is that of the first look, in
        which all cells were measured.
        """
        counts = Counter(finding.verdict for finding in self.cells)
        parts = [", ".join(f"{counts[verdict]} {verdict}" for verdict in _WORST_FIRST if counts[verdict])]
        parts += [f"{finding.name} {finding.verdict}" for finding in self.worse_sums()]
        ratios = [finding.first_ratio or finding.ratio for finding in self.cells]
        middle = median_of_known(None if ratio is None else ratio.ratio for ratio in ratios)
        if middle is not None:
            when = " before the second look" if any(finding.first_ratio for finding in self.cells) else ""
            parts.append(f"median ratio of all cells{when} {middle:.3f}")
        if self.machine is not None and self.machine.differs:
            parts.append(str(self.machine))
        return "; ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"<Comparison of {self.new} with {self.base}: {self.summary()}>"

    def exit_code(self, fail_on: Collection[Verdict] = FAILING) -> ExitCode:
        """That of the worst verdict among `fail_on`, each metric's counted; OK if there is none.

        A check fails on FAILING, a strict check also on UNCLEAR.
        """
        found = {verdict for finding in self.findings for verdict in finding.judged.values()}
        bad = found & set(fail_on) & EXIT_CODES.keys()
        return EXIT_CODES[worst(bad)] if bad else ExitCode.OK

    def suspects(self) -> list[Cell]:
        """The cells whose time is not shown to be within the limit; a second look may clear them."""
        return [finding.cell for finding in self.findings if finding.cell is not None and finding.is_suspect]

    def worse_sums(self) -> list[Finding]:
        """The sums of backends that became worse, such as first calls; a fresh first round may clear them."""
        return [finding for finding in self.findings if finding.cell is None and finding.verdict in FAILING]

    def confirmed(self, again: Comparison, how: str, is_partial: bool = False) -> Comparison:
        """The comparison with the suspects' findings replaced by those of a second look, which `how` describes.

        The remarks report both. Suspects that the second look could not compare stay suspects; if it `is_partial`, as
        one with other limits, without a remark.
        """
        found = {f.cell: f for f in again.cells if f.verdict is not Verdict.NOT_COMPARED}
        suspects = [f for f in self.cells if f.is_suspect and (f.cell in found or not is_partial)]
        looked_at = {f.name: found.get(f.cell) for f in suspects}
        return self._with_second_look(looked_at, how)

    def confirmed_sums(self, again: Comparison, how: str) -> Comparison:
        """As `confirmed`, for the sums of backends.

        A backend with a failed or inaccurate cell in the second look stays a suspect, because that cell may be what
        made its sum worse.
        """
        unsound = {f.cell.backend for f in again.cells if f.cell and f.verdict in _UNSOUND}
        found = {f.name: f for f in again.findings if f.backend is not None and f.backend not in unsound}
        return self._with_second_look({f.name: found.get(f.name) for f in self.worse_sums()}, how)

    def _with_second_look(self, looked_at: Mapping[str, Finding | None], how: str) -> Comparison:
        findings = [_confirm(f, looked_at[f.name], how) if f.name in looked_at else f for f in self.findings]
        return replace(self, findings=tuple(findings))


def _confirm(suspect: Finding, again: Finding | None, how: str) -> Finding:
    if again is None:
        return replace(suspect, remarks=(*suspect.remarks, f"{how}, which gave nothing to compare"))
    remarks = (*again.remarks, how, f"before that: {suspect.reason}")
    cleared = _WORST_FIRST.index(again.verdict) > _WORST_FIRST.index(Verdict.UNCLEAR)
    return replace(again, remarks=remarks, first_ratio=suspect.ratio, cleared=cleared)
