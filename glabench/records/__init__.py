"""Records: what measuring gave, and the run folder that keeps it."""

from glabench.records.record import FAILED, Record, Status
from glabench.records.runfolder import RunFolder

__all__ = ["FAILED", "Record", "RunFolder", "Status"]
