"""Signals that ask a command to end: SIGTERM, and SIGHUP where its terminal is closed. They are taken for Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType

_came: list[int] = []

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def take_for_interrupt() -> None:
    """From now on what is measured is kept, files are whole and workers end at these signals too; a SIGHUP that is
    ignored, as under nohup, stays so."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end_as_interrupted)
    signal.signal(signal.SIGTERM, end_as_interrupted)


def end_as_interrupted(number: int, _frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, now or where native code lets it."""
    _came.append(number)
    if not callable(signal.getsignal(signal.SIGINT)):  # a shell starts what is in the background without it
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # an event loop hears of it in no other way


def be_over() -> None:
    """From now on they change nothing: the exit code stands, and CPython, which gives up its handlers as it ends,
    would end by the signal."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def asked_to_end() -> bool:
    """Whether one of them came: unlike a Ctrl-C, it is meant for all of the command."""
    return bool(_came)
