"""Command lines of experiments: parser, documents, and failures told in a sentence."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.inputs import InputError

GOES_ON = "the same command goes on from here"


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """With the description as it was written."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=description, formatter_class=raw)


def write_document(document: object, output: Path | str | None) -> None:
    """As JSON into the file `output`, whole or not at all, or to stdout where that is None."""
    from oallama.core.files import write_whole  # scripts/gpu_run begins without it

    text = json.dumps(document, indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_whole(Path(output), text)


def guarded(program: str, job: Callable[[], int], interrupted: str = GOES_ON) -> int:
    """The exit status of `job`, or of what it ran into, which is told: 2 for wrong input, 130 for Ctrl-C, SIGTERM and
    SIGHUP, so that what it has started ends with it."""
    from oallama.cli.signals import take_for_interrupt
    from oallama.core.errors import OallamaError

    take_for_interrupt()
    try:
        return job()
    except OallamaError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except (InputError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        return 130
