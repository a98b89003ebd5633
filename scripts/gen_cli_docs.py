#!/usr/bin/env python3
"""Write the list of commands in docs/cli.md from the command line itself.

usage: python scripts/gen_cli_docs.py [--check]      --check: change nothing, exit 1 where docs/cli.md is out of date
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection

import click
from generated_page import ROOT, escape, write_or_check

TARGET = ROOT / "docs" / "cli.md"

MARK = "<!-- made by scripts/gen_cli_docs.py; change the commands in oallama/cli/ and run it again -->\n"

SHARED_HEAD = "## Shared options\n\nThese mean the same in all commands that list them.\n"


def document() -> str:
    """The list."""
    sys.path.insert(0, str(ROOT))
    from oallama.cli.main import COMMANDS, cli

    commands = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}
    options = [option for command in commands.values() if command for option in options_of(command)]
    counts = Counter(row(option) for option in options)
    shared = {text for text, count in counts.items() if count > 1}
    sections = [section(name, command, shared) for name, command in commands.items() if command]
    once = list({row(option): option for option in options if row(option) in shared}.values())
    return "\n".join(["", *sections, SHARED_HEAD, *tables(once), ""])


def section(name: str, command: click.Command, shared: Collection[str]) -> str:
    """One command: usage, text, a table of its own options, and the names of the shared ones."""
    from oallama.cli.help import help_text

    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(["oallama", name, "[OPTIONS]", *(str(a.metavar) for a in arguments)])
    first, *others = paragraphs(help_text(command))
    lines = [f"## {name}", "", f"`{usage}`: {first}", *others, ""]
    options = options_of(command)
    if own := [row(option) for option in options if row(option) not in shared]:
        lines += ["| option | |", "|---|---|", *own, ""]
    if names := [spellings(option) for option in options if row(option) in shared]:
        lines += [f"[Shared options](#shared-options): {' · '.join(names)}.", ""]
    return "\n".join(lines)


def options_of(command: click.Command) -> list[click.Option]:
    """The options of a command, in the order of their groups."""
    from oallama.cli.help import grouped

    return [option for options in grouped(command.params).values() for option in options]


def tables(options: list[click.Option]) -> list[str]:
    """A table for each group of options."""
    from oallama.cli.help import grouped, heading

    groups = grouped(list(options))
    lines: list[str] = []
    for group, some in groups.items():
        lines += [f"| {heading(group, groups)} | |", "|---|---|", *map(row, some), ""]
    return lines


def row(option: click.Option) -> str:
    """The option's row of a table."""
    return f"| {spelling(option)} | {explanation(option)} |"


def paragraphs(text: str) -> list[str]:
    """click's help text as Markdown: a block marked by \\b is shown as it is, everything else is prose."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            lines += [f"    {line.strip()}" for line in paragraph.splitlines()[1:]]
        else:
            lines.append(escape(" ".join(paragraph.split())))
        lines.append("")
    return lines[:-1]


def spellings(option: click.Option) -> str:
    """`-m`, `--model`."""
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def spelling(option: click.Option) -> str:
    """`-m`, `--model` MODEL."""
    names = spellings(option)
    if option.is_flag:
        return names
    choices = option.type.choices if isinstance(option.type, click.Choice) and not option.metavar else None
    metavar = "|".join(str(choice) for choice in choices) if choices else option.metavar or option.type.name.upper()
    return f"{names} {escape(metavar)}"


def explanation(option: click.Option) -> str:
    """The help text with the default."""
    text = escape(" ".join((option.help or "").replace("\f", " ").split()))
    default = option.show_default if isinstance(option.show_default, str) else str(option.default)
    return f"{text} Default: {escape(default)}." if option.show_default else text


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, MARK, document()))
