"""The report of `glabench validate`."""

import pytest

from glabench.report.validation import markdown

WORK = {"work": "spin 1 ms", "what": "a program that waits", "true_ms": 1.0, "cold_ms": 1.005, "hot_ms": 0.99}


@pytest.mark.parametrize(
    ("timers", "columns"), [({"cuda_bench_ms": None}, []), ({"cuda_bench_ms": 1.02}, ["cuda-bench"])]
)
def test_only_timers_that_were_there_have_a_column(timers, columns):
    head, _, row = markdown([WORK | timers], [], "a machine").split("| work", 1)[1].splitlines()[:3]
    assert [name.strip() for name in head.split("|")[2:-1]] == ["cold", "hot", *columns]
    assert [cell.strip() for cell in row.split("|")[3:-1]][:2] == ["1.005 (+0.5%)", "0.99 (-1.0%)"]
