"""Backends that misbehave, each in one way, as a plugin: `--plugin tests/fake_backends.py`."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from gla_kernels import unaware_chunk_linear_attn

from glabench.backends import Backend


def correct(inputs):
    return unaware_chunk_linear_attn(inputs["q"], inputs["k"], inputs["v"])[0]


class Fake(Backend):
    op = "linear"
    title = "a fake"
    # What the backend does at the second of its sequence lengths; at the others it is correct.
    bad_seqlen = 32

    def act(self, inputs):
        raise NotImplementedError

    def bind(self, inputs, cell):
        return lambda: self.act(inputs) if cell.seqlen == self.bad_seqlen else correct(inputs)


class Good(Fake):
    name = "fake-good"

    def act(self, inputs):
        return correct(inputs)

    def launch(self, inputs, cell):
        return "tuned" if os.environ.get("GLA_AUTOTUNE") == "1" else None


class Raising(Fake):
    name = "fake-raising"

    def act(self, inputs):
        raise RuntimeError("a made-up fault\nwith a second line")


class Dying(Fake):
    name = "fake-dying"

    def act(self, inputs):
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaving(Fake):
    name = "fake-leaving"

    def act(self, inputs):
        os._exit(7)


class Hanging(Fake):
    name = "fake-hanging"

    def act(self, inputs):
        # With a child that must not outlive it.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # glabench-fake-child"])
        time.sleep(600)


class Forking(Fake):
    name = "fake-forking"

    def act(self, inputs):
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)


class OutOfMemory(Fake):
    name = "fake-oom"

    def act(self, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Sticky(Fake):
    """What an illegal access leaves behind: every later call in the process fails like the first."""

    name = "fake-sticky"
    broken = False

    def bind(self, inputs, cell):
        def call():
            Sticky.broken = Sticky.broken or cell.seqlen == self.bad_seqlen
            if Sticky.broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")
            return correct(inputs)

        return call


class Hungry(Fake):
    name = "fake-hungry"

    def act(self, inputs):
        # A host with 64 MiB to spare, without taking the rest from the machine that runs the test.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return bytearray(2**33)


class Killed(Fake):
    """What the kernel does to the process with the highest score when the host's memory is gone."""

    name = "fake-killed"

    def act(self, inputs):
        if Path("/proc/self/oom_score_adj").read_text().strip() == "1000":
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("another process would have been killed")


class Babbling(Fake):
    name = "fake-babbling"

    def act(self, inputs):
        for _ in range(64):
            os.write(2, b"noise " * 2**18)
        os.write(2, b"\nthe last words\n")
        os._exit(9)


class NotANumber(Fake):
    name = "fake-nan"

    def act(self, inputs):
        return correct(inputs) * float("nan")


class Wrong(Fake):
    name = "fake-wrong"

    def act(self, inputs):
        return correct(inputs) * 1.1


class Chatty(Fake):
    name = "fake-chatty"

    def act(self, inputs):
        print("this is not a record")
        os.write(1, b"{neither is this}\n")
        return correct(inputs)


class Picky(Fake):
    name = "fake-picky"

    def limits(self, cell):
        return "32 tokens are too many" if cell.seqlen == self.bad_seqlen else None

    def act(self, inputs):
        raise AssertionError("an unsupported cell was run")


class Slow(Fake):
    name = "fake-slow"

    def act(self, inputs):
        time.sleep(0.05)
        return correct(inputs)


BACKENDS = [fake() for fake in Fake.__subclasses__()]
