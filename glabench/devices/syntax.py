"""Python source reduced to the code that it holds: comments, docstrings and layout make no difference."""

import ast
import warnings
from functools import cache
from typing import Any

# What follows from the rest of the tree, and comments that some Python versions keep.
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache  # each run that is begun asks for all of the kernels
def code_of(source: bytes) -> bytes:
    """The syntax tree of a source as text, without docstrings; the source itself if it does not parse.

    The text does not depend on the version of Python, unlike that of `ast.dump` and `ast.unparse`, if each parses the
    source: 3.11, 3.12 and 3.13 agreed on all files of torch, Triton and this repository.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source's own style
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
            elif isinstance(node, ast.JoinedStr):  # to which Python 3.12 adds empty strings
                node.values = [
                    part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")
                ]
        return _text(tree).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def imported_names(source: bytes) -> set[str]:
    """The first parts of the names of modules that a source imports, anywhere in it; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _text(value: Any) -> str:
    if isinstance(value, ast.AST):
        fields = [(name, getattr(value, name, None)) for name in value._fields if name not in _LEFT_OUT]
        # Versions of Python add fields, which older code leaves empty.
        filled = [f"{name}={_text(field)}" for name, field in fields if field is not None and field != []]
        return f"{type(value).__name__}({', '.join(filled)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return ascii(value)  # not repr, which depends on the version's Unicode
