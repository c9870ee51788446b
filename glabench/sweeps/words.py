"""The words for built-in parameters in reports and messages. Others, as of plugins, are shown as `name=value`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glabench.sweeps.axis import format_number


@dataclass(frozen=True)
class Words:
    """The symbol and the title of a parameter; a size is named before the dtype, and its usual value is not shown."""

    symbol: str
    title: str
    is_size: bool = False
    usual: Any = None
    # The word or number for None, if it is a value as others are and not the implementation's choice.
    none: str | int | None = None


# In the order in which labels show them.
WORDS: Mapping[str, Words] = {
    "batch": Words("B", "batch B"),
    "seqlen": Words("T", "sequence length T"),
    "heads": Words("H", "heads H", is_size=True),
    "key_dim": Words("K", "key head dim K", is_size=True),
    "value_dim": Words("V", "value head dim V", is_size=True),
    "head_dim": Words("D", "head dim D", is_size=True),
    "model_width": Words("d", "model width d", is_size=True),
    "width": Words("width", "model width"),
    "layers": Words("L", "layers L", is_size=True),
    "vocabulary": Words("vocabulary", "vocabulary", usual=32_000),
    "pairs": Words("n", "pairs n", is_size=True),
    "rate": Words("lr", "learning rate"),
    "rows": Words("rows", "rows to learn from", usual=100_000),
    "epochs": Words("epochs", "epochs", usual=64),
    "steps": Words("steps", "steps of training"),
    "inner": Words("inner", "inner width"),
    "state_size": Words("N", "states N per channel", is_size=True),
    "dtype": Words("", "dtype"),
    "kernel": Words("kernel", "kernel of the mixers"),
    "weights": Words("weights", "weights", usual="fp32"),
    "compile": Words("compile", "compiled", none="off"),
    "segments": Words("segments", "segments of a sequence", none=1),
    "graphs": Words("graphs", "CUDA graphs"),
    "recompute": Words("recompute", "blocks computed again", none="off"),
    "gpus": Words("gpus", "GPUs", none=1),
    "parallel": Words("", "parallel", none="ddp"),
    "chunk": Words("C", "chunk size C"),
    "subchunk": Words("c", "subchunk size c"),
    "gate": Words("gate", "gate", usual="logsigmoid/16"),
    "inputs": Words("inputs", "inputs", none="normal"),
    "packed": Words("packed", "packed documents", none="off"),
    "state": Words("state", "states", none="none"),
    "prefix": Words("prefix", "tokens before the call", none="none"),
    "materialize": Words("", "materialize"),
}

# What `materialize` was before it had words, in options and (as booleans) in records.
MATERIALIZE: Mapping[str, str] = {"on": "states", "off": "checkpoints", "true": "states", "false": "checkpoints"}
_KEPT = {"states": "states kept", "checkpoints": "checkpoints kept", "nothing": "nothing kept"}


def symbol_of(name: str) -> str:
    """`H` for heads; the name itself for a parameter without a symbol."""
    return WORDS[name].symbol or name if name in WORDS else name


def axis_title(name: str) -> str:
    """The title of a figure's axis: `sequence length T`."""
    return WORDS[name].title if name in WORDS else name


def is_size(name: str) -> bool:
    """Whether a parameter is a size."""
    return name in WORDS and WORDS[name].is_size


def is_usual(name: str, value: Any) -> bool:
    """Whether a value goes without saying."""
    return name in WORDS and value is not None and value == WORDS[name].usual


def show_value(value: Any) -> str:
    """A value as text: True -> `on`, None -> `auto`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


def value_or_word(name: str, value: Any) -> Any:
    """A parameter's value, or the word for None: `none` for a cell without states."""
    return WORDS[name].none if value is None and name in WORDS else value


def show_x(value: Any) -> str:
    """An x value as text for column heads and ticks: 4096 -> `4k`; otherwise as `show_value`."""
    return format_number(value) if isinstance(value, int) and not isinstance(value, bool) else show_value(value)


def label_of(name: str, value: Any) -> str:
    """A parameter with its value, for labels: `T=4k`, `H=4`, `bf16`, `states kept`."""
    if name in ("dtype", "parallel"):
        return str(value)
    if name == "materialize":
        return _KEPT.get(value, f"materialize={show_value(value)}")
    return f"{symbol_of(name)}={show_x(value) if name == 'seqlen' else show_value(value)}"


def sort_by_order(names: Any) -> list[str]:
    """Names in the order of `WORDS`, others after them."""
    order = list(WORDS)
    return sorted(names, key=lambda name: order.index(name) if name in WORDS else len(order))
