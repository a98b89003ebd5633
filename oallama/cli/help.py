"""Help on one screen: the common options, in groups. `--help-all` shows the rest.

The definition of an option sets its group, and whether it is advanced. The help text of an option or of a command may
continue after a form feed. That part, and advanced options, are only in `--help-all` and docs/cli.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from typing import Any

import click


class Group(Enum):
    """Headings of options, in the order in which help shows them."""

    MODEL = "Model"
    PROMPT = "Prompt and answer"
    SAMPLING = "Sampling"
    COMPARED = "Comparison"
    TIMED = "Tests"
    SERVER = "Server"
    WORKLOAD = "Workload"
    DEVICE = "Device and memory"
    PLACEMENT = "Placement"
    OUTPUT = "Output"


FURTHER = "\f"
"""Ends the part of a help text that --help shows; --help-all shows all of it."""

_NAMES_WIDTH = 28  # width of the column of options; longer options have their own line
_ALL = "oallama.cli.help.all"
_PASSED = "oallama.passed"


class Option(click.Option):
    """An option of a group. advanced: shown by --help-all alone."""

    def __init__(self, *names: Any, group: Group = Group.OUTPUT, advanced: bool = False, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group, self.advanced = group, advanced

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return click's extra parts, with a default in words unchanged."""
        extra = super().get_help_extra(ctx)
        return {**extra, "default": self.show_default} if isinstance(self.show_default, str) else extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and text; without --help-all two names and the first part of the text."""
        if (record := super().get_help_record(ctx)) is None:
            return None
        names, text = record
        tail = text.removeprefix(self.help or "")  # the default
        before, _, behind = (self.help or "").partition(FURTHER)
        if ctx.meta.get(_ALL):
            return names, f"{before} {behind}".strip() + tail
        *first, last = names.split(", ")
        if len(first) > 1:
            names = ", ".join(first[:2]) + "".join(last.partition(" ")[1:])
        return names, before.rstrip() + tail


class Command(click.Command):
    """A command with --help and --help-all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _help_all]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not ctx.meta.get(_ALL):
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(help_text(self))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = bool(ctx.meta.get(_ALL))
        records: dict[Group, list[tuple[str, str]]] = {}
        for group, options in grouped(self.get_params(ctx)).items():
            shown = [option for option in options if everything or not is_advanced(option)]
            records[group] = [record for option in shown if (record := option.get_help_record(ctx)) is not None]
        names = [name for rows in records.values() for name, _ in rows if len(name) <= _NAMES_WIDTH]
        width = max(map(len, names), default=0)
        for group, rows in records.items():
            if rows:
                with formatter.section(heading(group, records)):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


class ServerCommand(Command):
    """A command that passes the arguments after `--` to llama-server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from oallama.run.server_options import checked_options

        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_PASSED] = checked_options(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- LLAMA_SERVER_OPTIONS]"]


def passed_options() -> tuple[str, ...]:
    """Return the options behind `--` of the command line."""
    passed: tuple[str, ...] = click.get_current_context().meta.get(_PASSED, ())
    return passed


def help_text(command: click.Command) -> str:
    """Return the whole help text of a command."""
    import inspect

    return inspect.cleandoc(command.help or "").replace(FURTHER, "")


def grouped(parameters: list[click.Parameter]) -> dict[Group, list[click.Option]]:
    """Return options by group, in the groups' order. Options without a group, e.g. --help, are in the last group."""
    groups: dict[Group, list[click.Option]] = {group: [] for group in Group}
    for parameter in parameters:
        if isinstance(parameter, click.Option):
            groups[getattr(parameter, "group", Group.OUTPUT)].append(parameter)
    return {group: options for group, options in groups.items() if options}


def heading(group: Group, groups: Collection[Group]) -> str:
    """Return a group's heading; "Options" for the only group."""
    return group.value if len(groups) > 1 else "Options"


def is_advanced(option: click.Option) -> bool:
    return bool(getattr(option, "advanced", False))


def _show_all(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_help_all = Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show every option."
)

option: Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]] = partial(click.option, cls=Option)
"""click.option for an Option, which takes `group` and `advanced`."""
