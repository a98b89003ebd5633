"""Output of commands: results to stdout, messages and progress bars to stderr, colours on terminals only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from oallama.core.codec import finite
from oallama.core.errors import UsageError
from oallama.core.files import unwritten, write_whole

if TYPE_CHECKING:
    from oallama.bench.ab import ProgressCallback
    from oallama.report.table import Table


def emit(text: str) -> None:
    """Write a result to stdout, with a line end where it has none."""
    click.echo(text, nl=not text.endswith("\n"))


def emit_json(document: Any) -> None:
    """Write exactly one JSON document to stdout."""
    emit(json_text(document))


def json_text(document: Any) -> str:
    """JSON in ASCII, so that no name in it can steer a terminal. NaN and infinities, which JSON lacks, become null."""
    return json.dumps(finite(document), indent=1, allow_nan=False) + "\n"


def talk(message: str) -> None:
    """A sentence for people, on stderr; once its terminal has been closed, to nobody."""
    try:
        click.echo(message, err=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        drop(sys.stderr)


def drop(stream: IO[str]) -> None:
    """Drop what a stream has not taken and what is written to it from now on, which could fail or hang the
    interpreter's end."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show(tables: Iterable[Table]) -> None:
    """Write tables to stdout, in colour on a terminal."""
    from oallama.report.table import plain

    on_terminal = is_terminal(sys.stdout)
    emit("\n".join(plain(t, _table_style) if on_terminal else plain(t) for t in tables))


def _table_style(text: str, is_heading: bool) -> str:
    if is_heading:
        return styled(text, bold=True)
    return styled(text, fg="green", bold=True) if text == "GPU" else text


def styled(text: str, **style: Any) -> str:
    """`text` in a style of click.style, unless NO_COLOR forbids it; click.echo takes it off again in pipes."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def is_terminal(stream: IO[str] | None) -> bool:
    """True where a person sees what is written to `stream`."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def write_piece(piece: str, clean: bool) -> None:
    """Write a piece of an answer to stdout at once. clean: escape what would steer a terminal."""
    from oallama.report.text import printable

    click.echo("\n".join(printable(line) for line in piece.split("\n")) if clean else piece, nl=False)
    sys.stdout.flush()


def write_file(path: str, text: str) -> None:
    """Write a file whole or not at all; `-` is stdout. Raises UsageError where it cannot be written."""
    if path == "-":
        emit(text)
    else:
        _write(path, text.encode())


def _write(path: str, content: bytes) -> None:
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            target.write_bytes(content)
        else:
            write_whole(target, content)
    except OSError as error:
        raise unwritten(UsageError, path, error) from None


def check_result(path: str | None) -> None:
    """Raise UsageError where a result cannot be written, as its folder is missing; None: to stdout."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")


def deliver(text: str, path: str | None) -> None:
    """Write a result to stdout, or to the file that -o names, and say so."""
    if path is None:
        emit(text)
    else:
        write_file(path, text)
        talk(f"wrote {path}")


def write_chart(path: str, svg: str) -> None:
    """Write a picture. Raises UsageError where that cannot be done."""
    _write(path, svg.encode())
    talk(f"wrote {path}")


#
# progress bars
#


PREPARING = "{elapsed} {desc}"
TURNS = "{percentage:3.0f}%|{bar:20}| turn {n_fmt} of {total_fmt}, {elapsed}: {desc}"
TIME = "measuring {percentage:3.0f}%|{bar:20}| {elapsed}, at most {total_fmt} s: {desc}"


def _quiet(doing: str, done: int = 0, expect: int = 0) -> None:
    """Show nothing."""


@contextlib.contextmanager
def turn_bar(wanted: bool | None) -> Iterator[ProgressCallback]:
    """Show turns on stderr where wanted, or where that is a terminal and nobody said. Before the number of turns is
    known there are words alone; then it is the total, whatever is measured again."""
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield _quiet
        return
    with _bar(0, PREPARING) as bar:

        def show(doing: str, done: int = 0, expect: int = 0) -> None:
            if expect:
                bar.total, bar.n, bar.bar_format = expect, 0, TURNS
            _redraw(bar, doing, bar.n + done)

        yield show


@contextlib.contextmanager
def time_bar(total_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[ProgressCallback]:
    """Show the time that has passed, where stderr is a terminal. The bar never gets longer, whatever is measured
    again."""
    if not is_terminal(sys.stderr):
        yield _quiet
        return
    start_s = clock()
    with _bar(round(total_s), TIME) as bar:
        yield lambda doing, done=0, expect=0: _redraw(bar, doing, int(clock() - start_s))


def _bar(total: int, form: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, bar_format=form, leave=False, file=sys.stderr, dynamic_ncols=True)


def _redraw(bar: Any, doing: str, n: int) -> None:
    if doing:
        bar.set_description_str(doing, refresh=False)
    bar.n = min(n, bar.total)
    bar.refresh()
