"""Backends that misbehave, each in one way, as a plugin: `--plugin tests/fake_backends.py`.

With `--when limits` they misbehave in `limits`, before the worker has loaded torch. This takes a tenth of a second, and
all other cells are unsupported.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from glabench.backends import Backend
from glabench.sweeps.parameters import choices


def correct(inputs):
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    return ((q * q.shape[-1] ** -0.5 @ k.mT).tril() @ v).transpose(1, 2)


class Fake(Backend):
    op = "linear"
    title = "a fake"
    parameters = (choices("when", "When a fake misbehaves.", ("call", "limits"), "call"),)
    # What the backend does at its second sequence length; at the others it is correct.
    bad_seqlen = 32

    def act(self, inputs):
        raise NotImplementedError

    def limits(self, cell):
        if cell.get("when") != "limits":
            return None
        if cell.seqlen == self.bad_seqlen:
            self.act(None)
        return "nothing to measure"

    def bind(self, inputs, cell):
        return lambda: self.act(inputs) if cell.seqlen == self.bad_seqlen else correct(inputs)


class Good(Fake):
    name = "fake-good"

    def act(self, inputs):
        return None if inputs is None else correct(inputs)

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
        sys.exit(7)


class Hanging(Fake):
    name = "fake-hanging"

    def act(self, inputs):
        # Starts a child, which must not outlive it; FAKE_CHILD distinguishes it from children of other tests.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ["FAKE_CHILD"]])
        time.sleep(600)


class Forking(Fake):
    name = "fake-forking"

    def act(self, inputs):
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)


class Closing(Fake):
    """Stays alive, but cannot answer."""

    name = "fake-closing"

    def act(self, inputs):
        os.closerange(3, 256)
        time.sleep(600)


class OutOfMemory(Fake):
    name = "fake-oom"

    def act(self, inputs):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Sticky(Fake):
    """Fails as after an illegal memory access: every later call in the process fails, too."""

    name = "fake-sticky"
    broken = False

    def bind(self, inputs, cell):
        import torch

        def call():
            Sticky.broken = Sticky.broken or cell.seqlen == self.bad_seqlen
            if Sticky.broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")
            return correct(inputs)

        return call


class Hungry(Fake):
    name = "fake-hungry"

    def act(self, inputs):
        # As on a host with 64 MiB left, but without taking memory from the machine that runs the test.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return bytearray(2**33)


class Killed(Fake):
    """Is killed, as Linux kills the process with the highest score when the host's memory runs out."""

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
        return None if inputs is None else correct(inputs)


class Picky(Fake):
    name = "fake-picky"

    def limits(self, cell):
        return "32 tokens are too many" if cell.seqlen == self.bad_seqlen else None

    def act(self, inputs):
        raise AssertionError("an unsupported cell was run")


class Slow(Fake):
    """Is slow at every length."""

    name = "fake-slow"

    def limits(self, cell):
        time.sleep(0.1)
        return super().limits(cell)

    def act(self, inputs):
        return None if inputs is None else correct(inputs)


BACKENDS = [fake() for fake in Fake.__subclasses__()]
