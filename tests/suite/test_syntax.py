"""Code is told from its comments, docstrings and layout, alike in all versions of Python."""

from hashlib import sha256

import pytest

from glabench.devices.syntax import code_of

SOURCE = '''
"""A module."""

import triton.language as tl


@triton.jit
def kernel(x_ptr, n: tl.constexpr = 16, *, scale=None):
    """Doubles x."""
    at = tl.arange(0, n)  # one program
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2.0)


class Plan:
    """Numbers."""

    warps = 4
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # one program", ""),
        ('    """Doubles x."""\n', ""),
        ('"""Doubles x."""', '"""Twice x."""'),
        ('"""A module."""\n', ""),
        ('    """Numbers."""\n', ""),
        ("x_ptr + at, mask", "(x_ptr + at), mask"),
        ("    warps = 4", "    # four\n\n    warps = (4)"),
        ("n: tl.constexpr = 16, *, scale=None", "\n    n: tl.constexpr = 0x10,\n    *,\n    scale=None,\n"),
    ],
)
def test_comments_docstrings_and_layout_make_no_difference(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert code_of(changed.encode()) == code_of(SOURCE.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2.0", "2"),
        ("warps = 4", "warps = 8"),
        ("warps = 4", "warps = True"),
        ("warps = 4", "warps = '4'"),
        ("at < n", "at <= n"),
        ("scale=None", "scale=0"),
        ("*, scale=None", "scale=None"),
        ("n: tl.constexpr", "n"),
        ("@triton.jit\n", ""),
        ("x_ptr + at, tl.load", "at + x_ptr, tl.load"),
        ("    warps = 4", "    warps = 4\n    'four'"),
    ],
)
def test_any_other_change_makes_a_difference(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert code_of(changed.encode()) != code_of(SOURCE.encode())


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"x = 1\0", b"\xff\xfe", b"(" * 500 + b")" * 500, b"-" * 10**5 + b"1"]
)
def test_a_source_that_does_not_parse_is_taken_as_it_is(source):
    assert code_of(source) == source


def test_a_source_may_be_written_in_a_way_that_python_warns_of():
    assert b"Assign" in code_of(rb"x = '\d' is 3")


def test_the_text_is_the_same_in_all_versions_of_python():
    """In the places in which trees of Python 3.11 to 3.13 differ."""
    source = SOURCE + (
        'async def f(*a, b: int = 1, **c) -> "d":\n'
        "    print(f\"{a!r:>{b}}x{{}} {c['k']:.2f}\", 'é', b'\\0', 1e999, 3j, ..., None, [], {}, *a, **c)\n"
        "    match a:\n        case [1, *_] | {'k': None}: return\n"
        "lambda x, /, y=1: (x, y)[0:1, ...]\n"
    )
    assert sha256(code_of(source.encode())).hexdigest()[:16] == "c8f8f8590ae341c4"
