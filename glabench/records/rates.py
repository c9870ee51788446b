"""From a time and the counts of an op to rates, and to a share of what the device can do."""

from dataclasses import dataclass, replace

from glabench.records.record import Record
from glabench.sweeps.fields import Amount


@dataclass(frozen=True)
class Ceilings:
    """What the device can do: GB/s (10^9) of a large copy, read and written; TFLOP/s of a large bf16 product."""

    copy_gbps: Amount | None = None
    product_tflops: Amount | None = None


def with_rates(record: Record, moved_bytes: int, flops: int, ceilings: Ceilings) -> Record:
    """The record with `gbps`, `tflops`, the ceilings, and `roofline_pct`.

    That is the time that the device needs for the op's bytes or for its FLOPs, whichever is longer, over the time that
    it took. Ops in wider types than bf16 are held against the bf16 product all the same.
    """
    record = replace(record, copy_gbps=ceilings.copy_gbps, product_tflops=ceilings.product_tflops)
    if not record.time_ms:
        return record
    gbps, tflops = moved_bytes / record.time_ms / 1e6, flops / record.time_ms / 1e9
    shares = [
        rate / ceiling
        for rate, ceiling in ((gbps, ceilings.copy_gbps), (tflops, ceilings.product_tflops))
        if ceiling is not None
    ]
    share = 100 * max(shares) if len(shares) == 2 else None
    return replace(record, gbps=gbps, tflops=tflops, roofline_pct=share)
