"""Rates of a cell, from its time and its op's counts, and their share of the device's ceilings."""

from dataclasses import replace

from glabench.measure.work import Work
from glabench.records import Record
from glabench.records.environment import Ceilings


def with_rates(record: Record, work: Work, ceilings: Ceilings) -> Record:
    """The record with its rates, the ceilings, the sizes of a state and of a layer, and `roofline_pct`.

    `roofline_pct` is the larger of two shares: of the op's GB/s in the copy ceiling, and of its TFLOP/s in the product
    ceiling. The product ceiling is that of bf16 for cells of every type.
    """
    record = replace(record, copy_gbps=ceilings.copy_gbps, product_tflops=ceilings.product_tflops)
    if not record.time_ms:
        return record
    counts, executed, state = work.counts(record.cell), work.executes(record.cell), work.state_bytes(record.cell)
    gbps, tflops = counts.bytes / record.time_ms / 1e6, counts.flops / record.time_ms / 1e9
    known = ceilings.copy_gbps is not None and ceilings.product_tflops is not None
    return replace(
        record,
        state_kib=None if state is None else state / 1024,
        layer_parameters=work.layer_parameters(record.cell),
        gbps=gbps,
        tflops=tflops,
        executed_gbps=executed.bytes / record.time_ms / 1e6 if executed else None,
        executed_tflops=executed.flops / record.time_ms / 1e9 if executed else None,
        scalar_pct=100 * executed.scalar_flops / executed.flops
        if executed and executed.flops and record.cell.device == "cuda"
        else None,
        roofline_pct=100 * max(gbps / ceilings.copy_gbps, tflops / ceilings.product_tflops)  # type: ignore[operator]
        if known
        else None,
    )
