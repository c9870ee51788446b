"""Candidates of Triton's autotuner, compiled by several processes: a share by each, and none of them timed."""

import os
import sys

# A core each for the process that waits for the shares and for the driver.
COUNT = max(1, (os.cpu_count() or 2) - 2)


def compile_every(rank: int, count: int) -> None:
    """From now on, this process compiles every `count`-th candidate of a kernel and launches one of these.

    Run with FLA_CACHE_RESULTS=0, so that what is chosen here is not remembered.
    """
    import torch
    from triton.runtime.autotuner import Autotuner

    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin

    def bench(self, *args, config, **meta):
        if self.configs.index(config) % count != rank:
            return [1.0] * 3
        try:
            compiled = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        except Exception as problem:  # the process that times candidates will meet it, too
            print(f"{self.base_fn.__name__}: {type(problem).__name__}", file=sys.stderr)
            return [1.0] * 3
        # One of the fastest is launched, so it has to fit.
        return [0.0 if compiled.metadata.shared <= room else 1.0] * 3

    Autotuner._bench = bench
