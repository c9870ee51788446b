"""Records (the results of measuring), the table of metrics, and the run folder that stores records."""

from glabench.records.record import FAILED, WRONG, Measured, Record, Status
from glabench.records.run import Run
from glabench.records.runfolder import RunFolder

__all__ = ["FAILED", "WRONG", "Measured", "Record", "Run", "RunFolder", "Status"]
