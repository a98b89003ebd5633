"""Early ends of a command: SIGTERM, and SIGHUP where its terminal is closed, handled like Ctrl-C; and key presses."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from types import FrameType

from oallama.cli.output import is_terminal
from oallama.device.interrupt import held_interrupt

AGAIN_S = 1.0  # `timeout`, and a shell whose terminal is closed, send a signal twice at once

_came: list[tuple[float, int]] = []  # time.monotonic() and number of SIGTERM and SIGHUP

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def treat_as_ctrl_c() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that measurements are stored, files complete and workers ended. An ignored
    SIGHUP, as under nohup, stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    elif signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt_where_asked)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end_as_interrupted)
    signal.signal(signal.SIGTERM, end_as_interrupted)


def end_as_interrupted(number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, now or when native code returns. Ignore a repeated signal for one second."""
    now = time.monotonic()
    if _came and now - _came[-1][0] < AGAIN_S:
        return
    _came.append((now, number))
    if not callable(signal.getsignal(signal.SIGINT)):  # before a command starts, or after it has stored everything
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # event loops and deferred interrupts get it only this way


def _interrupt_where_asked(_number: int, _frame: FrameType | None) -> None:
    """Ignore the terminal's Ctrl-C in a command that a shell has started in the background."""
    if asked_to_end():
        raise KeyboardInterrupt


def ignore_signals() -> None:
    """Ignore signals from now on, so that the exit code stays: CPython drops its handlers at exit, and a signal would
    then end the process."""
    try:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:  # on the way
        ignore_signals()


def asked_to_end() -> bool:
    """Whether SIGTERM or SIGHUP came, which end the whole command, unlike a Ctrl-C."""
    return bool(_came)


def interrupted_code() -> int:
    """Return the exit code of an interrupted command: 143 if SIGTERM came first, else 130."""
    return 143 if _came and _came[0][1] == signal.SIGTERM else 130


def is_interactive() -> bool:
    """Whether a person sees the output and can type: all three streams are a terminal with this command in its
    foreground."""
    if not all(is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return False
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


@contextlib.contextmanager
def ended_by_key() -> Iterator[None]:
    """Interrupt the block, as Ctrl-C does, at the first key, which stays unread for the terminal's next reader. Call it
    in the main thread, if is_interactive."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    over, tell = os.pipe()  # readable once the block has ended
    thread = threading.Thread(target=_interrupt_at_key, args=(terminal, over), daemon=True)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        thread.start()
        yield
    finally:
        with held_interrupt():
            os.close(tell)
            if thread.ident is not None:
                thread.join()
            os.close(over)
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _interrupt_at_key(terminal: int, over: int) -> None:
    ready, _, _ = select.select([terminal, over], [], [])
    if over not in ready:
        # by a signal, which also ends a wait of the main thread
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
