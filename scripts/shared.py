"""Helpers of the scripts: the checkout's folder, command lines, results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from oallama.core.errors import OallamaError
from oallama.core.files import write_whole

ROOT = Path(__file__).resolve().parents[1]


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
    from oallama.cli.signals import treat_as_ctrl_c

    treat_as_ctrl_c()
    try:
        return job()
    except OallamaError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        return 130
