"""A small plan: its axes and settings, and an observer that records what it is told; see the fixture `plan`."""

from glabench.measure.settings import Settings
from glabench.scheduling.observer import Observer

AXES = {"seqlen": "1..3:+1", "batch": "1", "heads": "1", "head_dim": "16", "dtype": "fp32", "pass": "fwd"}
SETTINGS = Settings(time_limit_s=0.02)


class Heard(Observer):
    """Records all calls; at a record whose number is in `then`, raises the exception stored there."""

    def __init__(self, then=()):
        self.said, self.events, self.then = [], [], dict(then)

    def say(self, text):
        self.said.append(text)

    def begin(self, cells, done):
        self.events.append(("begin", cells, done))

    def start(self, cell, lane):
        self.events.append(("start", lane, cell.backend, cell.seqlen))

    def record(self, record, lane):
        self.events.append((record.status, lane, record.cell.backend, record.cell.seqlen))
        if len(self.records) in self.then:
            raise self.then[len(self.records)]

    def end(self):
        self.events.append(("end",))

    @property
    def records(self):
        return [event for event in self.events if event[0] not in ("begin", "start", "end")]
