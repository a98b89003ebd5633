"""Output of commands: results to stdout, messages and progress bars to stderr, colours on terminals only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from oallama.core.codec import jsonable
from oallama.core.errors import UsageError
from oallama.core.files import unwritten, write_whole
from oallama.core.ticking import ticking

if TYPE_CHECKING:
    from oallama.bench.ab import ProgressCallback
    from oallama.report.table import Table
    from oallama.run.answer import Generation, Stream


def emit(text: str) -> None:
    """Write a result to stdout, with a final line end."""
    click.echo(text, nl=not text.endswith("\n"))


def wrapped(text: str) -> str:
    """Wrap text to the width of reports, without breaks inside words."""
    from oallama.report.table import in_lines

    return "\n".join(in_lines(text))


def emit_json(document: Any) -> None:
    """Write exactly one JSON document to stdout."""
    emit(json_text(document))


def json_text(document: Any) -> str:
    """Return JSON in ASCII, so that names cannot control the terminal. NaN and infinities become null."""
    return json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n"


def log(message: str) -> None:
    """Print a message on stderr, with control characters escaped; ignored once stderr is closed."""
    from oallama.report.text import printable

    _line.erase()
    try:
        click.echo("\n".join(printable(line, len(line)) for line in message.split("\n")), err=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        drop(sys.stderr)


def drop(stream: IO[str]) -> None:
    """Drop a stream's unwritten and future output, which could fail or hang the interpreter's exit."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show(tables: Iterable[Table]) -> None:
    """Write tables to stdout, in colour on a terminal."""
    emit(tables_text(tables, coloured=True))


def tables_text(tables: Iterable[Table], coloured: bool) -> str:
    """Return tables as text; coloured: if stdout is a terminal."""
    from oallama.report.table import plain

    coloured = coloured and is_terminal(sys.stdout)
    return "\n".join(plain(t, _table_style) if coloured else plain(t) for t in tables)


def _table_style(text: str, is_heading: bool) -> str:
    if is_heading:
        return styled(text, bold=True)
    return styled(text, fg="green", bold=True) if text == "GPU" else text


def styled(text: str, **style: Any) -> str:
    """Return `text` in a style of click.style, unless NO_COLOR is set; click.echo removes the style in pipes."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether `stream` is a terminal."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def write_piece(piece: str, clean: bool, dim: bool = False) -> None:
    """Write a piece of an answer to stdout at once. clean: escape control characters."""
    from oallama.report.text import printable

    shown = "\n".join(printable(line) for line in piece.split("\n")) if clean else piece
    click.echo(click.style(shown, dim=True) if dim else shown, nl=False)
    sys.stdout.flush()


def write_file(path: str, text: str) -> None:
    """Write a file atomically; `-` is stdout. Raises UsageError if it cannot be written."""
    if path == "-":
        emit(text)
        return
    target, content = Path(path), text.encode()
    try:
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            target.write_bytes(content)
        else:
            write_whole(target, content)
    except OSError as error:
        raise unwritten(UsageError, path, error) from None


def check_result(path: str | None) -> None:
    """Raise UsageError if the folder of a result is missing; None: to stdout."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: no folder {folder}")


def deliver(text: str, path: str | None) -> None:
    """Write a result to stdout, or to the file of -o, with a note."""
    if path is None:
        emit(text)
    else:
        write_file(path, text)
        log(f"wrote {path}")


#
# what is done meanwhile
#


TICK_S = 0.5
PATIENCE_S = 1.0  # before it is said what takes so long
LONGEST_DOING = 60  # characters


class _Line:
    """The status line on a terminal: the current work and its seconds; erased at the end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._doing: list[tuple[str, float]] = []  # the last one is shown
        self._shown = False

    @contextlib.contextmanager
    def saying(self, doing: str) -> Iterator[None]:
        with self._lock:
            self._doing.append((doing, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                self._doing.pop()
                self.erase()

    def rename(self, doing: str) -> None:
        """Change the text that is shown; "" hides it."""
        with self._lock:
            if self._doing:
                self._doing[-1] = doing, self._doing[-1][1]
                if not doing:
                    self.erase()

    def show(self) -> None:
        """Write the line, the cursor at its beginning; not over a progress bar, after which the seconds restart."""
        with self._lock:
            now, (doing, since_s) = time.monotonic(), self._doing[-1]
            tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # not there yet while another thread imports it
            if getattr(tqdm, "_instances", ()):
                self._doing[-1] = doing, now
                return
            if (took_s := now - since_s) < PATIENCE_S or not doing:
                return
            self._write(f"\r{doing}: {took_s:.0f} s\x1b[K\r")
            self._shown = True

    def erase(self) -> None:
        with self._lock:
            if self._shown:
                self._shown = False
                self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            sys.stderr.write(text)
            sys.stderr.flush()


_line = _Line()


@contextlib.contextmanager
def busy(doing: str) -> Iterator[None]:
    """Show a status line while the block runs, if stderr is a terminal and the block takes more than a second."""
    if not is_terminal(sys.stderr):
        yield
        return
    from oallama.report.text import printable

    with _line.saying(printable(doing, LONGEST_DOING)), ticking(TICK_S, _line.show):
        yield


def told_progress(n_read: int, n_tokens: int) -> None:
    """Show how much of a prompt was read."""
    _line.rename(f"reading the prompt, {n_read:,} of {n_tokens:,} tokens")


def write_thought(piece: str) -> None:
    """Write a model's reasoning on a terminal, apart from the answer."""
    _line.rename("")
    if is_terminal(sys.stdout):
        write_piece(piece, clean=True, dim=True)


def write_stream(stream: Stream, written: list[str]) -> Generation:
    """Write pieces of an answer to stdout as they come, and show a status line until the first one; on a terminal
    control characters are escaped. written: gets the pieces, also of an answer that is stopped."""
    clean = is_terminal(sys.stdout)
    try:
        with busy("reading the prompt"):
            first = list(itertools.islice(stream, 1))
        for piece in itertools.chain(first, stream):
            written.append(piece)
            write_piece(piece, clean)
    finally:
        click.echo()
    return stream.rest()


#
# progress bars
#


PREPARING = "{elapsed} {desc}"
TURNS = "{percentage:3.0f}%|{bar:20}| turn {n_fmt} of {total_fmt}, {elapsed}: {desc}"
TIME = "measuring {percentage:3.0f}%|{bar:20}| {elapsed} of about {total_fmt} s: {desc}"
OVERTIME = "measuring {elapsed}, longer than the expected {total_fmt} s: {desc}"


def _quiet(doing: str, done: int = 0, expect: int = 0) -> None:
    """Show nothing."""


@contextlib.contextmanager
def turn_bar(wanted: bool | None) -> Iterator[ProgressCallback]:
    """Show turns on stderr if wanted; by default, if it is a terminal. Shows words until the number of turns is known,
    which stays the total if turns are repeated."""
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield _quiet
        return
    with _bar(0, PREPARING) as bar, ticking(TICK_S, bar.refresh):

        def show(doing: str, done: int = 0, expect: int = 0) -> None:
            if expect:
                bar.total, bar.n, bar.bar_format = expect, 0, TURNS
            _redraw(bar, doing, bar.n + done)

        yield show


@contextlib.contextmanager
def time_bar(total_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[ProgressCallback]:
    """Show the elapsed time if stderr is a terminal, and whether it exceeds the expected time."""
    if not is_terminal(sys.stderr):
        yield _quiet
        return
    start_s = clock()
    with _bar(round(total_s), TIME) as bar:

        def show(doing: str = "", done: int = 0, expect: int = 0) -> None:
            took_s = int(clock() - start_s)
            bar.bar_format = TIME if took_s < bar.total else OVERTIME
            _redraw(bar, doing, took_s)

        with ticking(TICK_S, show):
            yield show


def _bar(total: int, form: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, bar_format=form, leave=False, file=sys.stderr, dynamic_ncols=True)


def _redraw(bar: Any, doing: str, n: int) -> None:
    if doing:
        bar.set_description_str(doing, refresh=False)
    bar.n = min(n, bar.total)
    bar.refresh()
