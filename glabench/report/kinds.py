"""Kinds of kernels, by their names: a step of a model has dozens of kernels, more than a reader can take in."""

import re
from collections.abc import Sequence

from glabench.records.metrics import significant
from glabench.records.profile import Profile

# With more names than this, kinds are shown beside the kernels and in place of them in figures.
_MANY = 24
# The first that fits counts. An empty kind stands for `REST`: kernels of attention are also named as products are.
_KINDS = (
    ("", "fmha|flash|attention|attn|sdpa|chunk_|scan_(fwd|bwd)"),
    ("between GPUs", "nccl"),
    ("matrix products", r"nvjet|gemm|gemv|cublas|cutlass_\d|^cijk_|^triton_tem_.*mm"),
    ("compiled by torch", "^triton_"),
    ("optimizer, clipping", "multi_tensor_apply|lpnorm"),
    (
        "norms, sums, losses",
        "layer_norm|rms_?norm|gammabeta|moments|softmax|nll_loss|cross_entropy|logsumexp|l2norm|reduce_kernel"
        "|tensor_kernel_scan",
    ),
    ("element by element", "elementwise|swiglu|dropout"),
    (
        "tables, sorting, copies",
        "gather|scatter|index|embedding|segment|sort|::scan::|unique|compute_grad|copy|memcpy|memset",
    ),
)
REST = "mixers, and what has no kind"


def has_kinds(found: Profile) -> bool:
    """Whether a profile's kernels are shown by kinds as well: many, of which most have a kind, by their times."""
    if not found.on_device or len({kernel.name for kernel in found.kernels}) <= _MANY:
        return False
    times = times_by_kind(found)
    return times.get(REST, 0.0) <= sum(times.values()) / 2


def kind_of(name: str) -> str:
    """The kind of a kernel of torch's, of cuBLAS or of a compiled model; `REST` for others."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "") or REST


def times_by_kind(found: Profile) -> dict[str, float]:
    """`added_ms` by kind, in the order in which they first start."""
    times: dict[str, float] = {}
    for kernel in found.kernels:
        kind = kind_of(kernel.name)
        times[kind] = times.get(kind, 0.0) + kernel.added_ms
    return times


def kinds_table(found: Profile) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows: the longest kind first, then what is idle. Shares are of the span."""
    rows: list[Sequence[str]] = []
    for kind, ms in sorted(times_by_kind(found).items(), key=lambda item: -item[1]):
        own = [kernel for kernel in found.kernels if kind_of(kernel.name) == kind]
        names, calls = {kernel.name for kernel in own}, sum(kernel.calls for kernel in own)
        rows.append([kind, str(len(names)), str(calls), significant(ms), f"{ms / found.span_ms:.1%}"])
    idle = max(0.0, found.span_ms - found.busy_ms)
    rows.append(["idle", "", "", significant(idle), f"{idle / found.span_ms:.1%}"])
    return ("kind", "kernels", "calls", "adds, ms", "share"), rows
