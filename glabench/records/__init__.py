"""Records: what measuring gave, the table of metrics, the run folder that keeps it all."""

from glabench.records.record import FAILED, Measured, Record, Status
from glabench.records.run import Run
from glabench.records.runfolder import RunFolder

__all__ = ["FAILED", "Measured", "Record", "Run", "RunFolder", "Status"]
