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
    from oallama.report.chart import Picture
    from oallama.report.table import Table


WRAP_AT = 18  # cells of text wrap at this width, in a narrow terminal


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
    """Write tables to stdout: in colour and fitted to the width on a terminal, plain otherwise."""
    if is_terminal(sys.stdout):
        _show_rich(tables)
        return
    from oallama.report.table import plain

    emit("\n".join(plain(t) for t in tables))


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


def write_chart(path: str, chart: Picture) -> None:
    """Write a chart as SVG. Raises UsageError where that cannot be done."""
    _write(path, chart.svg().encode())
    talk(f"wrote {path}")


def _show_rich(tables: Iterable[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    styles = {"GPU": "bold green", "ok": "green", "failed": "bold red"}
    console = Console(file=sys.stdout, highlight=False)
    terminal_width = console.width
    for t in tables:
        shown = RichTable(box=None, padding=(0, t.gap, 0, 0), pad_edge=False, header_style="bold underline")
        for index, column in enumerate(t.columns):
            longest = max(len(text) for text in (column.heading, *(row[index] for row in t.rows)))
            right = column.align == "right"
            shown.add_column(Text(column.heading), justify=column.align, no_wrap=right, min_width=min(longest, WRAP_AT))
        for row in t.rows:
            shown.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
        # in less, words and numbers would be cut; let the terminal wrap instead
        least = console.measure(shown, options=console.options.update(max_width=10_000)).minimum
        if t.title:
            console.print(Text(t.title, style="bold"))
        console.width = max(terminal_width, least)
        console.print(shown)
        console.width = terminal_width
        for sentence in t.footer:
            console.print(Text(sentence))
        console.print()


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
