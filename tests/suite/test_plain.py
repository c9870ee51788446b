"""Plain data from unknown sources, checked against types."""

from dataclasses import dataclass, field

import pytest

from glabench.errors import ExitCode, GlabenchError, did_you_mean, printable
from glabench.plain import Amount, Count, Number, Whole, read_as, read_json, read_text, shown


@dataclass(frozen=True)
class Inner:
    size: Count


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    times: tuple[Amount, ...] = ()
    table: dict[str, int] = field(default_factory=dict)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Whole, [0, -5, 2**63 - 1], [2**63, -(2**63) - 1, 1.5, True, "1", None, NAN, 10**400]),
        (Count, [1, 2**63 - 1], [0, -1, 2**63, True, "1", 0.5]),
        (Number, [0, -5.5, 9e18, 3], [1e19, -INF, INF, NAN, True, "1", None, 10**400]),
        (Amount, [1e-18, 5, 9e18], [0, 0.0, -1.0, 5e-324, 1e19, INF, NAN, True, "1"]),
    ],
)
def test_numbers_are_held_to_what_nothing_overflows_at(kind, good, bad):
    for value in good:
        assert read_as(kind, value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^(expected|number out of range)"):
            read_as(kind, value)


def test_plain_data_becomes_a_dataclass_and_keys_that_it_lacks_are_passed_over():
    data = {"name": "a", "inner": {"size": 2, "colour": 1}, "times": [1, 2.5], "colour": [[]]}
    assert read_as(Outer, data) == Outer("a", Inner(2), (1.0, 2.5))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "it has no name"),
        ({"name": 3}, "name: expected str, got int"),
        ({"name": "a", "inner": {"size": "2"}}, "inner.size: expected int, got str"),
        ({"name": "a", "inner": {}}, "inner: it has no size"),
        ({"name": "a", "times": [1, "2"]}, r"times\[1\]: expected float, got str"),
        ({"name": "a", "table": {"k": "v"}}, r"table\[...\]: expected int, got str"),
        ([], "expected object, got array"),
        (None, "expected object, got null"),
    ],
)
def test_a_wrong_key_is_named(data, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_as(Outer, data)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"nope", b"NaN", b"[Infinity]", b"1e999", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000),
        *(b"[1,]", b"{'a': 1}", b'"\\ud800"', b'"\x01"', "\ud800", b"{} {}", b"\xef\xbb\xbf{}", b"9" * 5000),
    ],
)
def test_what_is_not_json_is_refused_in_a_line(text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (every case has its own message)
        read_json(text)
    assert len(str(caught.value).splitlines()) == 1


def test_json_is_read_as_it_stands():
    assert read_json(b'{"a": [1, 1.0, null, true, "\\u00e9"]}') == {"a": [1, 1.0, None, True, "é"]}


def test_all_text_becomes_printable_keys_too():
    assert read_text({"a\x1b": ["b\nc", {"d": "\u202eback"}], "n": 3}) == {"a ": ["b c", {"d": " back"}], "n": 3}


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}])
def test_data_within_data_goes_some_way_down(wrap):
    data = "text"
    for _ in range(8):
        data = wrap(data)
    assert read_text(data) == data
    with pytest.raises(ValueError, match="more than 8 deep"):
        read_text(wrap(data))


def test_a_value_is_shown_short_and_in_one_line():
    endless = []
    endless.append(endless)
    assert shown("a\nb\x1b") == r"'a\nb\x1b'"
    assert shown("x" * 100) == "'" + "x" * 58 + "…"
    assert shown(10**5000) == "a int"
    assert shown(endless) == "[[...]]"


def test_printable_text_is_one_line_that_no_terminal_obeys():
    assert printable("a\r\n\x1b[31m\x9b\u2028\u202e\ud800é🚀") == "a   [31m    é🚀"
    assert printable("a\tb\x7f") == "a b "


def test_the_nearest_name_is_suggested_if_there_is_one():
    assert did_you_mean("chunck", ["batch", "chunk"]) == "; did you mean 'chunk'?"
    assert did_you_mean("zzz", ["batch", "chunk"]) == ""
    assert did_you_mean("x", []) == ""


def test_every_error_has_an_exit_code_of_its_kind():
    kinds = {kind.__name__: kind.exit_code for kind in GlabenchError.__subclasses__()}
    assert kinds["UsageError"] == ExitCode.USAGE == 2
    assert kinds["NothingToRunError"] == ExitCode.NOTHING_TO_RUN == 3
    assert kinds["InterruptedRunError"] == ExitCode.INTERRUPTED == 130
