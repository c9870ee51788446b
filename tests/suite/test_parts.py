"""The parts of forwards by chunk size: as profiles have them, in reports and in `glabench chunk-sweep`."""

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from in_process import SIZES, glabench, profile_here
from reports import made_up
from test_papers import two_level_inputs
from test_rivals import install

from glabench import load
from glabench.backends import load_registry
from glabench.backends.papers import two_level, two_pass
from glabench.errors import GlabenchError
from glabench.ops.gla import GLA
from glabench.profiling.request import Answer
from glabench.records.metrics import TIME
from glabench.records.profile import Host, Kernel, Part, Profile, profile_line, read_profile
from glabench.report.choice import recommend
from glabench.report.parts import bars_of, draw_parts, parts_markdown
from glabench.report.write import write_report
from glabench.sweeps import Cell, Parameters

PAPER = {16: (1.8, 5.0), 32: (1.8, 2.9), 64: (2.1, 2.1), 128: (2.5, 1.4), 256: (3.4, 1.3)}


@pytest.mark.parametrize("gate", ["mild", "resets"])
def test_what_passes_within_chunks_and_across_them_is_the_whole_output(gate):
    (q, k, v, g), _ = two_level_inputs(gate, 64)
    b = two_level.chunk_sums(g, 32)
    parts = [part(q, k, v, b, 32, 16) for part in (two_level.within_chunks, two_level.across_chunks)]
    torch.testing.assert_close(sum(parts), two_level.two_level_gla(q, k, v, g, 32, 16), rtol=1e-5, atol=1e-5)


def test_without_gates_what_passes_within_chunks_and_across_them_is_the_whole_output():
    (q, k, v), _ = two_level_inputs(None, 64)
    parts = [part(q, k, v, 32) for part in (two_pass.within_chunks, two_pass.across_chunks)]
    torch.testing.assert_close(sum(parts), two_pass.two_pass_linear(q, k, v, 32), rtol=1e-5, atol=1e-5)


def profile_of(within, across, whole):
    host = Host(1.0, 3, 0.1, 0.2)
    parts = (Part("across chunks", across, 10**9, 10**10), Part("within chunks", within, 2 * 10**9, None))
    return Profile(10, whole, whole, (Kernel("_outputs", 1, whole, whole),), host, True, parts)


@pytest.fixture
def run():
    """A run of the preset with profiles of gla-two-level at every chunk."""
    made = made_up("paper-v3-chunk", {"backend": "gla-two-level,gla-triton"})
    own = {record.cell.get("chunk"): record.cell for record in made.records if record.cell.backend == "gla-two-level"}
    profiles = {own[C]: profile_of(1.0 + C / 256, 32.0 / C, 0.9 + C / 256 + 32.0 / C) for C in own}
    return replace(made, profiles=profiles)


def test_a_profile_with_parts_is_the_same_when_it_is_read_back():
    cell = made_up("paper-v3-chunk").records[0].cell
    found = profile_of(1.0, 2.0, 2.5)
    assert read_profile(profile_line(cell, found)) == (cell, found)


def test_bars_of_a_backend_stand_beside_the_published_ones_of_the_same_sizes(run):
    ours, published = bars_of(run)
    assert ours.title == "gla-two-level"
    assert ours.parts[64] == {"within chunks": 1.25, "across chunks": 0.5}
    assert ours.best_ms == 1.5 + 0.25
    assert published.title.startswith("published: GLA paper, version 3, Fig. 2 right")
    assert {x: (own["within chunks"], own["across chunks"]) for x, own in published.parts.items()} == PAPER
    assert published.best_ms == pytest.approx(3.9)


def test_published_bars_of_other_sizes_name_them(run):
    of_other_op = {replace(cell, op="linear"): found for cell, found in run.profiles.items()}
    assert [each.title for each in bars_of(replace(run, profiles=of_other_op))] == ["gla-two-level"]
    smaller = {replace(cell, batch=8): found for cell, found in run.profiles.items()}
    _, published = bars_of(replace(run, profiles=smaller))
    assert "(B=32 H=4 K=128 V=256; GPU and tokens not stated)" in published.title
    assert "(GPU and tokens not stated)" in bars_of(run)[1].title
    assert "other numbers of tokens are assumptions" in parts_markdown(run)


def test_a_table_has_the_rates_of_each_part(run):
    page = parts_markdown(run)
    head = "| chunk | within chunks, ms | across chunks, ms | sum, ms | whole, ms |"
    assert head in page
    assert "| 64 | 1.25 | 0.5 | 1.75 | 1.65 |" in page
    assert "| chunk | part | MB | GFLOP | GB/s | TFLOP/s |" in page
    assert "| 64 | within chunks | 2000 | - | 1600 | - |" in page
    assert "| 64 | across chunks | 1000 | 10 | 2000 | 20 |" in page
    assert "| 128 | 2.5 | 1.4 | 3.9 |" in page


def test_chunks_whose_parts_are_not_known_are_named(run):
    without = {cell: found for cell, found in run.profiles.items() if cell.get("chunk") not in (128, 256)}
    said = "No parts of gla-two-level were measured at chunks of 128, 256."
    assert said in parts_markdown(replace(run, profiles=without))
    assert "No parts" not in parts_markdown(run)


def test_bars_are_as_high_as_their_sums_over_the_best(run):
    ours, published = draw_parts(run).axes
    tops = {round(p.get_x() + p.get_width() / 2): p.get_y() + p.get_height() for p in ours.patches}
    assert tops == pytest.approx({i: (1 + C / 256 + 32 / C) / 1.75 for i, C in enumerate(PAPER)})
    assert max(p.get_y() + p.get_height() for p in published.patches) == pytest.approx(6.8 / 3.9)


def test_long_names_of_parts_are_short_in_the_figure(run):
    profiles = {}
    for cell, found in run.profiles.items():
        profiles[cell] = replace(found, parts=tuple(replace(part, name=part.name * 20) for part in found.parts))
    named = [text.get_text() for text in draw_parts(replace(run, profiles=profiles)).legends[0].get_texts()]
    assert [len(name) for name in named if "…" in name] == [52, 52]


def test_a_report_has_the_figure_only_if_there_are_parts(run, tmp_path):
    with_parts = {path.name for path in write_report([run], tmp_path / "a", [TIME], None)}
    assert {"parts.png", "profile.png"} <= with_parts
    without = {cell: replace(found, parts=()) for cell, found in run.profiles.items()}
    assert "parts.png" not in {
        p.name for p in write_report([replace(run, profiles=without)], tmp_path / "b", [TIME], None)
    }


def timed(record, ms, scatter=0.0, **changes):
    return replace(record, time_ms=ms, time_ms_p20=ms - scatter, time_ms_p80=ms + scatter, **changes)


@pytest.mark.parametrize(
    ("factor", "times", "time"),
    [(1.0, "2.5 times as fast as", "1.25 times the time"), (0.0008, "as fast as", "the same time")],
)
def test_a_run_over_chunks_ends_with_the_one_to_take(factor, times, time):
    made = made_up("chunk-sweep", {"backend": "gla-triton", "chunk": "32,64", "pass": "fwd+bwd"})
    found = {
        (32, "states"): (4.0, 200),
        (64, "states"): (2.0, 180),
        (32, "checkpoints"): (5.0, 90),
        (64, "checkpoints"): (2.5, 90),
    }
    records = [
        timed(record, 2.0 + factor * (found[key][0] - 2.0), peak_allocated_mib=found[key][1])
        for record in made.records
        if (key := (record.cell.get("chunk"), record.cell.get("materialize")))
    ]
    assert recommend(replace(made, records=records)) == [
        f"forward + backward, gla-triton: the fastest is C=64 states kept, 2 ms, 180 MiB above the inputs, {times} "
        f"C=32 checkpoints kept. The least memory takes C=64 checkpoints kept: 90 MiB above the inputs, in {time}."
    ]


def test_what_is_kept_is_compared_at_the_same_chunk_and_other_kernels_are_named():
    made = made_up("chunk-sweep", {"backend": "gla-triton", "chunk": "32,64", "pass": "fwd"})
    times = {(32, "states"): 4.0, (64, "states"): 2.2, (32, "checkpoints"): 3.0, (64, "checkpoints"): 2.0}
    keys = [(record.cell.get("chunk"), record.cell.get("materialize")) for record in made.records]
    records = [
        timed(
            record, times[key], peak_allocated_mib=50 if key == (32, "states") else 100, launch=f"f{key[0]} C={key[0]}"
        )
        for record, key in zip(made.records, keys, strict=True)
    ]
    (said,) = recommend(replace(made, records=records))
    assert "2 times as fast as C=32 states kept, which runs other kernels." in said
    assert "With states kept it takes 1.1 times the time, 100 MiB above the inputs." in said


def test_choices_within_the_scatter_of_samples_are_named():
    made = made_up("chunk-sweep", {"backend": "gla-two-level", "chunk": "16,32,64", "pass": "fwd"})
    times = {16: 2.1, 32: 2.2, 64: 2.5}
    records = [timed(record, times[record.cell.get("chunk")], scatter=0.1) for record in made.records]
    (said,) = recommend(replace(made, records=records))
    assert "the fastest is C=16 states kept, 2.1 ms" in said
    assert "Within the scatter of samples C=32 states kept cannot be told from it." in said


def test_of_several_backends_a_run_over_chunks_names_the_one_to_take():
    made = made_up("chunk-sweep", {"backend": "gla-triton,gla-two-level", "chunk": "32,64", "pass": "fwd"})
    times = {("gla-triton", 32): 4.0, ("gla-triton", 64): 2.0, ("gla-two-level", 32): 5.0, ("gla-two-level", 64): 6.0}
    records = [
        timed(record, times[record.cell.backend, record.cell.get("chunk")], peak_allocated_mib=100)
        for record in made.records
    ]
    run = replace(made, records=records, environment={**made.environment, "device": "cpu", "cpu": "A CPU"})
    *_, take = recommend(run)
    assert take.startswith("To take on A CPU for forward of gla at B=32 T=4k H=16 D=64 bf16: gla-triton with C=64")
    assert (
        ", 2 ms, 100 MiB above the inputs. The next backend, gla-two-level with C=32 states kept, takes 2.5 times"
        in take
    )


def test_the_chunk_to_take_is_named_with_what_tells_groups_of_a_backend_apart():
    made = made_up(
        "chunk-sweep", {"backend": "gla-triton", "chunk": "32,64", "pass": "fwd", "gate": "strong,logsigmoid"}
    )
    records = [timed(record, float(record.cell.get("chunk"))) for record in made.records]
    said = recommend(replace(made, records=records))
    assert [line.split(": the fastest")[0] for line in said] == [
        "forward, gla-triton (gate=strong)",
        "forward, gla-triton (gate=logsigmoid)",
    ]
    made = made_up("chunk-sweep", {"backend": "gla-triton", "chunk": "32,64", "pass": "fwd", "state": "none,out"})
    records = [timed(record, float(record.cell.get("chunk"))) for record in made.records]
    said = recommend(replace(made, records=records))
    assert [line.split(": the fastest")[0] for line in said] == [
        "forward, gla-triton (no state)",
        "forward, gla-triton (state=out)",
    ]


PARTED = """
import torch
from glabench.backends import Backend, Counts, Part
from glabench.sweeps.parameters import integers

class Parted(Backend):
    name, op, title = "parted", "linear", "has parts"
    parameters = (integers("chunk", "Chunk length C, or auto.", auto=True),)
    has_parts = True

    def says(self, cell):
        return {"ms": 4.0, "error": 0.001, "first_call_s": 0.1}

    def bind(self, inputs, cell):
        return lambda: torch.zeros_like(inputs["v"]) + sum(inputs[name].sum() for name in ("q", "k", "v"))

    def parts(self, inputs, cell):
        x = torch.ones(cell.get("chunk"), 16)
        return {"within chunks": Part(lambda: x @ x.T, Counts(10**6, 10**5)), "across chunks": Part(lambda: x.T @ x)}

BACKENDS = [Parted]
"""


def test_a_chunk_sweep_profiles_the_parts_of_forwards(tmp_path):
    (tmp_path / "parted.py").write_text(PARTED)
    sizes = ("--seqlen", "32", "--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32")
    arguments = ("--plugin", "parted.py", "--backend", "parted", "--device", "cpu", "--chunk", "16,32", *sizes)
    with mock.patch("glabench.cli.profile.profile_cell", profile_here):
        code, out, err = glabench(tmp_path, "chunk-sweep", *arguments, "--out", "run")
    assert code == 0, err
    run = load(tmp_path / "run")
    assert [(cell.pass_, cell.get("chunk")) for cell in run.profiles] == [("fwd", 16), ("fwd", 32)]
    assert {part.name for found in run.profiles.values() for part in found.parts} == {"within chunks", "across chunks"}
    assert (tmp_path / "run" / "parts.png").exists()
    assert "forward, parted: the fastest is C=" in out


SWEEP = ("--backend", "parted", "--seqlen", "32", "--chunk", "16", "--device", "cpu", *SIZES)


@pytest.fixture
def folder(tmp_path):
    """A folder with the plugin, and one that may be a site."""
    (tmp_path / "parted.py").write_text(PARTED)
    (tmp_path / "site").mkdir()
    return tmp_path


@pytest.fixture
def profiler():
    """Stands in for the process that profiles a cell."""
    with mock.patch("glabench.cli.chunk_sweep.profile_of_cell", return_value=Answer(profile_of(1.0, 2.0, 2.5))) as made:
        yield made


def test_a_resumed_chunk_sweep_profiles_as_the_run_was_begun(folder, profiler):
    begun = ("--plugin", "parted.py", "--cell-timeout", "77", "--no-split", "--out", "run")
    assert glabench(folder, "chunk-sweep", *SWEEP, *begun)[0] == 0
    profiler.assert_not_called()
    assert not load(folder / "run").profiles
    code, _, err = glabench(folder, "chunk-sweep", "run", "--resume", "--site", "parted=site")
    assert code == 0, err
    profiler.assert_called_once()
    cell, place, timeout_s = profiler.call_args.args
    assert (cell.backend, timeout_s) == ("parted", 77)
    assert (place.plugins, place.device) == (("parted.py",), "cpu")
    assert place.sites == {"parted": str(folder / "site")}


def test_an_interrupted_chunk_sweep_goes_on_with_the_next_profile(folder, profiler):
    profiler.side_effect = [Answer(profile_of(1.0, 2.0, 2.5)), KeyboardInterrupt]
    given = (*SWEEP, "--chunk", "16,32", "--plugin", "parted.py", "--site", "parted=site", "--out", "run")
    code, _, err = glabench(folder, "chunk-sweep", *given)
    assert code == 130
    go_on = (
        "what was measured and profiled is kept, continue with: glabench chunk-sweep --resume run --site=parted=site"
    )
    assert go_on in err
    profiler.side_effect = None
    assert glabench(folder, *go_on.partition("glabench ")[2].split())[0] == 0
    assert profiler.call_count == 3
    assert len(load(folder / "run").profiles) == 2


@pytest.mark.parametrize(("failing", "broken"), [({16}, set()), ({16, 32}, set()), (set(), {32})])
def test_a_chunk_sweep_ends_with_code_4_if_a_profile_or_its_parts_fail(folder, profiler, failing, broken):
    def profile(cell, *_):
        if cell.get("chunk") in failing:
            raise GlabenchError("lost")
        return Answer(profile_of(1.0, 2.0, 2.5), "parts" if cell.get("chunk") in broken else None)

    profiler.side_effect = profile
    arguments = (*SWEEP, "--chunk", "16,32", "--plugin", "parted.py", "--out", "run")
    code, out, err = glabench(folder, "chunk-sweep", *arguments)
    assert code == 4
    assert (err.count("error: lost"), err.count("error: parts")) == (len(failing), len(broken))
    assert "the fastest is" in out
    assert {cell.get("chunk") for cell in load(folder / "run").profiles} == {16, 32} - failing


LOG2 = 0.6931471805599453
SMALL = {"heads": 2, "key_dim": 8, "value_dim": 4, "gate": "logsigmoid/16"}


def chunk_local_cumsum(g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float):
    """As of fla-core 0.6: sums from each chunk's beginning on, here with one chunk per sequence or whole chunks."""
    assert not reverse
    B, T, H, K = g.shape
    return (g.view(B, T // chunk_size, chunk_size, H, K).cumsum(2) * scale).view_as(g)


def chunk_fwd_h(k, v, g=None, g_gamma=None, gk=None, gv=None, h0=None, output_final_state=False, state_v_first=False,
                cu_seqlens=None, chunk_size=64, split_size=None, states_in_fp32=False):  # fmt: skip
    """The state before each chunk, [B, NT, H, K, V]."""
    B, T, H, K = k.shape
    h, kept = k.new_zeros(B, H, K, v.shape[-1]), []
    for start in range(0, T, chunk_size):
        kept.append(h)
        part = slice(start, start + chunk_size)
        b = gk[:, part] * LOG2
        h = h * b[:, -1, :, :, None].exp()
        h = h + torch.einsum("bthk,bthv->bhkv", k[:, part] * (b[:, -1:] - b).exp(), v[:, part])
    return torch.stack(kept, 1), None


def chunk_gla_fwd_intra_gk(q, k, g, scale, cu_seqlens=None, chunk_size=64, chunk_indices=None):
    """The scores of a chunk's tokens, [B, T, H, C]."""
    B, T, H, K = q.shape
    q, k, b = (x.view(B, -1, chunk_size, H, K) for x in (q, k, g * LOG2))
    A = torch.einsum("bnihk,bnjhk,bnijhk->bnihj", q, k, (b[:, :, :, None] - b[:, :, None]).exp()) * scale
    return (A * torch.ones(chunk_size, chunk_size).tril()[:, None]).view(B, T, H, chunk_size)


def chunk_gla_fwd_o_gk(q, v, g, A, h, scale, state_v_first=False, cu_seqlens=None, chunk_size=64, chunk_indices=None,
                       use_graph=False):  # fmt: skip
    B, T, H, _ = q.shape
    n = T // chunk_size
    q, b, v, A = (x.view(B, n, chunk_size, H, -1) for x in (q, g * LOG2, v, A))
    of_states = torch.einsum("bnihk,bnhkv->bnihv", q * b.exp(), h) * scale
    return (of_states + torch.einsum("bnihj,bnjhv->bnihv", A, v)).reshape(B, T, H, -1)


def chunk_gla_fwd(q, k, v, g, g_cumsum, scale, initial_state, output_final_state, state_v_first=False, cu_seqlens=None,
                  chunk_size=64, chunk_indices=None):  # fmt: skip
    assert (g_cumsum, initial_state, output_final_state) == (None, None, False)
    sums = chunk_local_cumsum(g, chunk_size, scale=1 / LOG2)
    h, _ = chunk_fwd_h(k, v, gk=sums, chunk_size=chunk_size)
    A = chunk_gla_fwd_intra_gk(q, k, sums, scale, chunk_size=chunk_size)
    return sums, A, h, None, chunk_gla_fwd_o_gk(q, v, sums, A, h, scale, chunk_size=chunk_size)


@pytest.fixture
def fla(monkeypatch):
    """Stand-ins for what `fla-gla` takes of fla-core for its parts."""
    install(monkeypatch, "fla.ops.common.chunk_h", chunk_fwd_h)
    install(monkeypatch, "fla.ops.gla.chunk", chunk_gla_fwd, chunk_gla_fwd_intra_gk, chunk_gla_fwd_o_gk)
    install(monkeypatch, "fla.ops.utils.cumsum", chunk_local_cumsum)
    install(monkeypatch, "fla.ops.utils.constant")
    sys.modules["fla.ops.utils.constant"].RCP_LN2 = 1 / LOG2


@pytest.mark.parametrize("T", [32, 128])  # a chunk that is shorter than 64, and two
def test_flas_parts_are_its_forward(T, fla):
    cell = Cell("fla-gla", "gla", "fwd", 2, T, "fp64", Parameters(SMALL), "cpu")
    inputs = GLA.make_inputs(cell)
    parts = load_registry()["fla-gla"].parts(inputs, cell)
    assert list(parts) == ["within chunks", "across chunks", "outputs of both", "sums of gates"]
    found = {name: part.call() for name, part in parts.items()}
    torch.testing.assert_close(found["outputs of both"], GLA.reference(inputs)[0])
    A, (h, _), b = (found[name] for name in ("within chunks", "across chunks", "sums of gates"))
    again = chunk_gla_fwd_o_gk(inputs["q"], inputs["v"], b, A, h, 8**-0.5, chunk_size=A.shape[-1])
    torch.testing.assert_close(again, found["outputs of both"])


@pytest.mark.parametrize("with_state", [{"pass": "fwd+bwd"}, {"state": "both"}])
def test_fla_has_parts_of_plain_forwards_alone(with_state, fla):
    sizes = Parameters(SMALL | {"state": with_state.get("state")})
    cell = Cell("fla-gla", "gla", with_state.get("pass", "fwd"), 2, 64, "fp64", sizes, "cpu")
    assert load_registry()["fla-gla"].parts(GLA.make_inputs(cell), cell) == {}


def test_a_backend_that_chooses_its_chunk_has_one_bar(run):
    cell = replace(next(iter(run.profiles)), backend="fla-gla", parameters=Parameters({"heads": 4}))
    with_fla = replace(run, profiles={**run.profiles, cell: profile_of(1.0, 1.5, 2.4)})
    assert {bars.title: list(bars.parts) for bars in bars_of(with_fla)[:2]} == {
        "gla-two-level": list(PAPER), "fla-gla": ["auto"],
    }  # fmt: skip
    assert "| auto | 1 | 1.5 | 2.5 | 2.4 |" in parts_markdown(with_fla)
