"""Workers that answer at once, with made-up measurements or from a script."""

from dataclasses import dataclass, field, replace

from simulated import failed, record

from glabench.measure.job import Job

SAMPLES = tuple(2.0 + i / 1000 for i in range(20))


def measured(job, cell, factor=1.0, **changes):
    """A record as from a working worker, with its time multiplied by `factor`."""
    found = record(
        [factor * sample for sample in SAMPLES],
        cell,
        peak_allocated_mib=None,
        peak_resident_mib=1.0,
        gbps=1.0,
        tflops=1.0,
    )
    return replace(found, run_id=job.run_id, code=job.code, **changes)


@dataclass
class MadeUpWorker:
    """Takes answers from `script`, by backend and sequence length or by length alone; other cells get a good record.

    An answer is a status, an exception to raise, a record, or a function that makes one from job and cell.
    """

    job: Job
    variables: dict
    script: dict
    asked: list = field(default_factory=list)
    closed: bool = False
    paused: bool = False

    def pause(self):
        self.paused = True

    def is_loaded(self):
        return not self.closed

    def measure(self, cell):
        assert not self.closed
        self.paused = False
        self.asked.append(cell)
        answer = self.script.get((cell.backend, cell.seqlen), self.script.get(cell.seqlen, "ok"))
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return answer(self.job, cell)
        if answer == "ok":
            return measured(self.job, cell)
        if isinstance(answer, str):
            return replace(failed(answer, f"a made-up {answer}", cell), run_id=self.job.run_id, code=self.job.code)
        return answer

    def close(self):
        self.closed = True


class Workers:
    """Starts made-up workers instead of `ProcessWorker`, and keeps them all in `started`."""

    def __init__(self, script=()):
        self.script = dict(script)
        self.started = []

    def __call__(self, job, variables, show_errors=False):
        self.started.append(MadeUpWorker(job, variables, self.script))
        return self.started[-1]

    @property
    def asked(self):
        """All requested cells, in order."""
        return [cell for worker in self.started for cell in worker.asked]
