"""Helpers of the scripts: the checkout's folder, TOML files as records, command lines, results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from oallama.core.codec import CodecError, from_json
from oallama.core.errors import OallamaError
from oallama.core.files import write_whole

ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")


class InputError(Exception):
    """A file, or what it says, cannot be used: one sentence."""


def record(cls: type[T], table: Any, where: str) -> T:
    """The dataclass of a table. Raises InputError for a key that is not known, is missing, or has the wrong type."""
    known = sorted(field.name for field in fields(cls))  # type: ignore[arg-type]
    for key in table if isinstance(table, Mapping) else ():
        if key not in known:
            raise InputError(f"{where}: unknown key {key}; choose from {', '.join(known)}")
    try:
        return from_json(cls, table, where)
    except CodecError as error:
        raise InputError(str(error)) from None


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose description is shown as it was written."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=description, formatter_class=raw)


def write_document(document: object, output: Path | str | None) -> None:
    """Write JSON into the file `output`, whole or not at all, or to stdout where that is None."""
    text = json.dumps(document, indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_whole(Path(output), text)


def guarded(program: str, job: Callable[[], int], interrupted: str = "nothing was written") -> int:
    """The exit status of `job`, or of the error that ended it, which is told: 2 for wrong input, 130 for Ctrl-C,
    SIGTERM and SIGHUP."""
    from oallama.cli.signals import take_for_interrupt

    take_for_interrupt()
    try:
        return job()
    except OallamaError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except (InputError, ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        return 130
