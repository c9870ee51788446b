"""What was measured on other devices is not compared unasked, and what else differs is listed."""

import pytest
from simulated import LIMITS, STEADY, measured

from glabench.errors import UsageError
from glabench.verdicts import Side, compare_sides
from glabench.verdicts.surroundings import check_same_device, differences


def test_other_devices_are_refused_unless_asked_for():
    h100, h200 = ({"device": "cuda", "cpu": "x", "gpu": {"name": name}} for name in ("NVIDIA H100", "NVIDIA H200"))
    sides = Side("A", measured(STEADY, 0), h100), Side("B", measured(STEADY, 1), h200)
    with pytest.raises(UsageError, match=r"NVIDIA H100.*NVIDIA H200.*--any-device"):
        compare_sides(*sides, LIMITS)
    assert compare_sides(*sides, LIMITS, any_device=True).differences == (("gpu name", "NVIDIA H100", "NVIDIA H200"),)
    check_same_device(h100, h100 | {"cpu": "y"})


def test_what_differs_between_environments_is_listed_and_what_passes_is_not():
    a = {"gpu": {"name": "H200", "driver": "1"}, "busy": {"utilization_pct": 0}, "packages": {"torch": "2.11"}}
    a["gpu"]["ecc"] = True  # which b did not keep
    b = {"gpu": {"name": "H200", "driver": "2"}, "busy": {"utilization_pct": 9}, "packages": {"torch": "2.13"}}
    assert differences(a, b) == [("gpu driver", "1", "2"), ("packages torch", "2.11", "2.13")]
