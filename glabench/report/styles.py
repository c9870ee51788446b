"""Colours, markers and dashes. A backend has the same colour and marker in every figure.

Its variants have shades of the colour, and differ in dashes and in how the marker is filled.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

# Okabe and Ito's colours, which colour-blind readers can distinguish, and more. Markers help in print.
_OURS: Mapping[str, tuple[str, str]] = {
    "gla-triton": ("#0072B2", "o"),
    "linear-triton": ("#009E73", "^"),
    "simple-gla-triton": ("#1F9BCF", "D"),
    "retention-triton": ("#3F3FBF", "<"),
    "lightning-triton": ("#7B6FD0", "h"),
    "gla-both-triton": ("#004D80", "P"),
    "gla-values-triton": ("#66A9D9", "v"),
    "gla-torch": ("#000000", "v"),
    "gla-torch-half": ("#4A4A4A", "<"),
    "gla-torch-compiled": ("#737373", ">"),
    "gla-both-torch": ("#1A1A1A", "P"),
    "gla-values-torch": ("#A6A6A6", "v"),
    "gla-recurrent-torch": ("#5D3A9B", "h"),
    "linear-torch": ("#CC79A7", "D"),
    "fla-gla": ("#D55E00", "s"),
    "fla-linear": ("#56B4E9", "<"),
    "fla-linear-chunk": ("#2B8CBE", "p"),
    "sdpa-flash": ("#E69F00", ">"),
    "sdpa-cudnn": ("#8F8F8F", "p"),
    "sdpa-math": ("#8C6D1F", "P"),
    "flash-attn": ("#882255", "d"),
    "mamba1": ("#88A000", "H"),
    "mamba2": ("#4D5D00", "8"),
    "linear-parallel-torch": ("#B2182B", "s"),
    "linear-parallel-triton": ("#EF8A62", "^"),
    "gla-parallel-torch": ("#1B7837", "*"),
    "gla-parallel-naive": ("#C51B7D", "P"),
    "gla-scan-torch": ("#01665E", "d"),
    "gla-two-level": ("#08519C", "v"),
    "gla-closed-form": ("#B0006D", "X"),
    "gla-five-step": ("#4292C6", "8"),
    "gla-stored-states": ("#7F0000", "D"),
    "gla-both-stored-states": ("#B35C5C", "H"),
    "linear-two-pass": ("#74C476", "P"),
    "flex": ("#BF812D", "v"),
    "flash-attn-3": ("#C994C7", "h"),
    "flash-attn-4": ("#DF65B0", "*"),
    "flash-attn-kvcache": ("#5E1A3C", "s"),
    "mamba1-step": ("#B5C94D", "^"),
    "mamba2-step": ("#7A8F1F", "<"),
    "fla-gla-recurrent": ("#A63603", "8"),
    "fla-both-recurrent": ("#E7833C", "v"),
    "fla-simple-gla": ("#FD8D3C", "p"),
    "fla-retention": ("#54278F", "v"),
    "fla-lightning": ("#807DBA", "P"),
    "fla-gated-delta": ("#CB181D", "D"),
    "fla-kda": ("#FB6A4A", "H"),
    "mlstm-kernels": ("#3182BD", "^"),
    "hyena-fft": ("#B8860B", "X"),
    "fla-rwkv4": ("#8B5A2B", "p"),
    "fla-gla-model": ("#F0722A", "s"),
    "gla-recall": ("#1A86CC", "o"),
    "linear-recall": ("#33B28F", "^"),
    "simple-gla-recall": ("#5DB7E2", "D"),
    "retnet-recall": ("#6F6CD9", "<"),
    "transformer-recall": ("#F0B429", ">"),
    "mamba1-recall": ("#A3BF1A", "H"),
    "mamba2-recall": ("#6B7F0A", "8"),
    "hyena-recall": ("#C69A2E", "X"),
    "rwkv4-recall": ("#9C6F42", "p"),
    "linear-text": ("#4DBF9F", "^"),
    "fixed-gate-text": ("#8785E0", "<"),
    "simple-gla-text": ("#78C4E8", "D"),
    "gla-values-text": ("#8FC1E5", "v"),
    "gla-text": ("#2B95D6", "o"),
    "gla-both-text": ("#1D5A8A", "P"),
    "gla-decode": ("#0B75B3", "o"),
    "linear-decode": ("#1AA37C", "^"),
    "simple-gla-decode": ("#43A3D0", "D"),
    "retnet-decode": ("#5754CC", "<"),
    "transformer-decode": ("#DE9B16", ">"),
    "mamba1-decode": ("#8CA60D", "H"),
    "mamba2-decode": ("#556505", "8"),
    "gla-model": ("#0061A1", "o"),
    "linear-model": ("#008E66", "^"),
    "simple-gla-model": ("#2A8FBD", "D"),
    "retnet-model": ("#413EBD", "<"),
    "transformer-model": ("#CC8400", ">"),
    "mamba1-model": ("#768C00", "H"),
    "mamba2-model": ("#3E4A00", "8"),
}
# For other backends: colours that differ from those above.
_OTHERS = ("#332288", "#4400FF", "#44AA99", "#AA4499", "#661100", "#6699CC", "#DDCC77")
_MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p", "h")
# Looks of a backend's variants. Numbers without a common factor, so that pairs of dash and fill repeat late.
_DASHES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (8, 2, 2, 2)))
_FILLS = ("full", "none", "bottom", "left", "top", "right")
# Shares of black or white in a shade of a colour.
_SHADES = ((0.0, "00"), (0.3, "00"), (0.45, "FF"))
# No dots, of which an .svg has all in 180 kB.
_HATCHES = ("", "////", "\\\\\\\\", "xxxx", "||||", "----")


@dataclass(frozen=True)
class Style:
    """The look of a series. `variant` is its number, from 0, among the series of its backend in the figure."""

    color: str
    marker: str
    variant: int

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's arguments for a line."""
        fill = _FILLS[self.variant % len(_FILLS)]
        return {
            "color": self.color,
            "linestyle": _DASHES[self.variant % len(_DASHES)],
            "marker": self.marker,
            "markersize": 6,
            "fillstyle": "full" if fill == "none" else fill,
            "markerfacecolor": "white" if fill == "none" else self.color,
            "markerfacecoloralt": "white",
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
        color, marker = looks[backend]
        styles[label] = Style(_shade(color, seen[backend]), marker, seen[backend])
    return styles


def _shade(color: str, variant: int) -> str:
    """A variant's shade of a colour; with as many shades as fills have passed, so that pairs of them repeat late."""
    share, end = _SHADES[(variant // 2 + variant // len(_FILLS)) % len(_SHADES)]
    parts = [round((1 - share) * int(color[i : i + 2], 16) + share * int(end, 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{part:02X}" for part in parts)


def _choose_looks(backends: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker per backend: from the table, else the first free ones from a place that the name determines."""
    looks = {name: _OURS[name] for name in backends if name in _OURS}
    for name in backends:
        if name not in looks:
            colors, markers = ({look[i] for look in looks.values()} for i in (0, 1))
            looks[name] = _first_free(name, _OTHERS, colors), _first_free(name, _MARKERS, markers)
    return looks


def _first_free(name: str, choices: Sequence[str], taken: Container[str]) -> str:
    """The first choice that is not taken, from one that the name's checksum determines; that one if all are taken."""
    first = crc32(name.encode()) % len(choices)
    row = [*choices[first:], *choices[:first]]
    return next((each for each in row if each not in taken), row[0])
