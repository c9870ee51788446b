"""Measures the device's ceilings with the suite's own timer, in a separate process, so that its GPU memory is freed.

python -m glabench.measure.ceilings DEVICE
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

from glabench.apart import ask_module
from glabench.devices.ceilings import (
    copy_bandwidth_gbps,
    fp32_product_tflops,
    l2_copy_gbps,
    product_tflops,
    read_bandwidth_gbps,
)
from glabench.errors import GlabenchError
from glabench.measure.timer import median_ms, timer_for
from glabench.plain import read_as
from glabench.records.environment import Ceilings

_WARM_UP_CALLS, _SAMPLES = 3, 15
_TIMEOUT_S = 120


def find_ceilings(device: str, say: Callable[[str], None]) -> Ceilings:
    """The ceilings of a device such as `cuda:1`; unknown ones on a CPU, or, with a word, if measuring them fails."""
    if device == "cpu":
        return Ceilings()
    try:
        return read_as(Ceilings, ask_module(__name__, device, timeout_s=_TIMEOUT_S))
    except (GlabenchError, ValueError) as problem:
        say(f"the device's ceilings cannot be measured ({problem}); shares of them will be missing")
        return Ceilings()


def main() -> None:
    """Measures the ceilings and prints them as JSON."""
    import torch

    torch.cuda.set_device(sys.argv[1])
    timer = timer_for("cuda")
    of_calls = partial(median_ms, timer, warm_up_calls=_WARM_UP_CALLS, samples=_SAMPLES)
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    found = Ceilings(copy_gbps=copy_bandwidth_gbps(of_calls), product_tflops=product_tflops(of_calls))
    # A machine that cannot have the others, for lack of memory or a C compiler, does without.
    with suppress(Exception):
        found = replace(found, read_gbps=read_bandwidth_gbps(of_calls, torch.cuda.mem_get_info()[0]))
    with suppress(Exception):
        found = replace(found, fp32_product_tflops=fp32_product_tflops(of_calls))
    with suppress(Exception):
        found = replace(found, l2_copy_gbps=l2_copy_gbps(of_calls, l2_bytes))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
