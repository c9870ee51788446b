"""Kinds of kernels, in profiles of models with dozens of them."""

from dataclasses import replace

import pytest
from reports import made_up
from traces import KERNELS, trace_of

from glabench.profiling.profile import profile_of
from glabench.report.kinds import REST, has_kinds, kind_of, kinds_table, times_by_kind
from glabench.report.profiles import draw_profiles, profiles_markdown


def profile_with(*names):
    """A profile of kernels of these names, each with half a millisecond, in this order."""
    found = profile_of(trace_of(KERNELS))
    kernels = tuple(replace(found.kernels[0], name=name, calls=2, ms=0.5, added_ms=0.5) for name in names)
    return replace(found, kernels=kernels, span_ms=0.5 * len(names) + 1, busy_ms=0.5 * len(names))


MANY = profile_with(*(f"wide_{i}" for i in range(12)), *(f"nvjet_sm90_{i}" for i in range(14)), "nvjet_sm90_0")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("cublasLt::splitKreduce_kernel", "matrix products"),
        ("triton_red_fused_layer_norm_3", "compiled by torch"),
        ("at::native::multi_tensor_apply_kernel", "optimizer, clipping"),
        ("at::native::GammaBetaBackwardCUDAKernelTemplate", "norms, sums, losses"),
        ("at::native::reduce_kernel", "norms, sums, losses"),
        ("at::native::vectorized_elementwise_kernel", "element by element"),
        ("at::native::vectorized_gather_kernel", "tables, sorting, copies"),
        ("at_cuda_detail::cub::detail::scan::DeviceScanKernel", "tables, sorting, copies"),
        ("at::native::indexSelectLargeIndex", "tables, sorting, copies"),
        ("Memcpy DtoD", "tables, sorting, copies"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("cross_entropy_kernel", "norms, sums, losses"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "between GPUs"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", REST),
        ("triton_tem_fused_flex_attention_0", REST),
        ("chunk_local_cumsum_vector_kernel", REST),
        ("selective_scan_fwd_kernel", REST),
        ("wide_gradients", REST),
        ("_chunk_scan_fwd_kernel", REST),
        ("flash::flash_fwd_kernel", REST),
    ],
)
def test_a_kernels_name_gives_its_kind(name, kind):
    assert kind_of(name) == kind


def test_kinds_are_shown_only_of_calls_with_many_kernels():
    assert has_kinds(MANY)
    assert not has_kinds(profile_with(*["nvjet_0"] * 30))
    assert not has_kinds(profile_with(*(f"wide_{i}" for i in range(30))))  # of no kind
    assert not has_kinds(replace(MANY, on_device=False))  # these are operators


def test_the_table_has_the_longest_kind_first_and_adds_up_to_the_span():
    assert times_by_kind(MANY) == {REST: 6.0, "matrix products": 7.5}
    _, rows = kinds_table(MANY)
    assert rows == [
        ["matrix products", "14", "30", "7.5", "51.7%"],
        [REST, "12", "24", "6", "41.4%"],
        ["idle", "", "", "1", "6.9%"],
    ]


def test_a_report_shows_and_draws_them():
    run = made_up("gla-340m", {"backend": "gla-triton", "seqlen": "2k"})
    run = replace(run, profiles={run.records[0].cell: MANY})
    assert "by kinds of kernels**" in profiles_markdown(run)
    (legend,) = draw_profiles(run).legends
    assert [text.get_text() for text in legend.get_texts()] == ["matrix products", REST, "idle"]
