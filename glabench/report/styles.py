"""Colours, markers and dashes. A backend has the same colour and marker in every figure, shared by its variants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

# Okabe and Ito's colours, which colour-blind readers can distinguish, and four more. Markers help in print.
_OURS: Mapping[str, tuple[str, str]] = {
    "gla-triton": ("#0072B2", "o"),
    "linear-triton": ("#009E73", "^"),
    "gla-torch": ("#000000", "v"),
    "gla-recurrent-torch": ("#5D3A9B", "h"),
    "linear-torch": ("#CC79A7", "D"),
    "fla-gla": ("#D55E00", "s"),
    "fla-linear": ("#56B4E9", "<"),
    "sdpa-flash": ("#E69F00", ">"),
    "sdpa-cudnn": ("#8F8F8F", "p"),
    "sdpa-math": ("#8C6D1F", "P"),
    "flash-attn": ("#882255", "d"),
    "mamba1": ("#88A000", "H"),
}
# For other backends: colours that differ from those above.
_OTHERS = ("#332288", "#CC6677", "#44AA99", "#AA4499", "#661100", "#6699CC", "#DDCC77")
_MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p", "h")
_DASHES = ("-", "--", "-.", ":")
_HATCHES = ("", "////", "....", "xxxx", "||||", "----")


@dataclass(frozen=True)
class Style:
    """The look of a series. `variant` is its number, from 0, among the series of its backend in the figure."""

    color: str
    marker: str
    variant: int

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's arguments for a line. Variants differ in dashes and in filled or hollow markers."""
        is_hollow = (self.variant + self.variant // len(_DASHES)) % 2 == 1
        return {
            "color": self.color,
            "linestyle": _DASHES[self.variant % len(_DASHES)],
            "marker": self.marker,
            "markersize": 6,
            "markerfacecolor": "white" if is_hollow else self.color,
        }

    @property
    def bar(self) -> dict[str, Any]:
        """Matplotlib's arguments for a bar. Variants differ in hatches."""
        return {"color": self.color, "edgecolor": "white", "hatch": _HATCHES[self.variant % len(_HATCHES)]}


def choose_styles(backends: Mapping[str, str]) -> dict[str, Style]:
    """The style of each label. `backends` maps labels to their backends."""
    looks = _choose_looks(sorted(set(backends.values())))
    seen: dict[str, int] = {}
    styles = {}
    for label, backend in backends.items():
        seen[backend] = seen.get(backend, -1) + 1
        styles[label] = Style(*looks[backend], seen[backend])
    return styles


def _choose_looks(backends: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker per backend: from the table, else chosen by the name's checksum; taken colours are skipped."""
    looks: dict[str, tuple[str, str]] = {}
    for name in backends:
        first = crc32(name.encode())
        row = [_OTHERS[(first + step) % len(_OTHERS)] for step in range(len(_OTHERS))]
        taken = {color for color, _ in looks.values()}
        color = next((each for each in row if each not in taken), row[0])
        looks[name] = _OURS.get(name, (color, _MARKERS[first % len(_MARKERS)]))
    return looks
