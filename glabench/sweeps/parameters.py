"""Parameters of ops and backends. Each is an axis in sweeps that use its op or backend."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from glabench.errors import did_you_mean, printable
from glabench.plain import shown
from glabench.sweeps.axis import INTEGER_FORM, parse_choices, parse_integers
from glabench.sweeps.words import show_value

Pass = Literal["infer", "fwd", "bwd", "fwd+bwd"]
Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
DeviceKind = Literal["cuda", "cpu"]
Value = int | float | str | bool

AUTO = "auto"
PASSES: tuple[Pass, ...] = get_args(Pass)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True)
class Parameter:
    """One axis: its name in sweep files and records, its help text, its parser and the values that it allows.

    If a parameter's value is None, the implementation chooses or the feature is off, and the cell has no entry for it.
    So if a parameter is added to an op later, give it the default None: stored cells then stay equal to new ones.
    Raises ValueError for what cannot be an option, a sweep's key and a record's field.
    """

    name: str
    help: str
    # Returns all values in the axis's text. Raises ValueError.
    parse: Callable[[str], tuple[Any, ...]]
    # The allowed text, for error messages.
    allowed: str
    default: Value | None = None
    # The fixed set of values, for help and completion; empty if there is none.
    choices: tuple[str, ...] = ()
    # Whether it has no effect in a forward without gradients (pass `infer`).
    for_training: bool = False
    # Whether a backend has to name it among its `features` to be measured with a value other than None.
    is_feature: bool = False
    # Another parameter without which it has no effect: a cell in which that is None has no entry for it.
    needs: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        words = " ".join(self.help.split()) if isinstance(self.help, str) else None
        if words is None or words != printable(words) or not isinstance(self.allowed, str):
            raise ValueError(f"parameter '{self.name}': its help and what it allows need to be printable text")
        for choice in self.choices:
            if not is_word(choice):
                raise ValueError(f"parameter '{self.name}': {shown(choice)} is no choice (allowed: text without ',')")
        if self.default is not None and not self._takes(self.default):
            raise ValueError(
                f"parameter '{self.name}': its parser gives no tuple with the default {shown(self.default)} "
                f"(allowed: {self.allowed}; None if the implementation chooses)"
            )

    def _takes(self, value: Value) -> bool:
        try:
            return value in self.parse(show_value(value))
        except Exception:  # a plugin's parser may raise anything
            return False

    @property
    def option(self) -> str:
        """The axis's command-line option."""
        return option_of(self.name)


def check_name(name: Any) -> None:
    """Raises ValueError for what cannot be the name of a parameter."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"{shown(name)} is no name of a parameter (allowed: a-z, 0-9 and _, from a letter on)")


def is_word(text: Any) -> bool:
    """Whether a value can be an item of a list on the command line: printable text without commas."""
    return isinstance(text, str) and text != "" and text == printable(text).strip() and "," not in text


def option_of(name: str) -> str:
    """The command-line option of an axis: `key_dim` -> `--key-dim`."""
    return "--" + name.replace("_", "-")


def integers(name: str, help_text: str, default: int | None = None, auto: bool = False) -> Parameter:
    """A parameter of positive whole numbers; with `auto`, the value `auto` lets the implementation choose."""
    if auto:
        return Parameter(name, help_text, partial(_integers_or, AUTO), f"{AUTO}, or {INTEGER_FORM}", default)
    return Parameter(name, help_text, parse_integers, INTEGER_FORM, default)


def count_or(name: str, help_text: str, off: str, is_feature: bool = False) -> Parameter:
    """A parameter of positive whole numbers, or the word `off`, which stands for None, the default."""
    parse = partial(_integers_or, off)
    return Parameter(name, help_text, parse, f"{off}, or {INTEGER_FORM}", is_feature=is_feature)


def choices(name: str, help_text: str, allowed: tuple[str, ...], default: str | None = None) -> Parameter:
    """A parameter of names from a fixed set."""
    return _of_words(name, help_text, {word: word for word in allowed}, default)


def extra(
    name: str, help_text: str, off: str, others: tuple[str, ...], is_feature: bool = False, needs: str | None = None
) -> Parameter:
    """A parameter of names, of which `off` stands for None, the default."""
    values = {off: None, **{word: word for word in others}}
    return _of_words(name, help_text, values, is_feature=is_feature, needs=needs)


def switch(name: str, help_text: str, default: bool, for_training: bool = False) -> Parameter:
    """A parameter that is on or off."""
    return _of_words(name, help_text, {"on": True, "off": False}, default, for_training=for_training)


def aliased(
    name: str, help_text: str, allowed: tuple[str, ...], others: Mapping[str, str], for_training: bool = False
) -> Parameter:
    """A parameter of names, the first of which is the default; `others` are read as one of them."""
    names = {**{word: word for word in allowed}, **others}

    def parse(text: str) -> tuple[str, ...]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in names:
                raise ValueError(f"'{word}' is not allowed{did_you_mean(word, allowed)}")
        return tuple(dict.fromkeys(names[word] for word in words))

    return Parameter(name, help_text, parse, ", ".join(allowed), allowed[0], allowed, for_training=for_training)


def _of_words(
    name: str, help_text: str, values: Mapping[str, Value | None], default: Value | None = None, **kind: Any
) -> Parameter:
    """A parameter whose values are written as words."""
    words = tuple(values)

    def parse(text: str) -> tuple[Value | None, ...]:
        return tuple(values[word] for word in parse_choices(text, words))

    return Parameter(name, help_text, parse, ", ".join(words), default, words, **kind)


def _integers_or(word: str, text: str) -> tuple[int | None, ...]:
    values: list[int | None] = []
    for item in text.split(","):
        values += [None] if item.strip() == word else parse_integers(item)
    return tuple(dict.fromkeys(values))


def parse_names(text: str) -> tuple[str, ...]:
    """The values of the axis `backend`: names, in order, without repeats. Raises ValueError for an empty name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise ValueError(f"'{text}' has an empty name")
    return names


# The axes that every cell has.
COMMON: Mapping[str, Parameter] = {
    parameter.name: parameter
    for parameter in (
        integers("seqlen", "Sequence length T."),
        integers("batch", "Batch size B."),
        choices("dtype", "Type of the inputs.", DTYPES),
        choices("pass", "What is timed; infer is a forward without gradients.", PASSES),
    )
}
# The seed of the inputs, which no sweep needs to give: it is then 0.
SEED = integers("seed", "Seed of the inputs, from 1; 0 if it is not given.")
# Not a parameter itself: it sets the parameters that every op publishes for a model of this width.
WIDTH = integers("width", "Model width: sets every op's published parameters for it.")


def read_mib(text: str) -> int:
    """An amount of memory as `40GiB` or `500MiB`, in MiB. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,10}(?:\.\d{1,3})?)\s*(GiB|MiB)", text.strip(), re.IGNORECASE)
    mib = round(float(found[1]) * (1024 if found[2].lower() == "gib" else 1)) if found else 0
    if mib < 1:
        raise ValueError(f"'{text}' is no amount of memory, such as 40GiB or 500MiB")
    return mib
