"""Settings of a chat: options of `oallama chat` that /set changes during a session."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import click

from oallama.cli.help import FURTHER, option
from oallama.cli.records import declared_options, named_options
from oallama.cli.sampling import AnswerOptions, SamplingOptions, length_option
from oallama.core.errors import UsageError
from oallama.core.text import suggestion
from oallama.run.answer import WITHOUT_END
from oallama.run.sampling import Sampling

SAMPLED = {each.name for each in fields(Sampling)}
CONSTRAINTS = {"grammar", "json_schema"}  # which exclude each other
REMOVABLE = {"system", "stop", *CONSTRAINTS}  # by `none`

verbose_option = option("--verbose", is_flag=True, help="Show tokens/s after each answer.\f Also the predicted speed.")

CHANGEABLE = named_options(
    *declared_options(SamplingOptions, "stop", *SAMPLED),
    length_option,
    *declared_options(AnswerOptions, "system"),
    verbose_option,
)
MEANINGS = {name: (option.help or "").partition(FURTHER)[0] for name, option in CHANGEABLE.items()}
NAMES = {word.lstrip("-").replace("-", "_"): name for name, option in CHANGEABLE.items() for word in option.opts}
"""Other names of settings: the spellings of their options, as in `/set temp 0`."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of a session. n_gen: tokens of an answer at most; verbose: show tokens/s after each answer."""

    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    n_gen: int = WITHOUT_END
    verbose: bool = False

    def arguments(self, n_retries: int = 0) -> dict[str, Any]:
        """Keywords of Engine.stream. n_retries: each retry changes the seed."""
        drawn = asdict(self.sampling)
        return {**drawn, "seed": (drawn["seed"] + n_retries) % 2**32, "stop": self.stop}

    def shown(self, name: str) -> str:
        """Return the value of a setting other than the system prompt."""
        value = (asdict(self) | asdict(self.sampling))[name]
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, float):
            return f"{value:g}"
        return "none" if value in (None, ()) else " ".join(map(repr, value)) if name == "stop" else str(value)

    def changed(self, name: str, text: str) -> ChatSettings:
        """Return the settings with a new value. Raises UsageError."""
        value = parsed_setting(name, text)
        if name == "stop":
            value = () if value is None else (*self.stop, value)
        if name not in SAMPLED:
            return replace(self, **{name: value})
        values: dict[str, Any] = dict.fromkeys(CONSTRAINTS) if name in CONSTRAINTS else {}
        return replace(self, sampling=replace(self.sampling, **values | {name: value}))


def setting_named(word: str) -> str:
    """Return the name of a setting from any of its names. Raises UsageError for an unknown one."""
    name = NAMES.get(word, word)
    if name not in CHANGEABLE:
        raise UsageError(f"unknown setting {word}; {suggestion(word, MEANINGS, '/set lists them')}")
    return name


def parsed_setting(name: str, text: str) -> Any:
    """Return a value as the command line reads it; None if it is removed. Raises UsageError."""
    if text in ("", "none") and name in REMOVABLE:
        return None
    option = CHANGEABLE[name]
    try:
        return option.type.convert(text or "on" if name == "verbose" else text, option, None)
    except click.BadParameter as error:
        raise UsageError(f"{name}: {error.message.rstrip('.')}") from None
