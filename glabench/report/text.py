"""Texts as they are in pages and figures: names of backends, kernels and parts may hold anything, and be long."""

import re

# What Markdown, HTML or GitHub's formulas begin with. An underscore only ends emphasis if no word goes on behind it.
_MARKUP = re.compile(r"[\\`*\[<&|~$]|_(?![^\W_])")
# Characters of a name of which two have room side by side in a figure's legend.
_LONGEST = 52


def escape(text: str) -> str:
    """Text for a line or a table of Markdown, shown as it is."""
    return _MARKUP.sub(r"\\\g<0>", text)


def escape_bars(text: str) -> str:
    """Markdown, or code, for a table of Markdown: only `|` is escaped."""
    return text.replace("|", "\\|")


def shorten(text: str, longest: int = _LONGEST) -> str:
    """Text for a figure, without its middle if it is long: names that begin or end alike remain apart."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[-end:]}"
