"""Strategies of hypothesis for the contents of files from unknown sources."""

import json

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from glabench.records import Record
from glabench.sweeps import Cell, Parameters

# The same examples every time; the folder of one test serves all of its examples.
FIXED = settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Characters that a terminal, a table, a figure or an encoding may not treat as plain text.
TRAPS = ["[red]", "[/nope]", "\x1b]0;title\x07", "$\\frac{$", "a|b\n# c", "\ud800", "\u202egnirts", "%s{}", "=1+1", ""]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 0.0, -1, 10**400, 5e-324, 1e308, 2**62, 2**63, "ok", "nan", [[[]]], {"a": {"b": []}}]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(TRAPS),
    st.lists(st.one_of(st.floats(), st.text(max_size=3)), max_size=4),
    st.lists(st.sampled_from(["heads", "pass", "time_ms", "samples_ms", "rel_error", "cell", *TRAPS]), max_size=4),
    st.dictionaries(st.sampled_from(["o", "dq", *TRAPS]), st.one_of(st.none(), st.floats(), st.text(max_size=3))),
)


def record_at(seqlen):
    sizes = {"heads": 16, "key_dim": 64, "value_dim": 64, "chunk": 16, "materialize": True, "gate": "slow"}
    cell = Cell("gla-triton", "gla", "fwd+bwd", 32, seqlen, "bf16", Parameters(sizes))
    times = {"time_ms": 1.5, "time_ms_p20": 1.4, "time_ms_p80": 1.6, "samples_ms": (1.4, 1.5, 1.6)}
    speeds = {"gbps": 900.0, "copy_gbps": 4000.0, "peak_allocated_mib": 12.0, "stop_reason": "time limit"}
    more = {"rel_error": {"o": 3e-3}, "launch": "C=16"}
    return Record(cell=cell, run_id="run", status="ok", **times, **speeds, **more).to_json()


def first_schema(row):
    """The same record in the first schema."""
    return {name: value for name, value in row.items() if name not in ("schema", "parameters")}


@st.composite
def mutated_records(draw):
    """A few records of either schema, each with some fields replaced by odd values or left out."""
    rows = [record_at(1024 * 2**i) for i in range(draw(st.integers(1, 3)))]
    for number, row in enumerate(rows):
        for key in draw(st.lists(st.sampled_from(sorted(row)), max_size=3, unique=True)):
            if draw(st.integers(0, 5)):
                row[key] = draw(ODD)
            else:
                del row[key]
        if draw(st.booleans()):
            rows[number] = first_schema(row)
    return rows


def keep(folder, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.path / "records.jsonl").write_text(text, encoding="utf-8")
