"""End work at the first key that is typed on the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator

from oallama.cli.output import is_terminal
from oallama.device.interrupt import held_interrupt


def somebody_watches() -> bool:
    """Whether a person sees what is written and may type: all three streams are a terminal, and this command is in its
    foreground."""
    if not all(is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return False
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


@contextlib.contextmanager
def ended_by_key() -> Iterator[None]:
    """Interrupt the block, as Ctrl-C does, at the first key, which is left for whoever reads the terminal next. To be
    called in the main thread, where somebody_watches."""
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
        # by a signal, which ends what the main thread may be waiting for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
