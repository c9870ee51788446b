"""The worker of a cell that GPUs share: torchrun, which starts a rank for each of them.

    python -m glabench.measure.launch JOB_JSON

Reads the cell from stdin and gives it to the ranks, which are processes of `worker.py` and write the record.
"""

import os
import sys
from collections.abc import Sequence

from glabench.measure.job import Job
from glabench.measure.worker import end_with_parent
from glabench.plain import read_json


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them. Returns the exit code; if a rank has died, the last line says how."""
    end_with_parent()
    (job_text,) = arguments
    if not (cell_text := sys.stdin.readline().strip()):
        return 0
    os.environ["PYTHONSAFEPATH"] = "1"  # ranks find no module in the working folder, as this process does not
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = Job.from_json(read_json(job_text)).gpus
    try:
        torchrun(["--standalone", f"--nproc-per-node={gpus}", "-m", "glabench.measure.worker", job_text, cell_text])
    except ChildFailedError as problem:
        rank, failed = problem.get_first_failure()
        end = f"ended with exit code {failed.exitcode}"
        if failed.exitcode < 0:
            end = f"was killed by signal {failed.signal_name()}"
        print(f"rank {rank} {end}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
