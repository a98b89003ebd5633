"""SIGTERM and SIGHUP are taken for Ctrl-C, and a terminal that is gone is no failure."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from oallama.cli.output import talk

IN_A_LOOP = """
import asyncio, os, signal
from oallama.cli import signals
from oallama.cli.signals import asked_to_end, take_for_interrupt
signals.AGAIN_S = 0.0
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
take_for_interrupt()
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asked.set)
    before = asked_to_end()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(asked.wait(), 20)
    print(before, asked_to_end())
asyncio.run(main())
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print("interrupted")
"""

IGNORED = """
import os, signal
from oallama.cli.signals import asked_to_end, take_for_interrupt
signal.signal(signal.SIGHUP, signal.SIG_IGN)
take_for_interrupt()
os.kill(os.getpid(), signal.SIGHUP)
print(asked_to_end())
"""


TWICE = """
import os, signal
from oallama.cli import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signals.take_for_interrupt()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    signals.AGAIN_S = 1000.0
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    print("once")
signals.AGAIN_S = 0.0
try:
    os.kill(os.getpid(), signal.SIGHUP)
except KeyboardInterrupt:
    print("anew")
"""


IN_THE_BACKGROUND = """
import os, signal
from oallama.cli.signals import take_for_interrupt
from oallama.device.interrupt import held_interrupt
signal.signal(signal.SIGINT, signal.SIG_IGN)
take_for_interrupt()
os.kill(os.getpid(), signal.SIGINT)
try:
    with held_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        print("held")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (IN_A_LOOP, "False True\ninterrupted\n"),
        (IGNORED, "False\n"),
        (TWICE, "once\nanew\n"),
        (IN_THE_BACKGROUND, "held\ninterrupted\n"),
    ],
    ids=["in-a-loop", "ignored", "twice", "background"],
)
def test_signals_are_taken_for_ctrl_c_unless_they_are_ignored(code: str, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (says, "")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_terminal_that_is_gone_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, "no")

    with (tmp_path / "stderr").open("w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with monkeypatch.context() as gone:
            gone.setattr(click, "echo", fails)
            if number == errno.EIO:
                talk("nobody reads it")
            else:
                with pytest.raises(OSError, match="no"):
                    talk("a full disk")
        talk("afterwards")
    assert (tmp_path / "stderr").read_text() == ("" if number == errno.EIO else "afterwards\n")
