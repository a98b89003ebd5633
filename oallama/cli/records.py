"""Options as fields of records: how a record declares them, and how a command gets it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import field, fields
from functools import partial, wraps
from typing import Any

import click

from oallama.cli.help import option

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


def parsed(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A click type that calls `parse`; the message of its ValueError is shown."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def count(least: int, most: int = 2**31 - 1) -> Callable[[Any], Any]:
    """A click type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*-?[0-9]{1,10}\s*", text) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parsed(parse)


def counts(least: int, most: int = 2**31 - 1) -> Callable[[Any], Any]:
    """A click type: different whole numbers from `least` to `most`, between commas."""
    number = count(least, most)
    return parsed(lambda text: tuple(dict.fromkeys(number(part) for part in text.split(","))))


def number(least: float, most: float) -> Callable[[Any], Any]:
    """A click type: a number from `least` to `most`; unlike click's FloatRange it refuses NaN."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most:
                return value
        raise ValueError(f"{text!r} is not a number from {least:g} to {most:g}")

    return parsed(parse)


_DECLARED = "option"  # in the metadata of a record's field


def option_field(*names: str, default: Any = None, **settings: Any) -> Any:
    """Return a field of a record that an option of the command line sets. names: of the option; default: of both,
    shown in the help."""
    settings = {"default": default, "show_default": bool(default), **settings}
    return field(default=default, metadata={_DECLARED: partial(option, *names, **settings)})


def declared_options(record: type, *names: str) -> list[Decorator]:
    """Return the options that fields of a record declare. names: of the fields; default: all."""
    chosen = [each for each in fields(record) if _DECLARED in each.metadata and (not names or each.name in names)]
    return [each.metadata[_DECLARED](each.name) for each in chosen]


def named_options(*decorators: Decorator) -> dict[str, click.Option]:
    """Return the options that decorators add to a command, by the names of its parameters."""
    command: Any = click.Command(None)
    for decorate in decorators:
        decorate(command)
    return {option.name: option for option in command.params}


def as_record(name: str, record: type, *options: Decorator, make: Callable[..., Any] | None = None) -> Decorator:
    """Add these options, by default those that the record's fields declare; the command gets them as `name`, a record
    of this type with all parameters named like its fields. make: called instead of the type."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def with_record(*args: Any, **values: Any) -> Any:
            own = {field.name: values.pop(field.name) for field in fields(record) if field.name in values}
            return function(*args, **{name: (make or record)(**own)}, **values)

        decorated: Function = with_record
        for decorate_with in reversed(options or declared_options(record)):
            decorated = decorate_with(decorated)
        return decorated

    return decorate
