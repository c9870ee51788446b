"""Runs the work of known size as benchmarks of NVIDIA's cuda-bench (nvbench), whose options this program takes.

python -m glabench.measure.cuda_bench --json FILE --devices GPU
"""

import sys
from typing import Any

import cuda.bench
import torch

from glabench.measure.known import KnownWork, known_works


def _benchmark(work: KnownWork) -> Any:
    def run(state: Any) -> None:
        def launch(given: Any) -> None:
            stream: Any = torch.cuda.ExternalStream(given.get_stream().__cuda_stream__()[1])  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                work.call()

        state.exec(launch, batched=False)

    run.__name__ = work.name
    return run


def main() -> None:
    """Registers and runs all benchmarks."""
    torch.cuda.set_device(int(sys.argv[sys.argv.index("--devices") + 1]))
    for work in known_works():
        work.call()
        cuda.bench.register(_benchmark(work)).set_name(work.name)
    torch.cuda.synchronize()
    cuda.bench.run_all_benchmarks(sys.argv)


if __name__ == "__main__":
    main()
