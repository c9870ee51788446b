"""`glabench inspect`: what compiled kernels need, without a GPU."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from glabench.cli import inspect
from glabench.errors import GlabenchError, UsageError
from glabench.inspecting import worker
from glabench.inspecting.code import Occupancy, amd_instructions, code_bytes, code_hash, occupancy, products
from glabench.inspecting.request import Request, family_for, kernels_of, parse_archs

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24 ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
"""


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "expected"),
    [
        ("90", 4, 255, 96 * 1024, Occupancy(2, 0.125, "registers")),
        ("90", 4, 128, 96 * 1024, Occupancy(2, 0.125, "shared memory")),
        ("90", 8, 32, 0, Occupancy(8, 1.0, "registers")),
        ("90", 8, 24, 0, Occupancy(8, 1.0, "warps")),
        ("89", 1, 24, 0, Occupancy(24, 0.5, "programs")),
        ("90", 1, 136, 0, Occupancy(12, 0.1875, "registers")),
        ("gfx942", 1, 130, 256, Occupancy(12, 0.375, "registers")),
        ("gfx942", 1, 24, 0, Occupancy(32, 1.0, "warps")),
        ("gfx942", 2, 24, 0, Occupancy(16, 1.0, "warps")),
        ("gfx942", 4, 329, 28 * 1024, Occupancy(1, 0.125, "registers")),
        ("gfx942", 4, 128, 28 * 1024, Occupancy(2, 0.25, "shared memory")),
        ("gfx90a", 4, 128, 0, None),
    ],
)
def test_the_scarcest_thing_limits_how_many_programs_run_at_once(arch, warps, registers, shared, expected):
    assert occupancy(arch, warps, registers, shared) == expected


@pytest.mark.parametrize(("columns", "programs"), [(608, 0), (512, 1), (128, 4)])
def test_programs_share_the_memory_in_which_products_add_up(columns, programs):
    assert occupancy("100", 4, 32, 0, tensor_columns=columns) == Occupancy(programs, programs / 16, "tensor memory")


def test_machine_code_is_counted_and_its_layout_is_no_change():
    assert products(SASS) == {"HGMMA.64x64x16.F32.BF16": 2, "HMMA.16816.F32.BF16": 1}
    assert products("v_mfma_f32_16x16x16_bf16 a[0:3], v0, v1, a[0:3]") == {"v_mfma_f32_16x16x16_bf16": 1}
    assert code_bytes(SASS) == 64
    assert code_hash(SASS) == code_hash(SASS.replace("                   ", " "))
    assert code_hash(SASS) != code_hash(SASS.replace("R24", "R28"))


AMD = """
	.globl	kernel                  ; -- Begin function kernel
kernel:                                 ; @kernel
.Lfunc_begin0:
	.file	1 "/some/folder" "kernels.py"
	.loc	1 17 0 prologue_end             ; kernels.py:17:0
	s_branch .LBB0_0
.Ltmp0:
.LBB0_0:
	v_mfma_f32_16x16x16_bf16 a[0:3], v0, v1, a[0:3]
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel kernel
		.amdhsa_next_free_vgpr 130
.Lfunc_end0:
; codeLenInByte = 16
"""


def test_amds_assembly_is_its_instructions():
    code = "\ts_branch .LBB0_0\n.LBB0_0:\n\tv_mfma_f32_16x16x16_bf16 a[0:3], v0, v1, a[0:3]\n\ts_endpgm"
    assert amd_instructions(AMD) == code
    moved = AMD.replace("/some/folder", "/another").replace("17", "18").replace(".Ltmp0", ".Ltmp1")
    assert amd_instructions(moved) == code
    assert code_bytes(AMD) == 16


@pytest.mark.parametrize(
    ("text", "archs"), [("sm_90", ("90",)), ("90, gfx942,sm_90", ("90", "gfx942")), ("sm_120,80", ("120", "80"))]
)
def test_architectures_have_two_spellings(text, archs):
    assert parse_archs(text) == archs


def test_by_itself_the_family_is_that_of_a_call():
    assert family_for("auto", ("90",), 64, 64, "bf16") == family_for("hopper", ("90",), 64, 64, "bf16") == "hopper"
    assert family_for("auto", ("90",), 64, 64, "fp16") == family_for("auto", ("90", "80"), 64, 64, "bf16") == "triton"
    assert family_for("auto", ("90",), 64, 64, "bf16", "16") == "triton"
    assert family_for("auto", ("90",), 60, 64, "bf16") == family_for("portable", ("90",), 64, 64, "bf16") == "triton"
    with pytest.raises(UsageError, match="are for sm_90, bf16, chunks of 64 and head dims that are multiples of 16"):
        family_for("hopper", ("80",), 64, 64, "bf16")


def test_a_kernel_is_compiled_and_described(run, monkeypatch):
    """Also for packed documents, in the same process: loading torch takes seconds."""
    command = ("inspect", "gated recurrence", "--arch", "sm_80", "--key-dim", "32", "--value-dim", "32", "--json", "-")
    asked = []
    monkeypatch.setattr(inspect, "kernels_of", lambda requests, *_: asked.extend(requests) or [kernel("one")])
    assert run(*command, "--packed")[0] == 0
    monkeypatch.setattr(inspect, "kernels_of", lambda requests, *rest: kernels_of([*asked, *requests], *rest))
    code, text, _ = run(*command)
    assert code == 0
    packed, plain = json.loads(text)
    for found in (packed, plain):
        assert (found["kernel"], found["arch"], found["products"]) == ("gated recurrence", "sm_80", {})
        assert 0 < found["registers"] <= 255
        assert found["code_bytes"] > 1000
        assert found["occupancy"]["programs"] > 0
    assert packed["code"] != plain["code"]


def kernel(name, code="a", registers=40, faults=None):
    return {
        "arch": "sm_90", "kernel": name, "form": "plain", "warps": 4, "registers": registers, "stack_bytes": 0,
        "shared_bytes": 2048, "occupancy": {"programs": 12, "share": 0.75, "limit": "registers"},
        "products": {"HMMA": 3}, "code_bytes": 512, "code": code, "faults": faults or {}, "compile_s": 1.0,
        "text": "some code",
    }  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """What the worker finds, in turns."""
    found = []
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(inspect, "kernels_of", lambda requests, variables=None: iter(found.pop(0)))
    return found


def test_a_table_has_a_row_per_kernel(run, compiled):
    compiled.append([kernel("forward"), kernel("backward", registers=255)])
    code, text, _ = run("inspect")
    assert code == 0
    assert ["backward", "255", "0", "2", "12", "registers", "3 HMMA", "0.5"] in [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()
    ]


def test_compile_times_are_those_of_an_empty_cache(run, compiled, monkeypatch):
    given = []
    monkeypatch.setattr(
        inspect, "kernels_of", lambda requests, variables=None: given.append(variables) or [kernel("forward")]
    )  # fmt: skip
    assert "compile" not in run("inspect")[1]
    head, *_, row, _ = run("inspect", "--compile-time")[1].splitlines()[1:]
    assert "compile, s" in head
    assert row.strip("│ ").endswith("│ 1")
    assert given[0] is None
    assert given[1].keys() == {"TRITON_CACHE_DIR"}


def test_a_kernel_that_is_compiled_wrongly_ends_the_command_with_an_error(run, compiled):
    compiled.append([kernel("forward"), kernel("backward", faults={"faulty descriptors": 2})])
    code, text, error = run("inspect")
    assert code == 4
    assert "backward" in text
    assert error == "error: backward (sm_90) is compiled wrongly: 2 faulty descriptors\n"


def test_kernels_are_asked_for_by_whole_names_or_parts():
    some = Request(("90",), 64, 64, "bf16", None, "triton", only="back", names=("backward", "forward"))
    assert [name for name in ("backward", "gated backward", "forward") if some.wants(name, "kernel")] == ["backward"]


def test_kernels_are_also_found_by_the_names_that_profiles_show():
    some = Request(("90",), 64, 64, "bf16", None, "hopper", only="Scan_Pieces")
    assert some.wants("gated reverse scan", "scan_pieces")
    assert not some.wants("gated reverse scan", "another")


def test_each_architecture_has_the_kernels_that_a_call_would_run_there(run, monkeypatch):
    asked = []
    monkeypatch.setattr(inspect, "kernels_of", lambda requests, *_: asked.extend(requests) or [kernel("one")])
    for family in ("auto", "portable"):
        assert run("inspect", "--arch", "sm_90,sm_100", "--family", family)[0] == 0
    families = [(each.archs, each.family) for each in asked]
    assert families[:2] == [(("90",), "hopper"), (("100",), "triton")]
    assert families[2:] == [(("90",), "triton"), (("100",), "triton")]


def test_code_is_printed_below_its_kernels_name(run, compiled):
    compiled.append([kernel("forward")])
    assert run("inspect", "--sass")[1] == "// forward, sm_90\nsome code\n"


def test_what_differs_between_two_revisions_is_shown(run, compiled, monkeypatch):
    compiled += [[kernel("one"), kernel("two"), kernel("old")], [kernel("one"), kernel("two", "b", 48), kernel("new")]]
    monkeypatch.setattr(inspect, "checked_out", lambda repository, revision: nullcontext(repository))
    monkeypatch.setattr(inspect, "repository_of", Path)
    code, text, _ = run("inspect", "--rev", "HEAD..WORKTREE")
    assert code == 0
    assert "40 -> 48" in text
    assert "old, in the first revision alone" in text
    assert "new, in the second revision alone" in text
    assert "1 of 4 kernels have the same machine code in both revisions." in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "sm_91"], "--arch: 'sm_91' is unknown (allowed: sm_80,"),
        (["--dtype", "fp8"], "--dtype: 'fp8' is unknown"),
        (["--chunk", "48"], "--chunk: '48' is unknown"),
        (["--gates", "fp8"], "--gates: 'fp8' is unknown"),
        (["--family", "wide"], "--family: 'wide' is unknown"),
        (["--sass", "--ptx"], "--sass, --ptx, --compile-time: give one of them"),
        (["--ptx", "--compile-time"], "--sass, --ptx, --compile-time: give one of them"),
        (["--sass", "--rev", "HEAD..WORKTREE"], "--rev: shows what differs; leave out --sass, --ptx"),
        (["--sass", "--json", "-"], "--json: holds what kernels need, not their code; leave out --json,"),
        (["--ptx", "--json", "-"], "--json: holds what kernels need, not their code; leave out --json,"),
        (["--json", "/nowhere/x.json"], "--json: cannot write '/nowhere/x.json'; give a file in an"),
        (["--ptx", "--arch", "gfx942"], "--ptx: gfx942 has no PTX; give --sass for its machine code, or another"),
        (["--ptx", "--arch", "sm_90,gfx942"], "--ptx: gfx942 has no PTX"),
    ],
)
def test_mistakes_are_named(run, words, said):
    code, _, error = run("inspect", *words)
    assert code == 2
    assert said in error


def test_no_kernel_of_a_name_is_an_error(run, compiled):
    compiled.append([])
    code, _, error = run("inspect", "nothing")
    assert code == 2
    assert "no kernel of these sizes has 'nothing' in its name" in error


@pytest.mark.parametrize(("names", "expected"), [(["KEYS_GATED"], [True, False]), (["g"], [True])])
def test_gates_of_values_alone_are_compiled_if_a_revisions_kernels_know_them(monkeypatch, names, expected):
    """Older ones read gates of keys in any case."""
    from gla_kernels.value_gated import states

    monkeypatch.setattr(states, "value_gated_states", SimpleNamespace(arg_names=names))
    calls = worker._calls(Request(("90",), 64, 64, "bf16", None, "triton"), "90")
    assert [call.gated for call in calls if getattr(call, "value_gated", False)] == expected


@pytest.mark.full
def test_kernels_of_the_same_revision_are_the_same(run, monkeypatch):
    monkeypatch.setattr(inspect, "repository_of", lambda folder: Path(__file__).parent.parent.parent)
    code, text, _ = run("inspect", "recurrence", "--family", "portable", "--rev", "HEAD..HEAD")
    assert code == 0
    assert text == "2 of 2 kernels have the same machine code in both revisions.\n"


def test_a_worker_that_fails_says_why():
    with pytest.raises(GlabenchError, match="the kernels could not be compiled: KeyError: '91'"):
        list(kernels_of([Request(("91",), 64, 64, "bf16", None, "triton", "recurrence")]))


ROOT = Path(__file__).parents[2]


def in_short(kernel):
    held = (kernel["occupancy"] or {}).get("programs", "-")
    return f"{kernel['registers']} / {kernel['stack_bytes']} / {kernel['shared_bytes'] / 1024:.3g} / {held}"


def test_the_documents_show_what_was_published():
    portable, hopper = (
        json.loads((ROOT / f"results/inspect/{name}.json").read_text()) for name in ("portable", "hopper")
    )
    assert not [kernel for kernel in portable + hopper if kernel["faults"]]
    found = {(kernel["kernel"], kernel["arch"]): in_short(kernel) for kernel in portable}
    found |= {(kernel["kernel"], "hopper"): in_short(kernel) for kernel in hopper}
    text = (ROOT / "docs/profiling.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" / ") == 12]
    assert len(rows) == 10
    for name, *shown in rows:
        assert shown == [found[name, arch] for arch in ("sm_80", "gfx942", "sm_90", "hopper")]
