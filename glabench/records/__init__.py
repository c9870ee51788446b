"""Records: what measuring gave, and the run folder that keeps it."""

from glabench.records.rates import Ceilings, with_rates
from glabench.records.record import FAILED, Record, Status
from glabench.records.runfolder import RunFolder

__all__ = ["FAILED", "Ceilings", "Record", "RunFolder", "Status", "with_rates"]
