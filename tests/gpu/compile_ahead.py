"""Compiles what tests will have Triton's autotuner time, on all cores, so that they find it compiled.

    python tests/gpu/compile_ahead.py tests/gpu/test_models.py -k own
    pytest tests/gpu/test_models.py -k own

fla-core has hundreds of candidates for some tests, which one process would compile one after another. Here every
process runs the tests and compiles a share; whether they pass says nothing.
"""

import os
import subprocess
import sys

from shares import COUNT, compile_every


def main(arguments: list[str]) -> None:
    environment = os.environ | {"FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--share"]
    shares = [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in range(COUNT)]
    for share in shares:
        share.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--share"]:
        import pytest

        compile_every(int(sys.argv[2]), COUNT)
        pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]])
    else:
        main(sys.argv[1:])
