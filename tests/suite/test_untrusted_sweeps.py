"""Sweep files that are garbage: read and expanded, or refused in one line; never a traceback, never a hang."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.sweeps import expand, load_sweep, resolve
from glabench.sweeps.load import dump_sweep, parse_sweep

TRAITS = load_registry().traits()
# The same examples every time; the folder of one test serves all of its examples.
FIXED = settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
GOOD = """title = "a title"
x = "seqlen"
against = "gla-torch"

[axes]
seqlen = "1k..4k"
batch = 2
heads = 2
head_dim = 64
dtype = "bf16"
pass = "fwd"

[cpu]
batch = 1

[[backends]]
name = "gla-torch"
chunk = "16..64"
"""
KEYS = st.sampled_from(
    [
        "heads",
        "width",
        "inner",
        "baseline",
        "'{}'",
        "'{0}'",
        "a.b",
        "'x y'",
        "axes",
        "[",
        "[[axes]]",
        "[a.b]",
        "cpu.batch",
    ]
)
VALUES = [
    *("true", "inf", "-nan", "0x" + "f" * 5000, "9" * 4000, "1e999", "2020-13-40", "1979-05-27T07:32:00Z", "[" * 500),
    *('"1..1m:+1"', '"0"', '"k"', '"1..8:*1"', '"' + "9" * 4200 + 'm"', '","', '"-1"', '"auto"', '"on"', '"[x]"'),
    *("[1, [2]]", "{a = 1}", "{}", "[]", "'''\n\n'''", '"""a\n"""', "'\\'", '"\\u001b[31m"', '"\\ud800"'),
    *(
        '[1, "2k"]',
        "[true, false]",
        "[[1], [2]]",
        "[1, [2, {}]]",
        "[9e99]",
        "[" + "1," * 2000 + "1]",
        "9223372036854775808",
    ),
    *('"infer,fwd"', '"gla-torch,nope"', '"١"', '"1" # "', "1_000", "-0", "0o17"),
]
LITERALS = st.one_of(
    st.sampled_from(VALUES), st.text(max_size=10).map(json.dumps), st.integers(-(10**20), 10**20).map(str)
)


@st.composite
def odd_sweeps(draw):
    """A good sweep file with lines removed, doubled, moved or changed."""
    lines = GOOD.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["value", "value", "value", "key", "cut", "double", "move"])):
            case "value":
                lines[at] = lines[at].partition("=")[0] + "= " + draw(LITERALS)
            case "key":
                lines[at] = draw(KEYS) + " = 1"
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, 12))]
            case "double":
                lines.append(lines[at])
            case "move":
                lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
    return "\n".join(lines)


def check_sweep(text):
    """Reads and expands a sweep, or refuses it in one line that names the file."""
    try:
        sweep = parse_sweep("name", text, "mine.toml", stored=True)
    except UsageError as problem:
        words = str(problem)
        assert words.startswith("mine.toml: ")
        return
    assert parse_sweep("name", dump_sweep(sweep), "again") == sweep
    for device in ("cpu", "cuda"):
        try:
            resolved = resolve(sweep, device, {}, TRAITS)
            expand(resolved, TRAITS, device)
        except UsageError:
            continue
        assert parse_sweep("name", dump_sweep(resolved), "again") == resolved


@settings(FIXED, max_examples=400)
@given(text=odd_sweeps())
def test_odd_sweeps_are_expanded_or_refused(text):
    check_sweep(text)


def test_a_sweep_without_a_title_can_be_resumed():
    untitled = parse_sweep("name", GOOD.replace("a title", ""), "mine.toml")
    assert parse_sweep("name", dump_sweep(untitled), "again") == untitled


@FIXED
@given(text=st.text())
def test_any_text_as_a_sweep_is_refused(text):
    check_sweep(text)


@FIXED
@given(data=st.binary())
def test_any_bytes_as_a_sweep_file_are_refused(tmp_path, data):
    path = tmp_path / "mine.toml"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"mine\.toml: "):
        load_sweep(str(path))


REPEATED = GOOD.replace('"1k..4k"', '"1..1000:+1"').replace('"bf16"', '"bf16,fp16,fp32"')
BOMBS = {
    "arrays in arrays": "a = " + "[" * 100_000,
    "tables in tables": "a = " + "{a = " * 50_000,
    "a key of many parts": "a" + ".a" * 100_000 + " = 1",
    "a table's name of many parts": "[" + "a." * 100_000 + "a]",
    "quoted parts with signs in them": '"=".' * 50_000 + "a = 1",
    "a value of many parts": "[axes]\nseqlen" + ".a" * 90 + " = 1",
    "many deep keys": "\n".join(f"k{i}" + ".a" * 90 + " = 1" for i in range(1200)),
    "many tables": "\n".join(f"[k{i}" + ".a" * 90 + "]\nb.c = 1" for i in range(1200)),
    "a list of many ranges": GOOD.replace('"1k..4k"', '"' + "1..1000:+1," * 20_000 + '1"'),
    "more cells than anybody measures": REPEATED.replace("heads = 2", 'heads = "1..1000:+1"'),
    "the same cells again and again": REPEATED + '[[backends]]\nname = "gla-torch"\n' * 5000,
    "many backends with an axis that none has": GOOD.replace("[cpu]", "zzz = 1\n[cpu]")
    + '[[backends]]\nname = "gla-torch"\n' * 6000,
    "a name of many letters": GOOD.replace("heads", "h" * 200_000),
    "a list of many values": GOOD.replace("heads = 2", "heads = [" + "1, 2, 3, 4, " * 20_000 + "]"),
    "lists in lists": GOOD.replace("heads = 2", "heads = " + "[" * 300 + "{}" + "]" * 300),
    "a backend of many letters": GOOD.replace('"gla-torch"', '"' + "g" * 100_000 + '"'),
    "too large a file": "#" * 2**20,
}


@pytest.mark.parametrize("text", list(BOMBS.values()), ids=list(BOMBS))
def test_a_sweep_file_made_to_keep_the_program_busy_does_not(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(UsageError) as caught:
        expand(resolve(load_sweep(str(path)), "cuda", {}, TRAITS), TRAITS, "cuda")
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 2000
