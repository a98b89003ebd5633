"""Signals that ask a command to end: SIGTERM, and SIGHUP where its terminal is closed. They are taken for Ctrl-C."""

from __future__ import annotations

import signal
import time
from types import FrameType

AGAIN_S = 1.0  # `timeout`, and a shell whose terminal is closed, send a signal twice at once

_came_at: list[float] = []  # of time.monotonic()
_numbers: list[int] = []

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def take_for_interrupt() -> None:
    """From now on what is measured is kept, files are whole and workers end at these signals too; a SIGHUP that is
    ignored, as under nohup, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    elif signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt_where_asked)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end_as_interrupted)
    signal.signal(signal.SIGTERM, end_as_interrupted)


def end_as_interrupted(number: int, _frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, now or where native code lets it; once for signals that come together."""
    now = time.monotonic()
    if _came_at and now - _came_at[-1] < AGAIN_S:
        return
    _came_at.append(now)
    _numbers.append(number)
    if not callable(signal.getsignal(signal.SIGINT)):  # nothing is to be kept any more, or not taken yet
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # an event loop, and who holds an interrupt, hear of it in no other way


def _interrupt_where_asked(_number: int, _frame: FrameType | None) -> None:
    """Of a command that a shell has started in the background, the terminal's Ctrl-C is not for it."""
    if asked_to_end():
        raise KeyboardInterrupt


def be_over() -> None:
    """From now on they change nothing: the exit code stands, and CPython, which gives up its handlers as it ends,
    would end by the signal."""
    try:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:  # on the way
        be_over()


def asked_to_end() -> bool:
    """Whether one of them came: unlike a Ctrl-C, it is meant for all of the command."""
    return bool(_came_at)


def interrupted_code() -> int:
    """Return the exit code of a command that was interrupted: 143 where SIGTERM was the first to ask it, else 130."""
    return 143 if _numbers[:1] == [signal.SIGTERM] else 130
