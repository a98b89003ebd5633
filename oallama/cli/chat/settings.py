"""Settings of a chat (/set): sampling, stops, length, JSON schema or grammar, figures after answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from oallama.cli.sampling import SamplingOptions, parse_seed
from oallama.core.errors import UsageError
from oallama.core.text import suggestion
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END, checked_stops
from oallama.run.sampling import Sampling

ANY_JSON = "{}"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of a session: how answers are generated and shown."""

    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    n: int = WITHOUT_END  # tokens of an answer at most
    verbose: bool = False  # tokens/s after each answer
    form: str = "text"  # description of the grammar

    def arguments(self, n_retries: int = 0) -> dict[str, Any]:
        """Keywords of Engine.stream. n_retries: each retry changes the seed."""
        drawn = asdict(self.sampling)
        return {**drawn, "seed": (drawn["seed"] + n_retries) % 2**32, "stop": self.stop}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value, meaning) of all settings."""
        drawn = {name: value for name, value in asdict(self.sampling).items() if name not in ("grammar", "json_schema")}
        values = {
            **{name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in drawn.items()},
            "stop": " ".join(map(repr, self.stop)) or "none",
            "n": str(self.n),
            "format": self.form,
            "verbose": "on" if self.verbose else "off",
        }
        return [(name, values[name], MEANINGS[name]) for name in values]


MEANINGS = {
    "temperature": "0: always the most likely token",
    "seed": "random seed; -1: a new one each time",
    "top_k": "sample from the N most likely tokens; 0: all",
    "top_p": "sample from the most likely tokens with this total probability; 1: all",
    "min_p": "drop tokens less likely than this share of the most likely; 0: off",
    "repeat_penalty": "penalty for repeating the last 64 tokens; 1: off",
    "stop": "stop sequence; repeat to add another, none removes all",
    "n": "maximum tokens of an answer; -1: until the model stops",
    "format": 'text, json, or a JSON schema such as {"type": "array"}',
    "grammar": "GBNF grammar that constrains the answer; none: off",
    "system": "system prompt; none removes it",
    "verbose": "on: show measured and predicted tokens/s after each answer",
}


def check_setting(name: str) -> None:
    """Raise UsageError for an unknown setting, with the most similar name."""
    if name not in MEANINGS:
        raise UsageError(f"unknown setting {name}; {suggestion(name, MEANINGS, '/set lists them')}")


def changed(settings: ChatSettings, name: str, text: str) -> ChatSettings:
    """Return the settings with a new value; `system` belongs to the conversation. Raises UsageError."""
    if name == "stop":
        stop = () if text in ("", "none") else (*settings.stop, text)
        checked_stops(stop)
        return replace(settings, stop=stop)
    if name == "n":
        return replace(settings, n=_number(name, text, int, WITHOUT_END))
    if name == "verbose":
        if text not in ("", "on", "off"):
            raise UsageError(f"verbose must be on or off, not {text}")
        return replace(settings, verbose=text != "off")
    if name == "format":
        return _with_format(settings, text)
    if name == "grammar":
        grammar = None if text in ("", "none") else text
        return _with_grammar(settings, grammar, None, "text" if grammar is None else "constrained by the grammar")
    if name == "seed":
        try:
            value: Any = parse_seed(text)
        except ValueError as error:
            raise UsageError(str(error)) from None
    else:
        value = _number(name, text, int if name == "top_k" else float)
    return replace(settings, sampling=replace(settings.sampling, **{name: value}))


def _with_format(settings: ChatSettings, text: str) -> ChatSettings:
    if text in ("", "text", "none"):
        return _with_grammar(settings, None, None, "text")
    if text == "json":
        return _with_grammar(settings, None, ANY_JSON, "json")
    if not text.startswith("{"):
        raise UsageError(f"unknown format {text}; choose text, json or a JSON schema in braces")
    return _with_grammar(settings, None, text, f"JSON of the schema {text}")


def _with_grammar(settings: ChatSettings, grammar: str | None, schema: str | None, form: str) -> ChatSettings:
    return replace(settings, sampling=replace(settings.sampling, grammar=grammar, json_schema=schema), form=form)


def _number(name: str, text: str, kind: Callable[[str], Any], least: float | None = None) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (least is not None and value < least):
        what = "a whole number" if kind is int else "a number"
        raise UsageError(
            f"{name} must be {what}{f', at least {least:g}' if least is not None else ''}, not {text or 'empty'}"
        )
    return value


def settings_of(sampling: SamplingOptions, n: int | None, chats: bool, verbose: bool) -> ChatSettings:
    """Return the command line's settings. chats: the model ends its answers. Raises UsageError."""
    drawn = sampling.sampling()
    form = (
        "text"
        if drawn.grammar is None and drawn.json_schema is None
        else "constrained by the grammar or schema of the command line"
    )
    most = (WITHOUT_END if chats else DEFAULT_TOKENS) if n is None else n
    return ChatSettings(drawn, sampling.stop, most, verbose, form)
