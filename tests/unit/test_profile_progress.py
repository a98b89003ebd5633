"""What a person sees while a profile is measured, and how the measuring process ends itself."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import time
from contextlib import suppress

import pytest

from oallama.profile.progress import Progress


def use(progress: Progress) -> None:
    with progress:
        progress.say("a note")
        progress.expect(10.0)
        progress.start("first")
        time.sleep(0.15)  # tqdm draws ten times a second
        progress.finish(5.0)
        progress.expect(10.0)  # a child crashed, and another one begins with what is left
        progress.start("second")
        progress.say("another note")
        time.sleep(0.15)
        progress.finish(10.0)


def test_a_terminal_gets_a_bar_and_notes_on_stderr_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        use(Progress(True))
    shown = ""
    with suppress(OSError), os.fdopen(master, "rb", buffering=0) as written:  # the end is an error
        while piece := written.read(1 << 16):
            shown += piece.decode()
    for text in ("a note", "another note", "first", "second", "timing", "33%", "100%", "left"):
        assert text in shown, shown
    assert capsys.readouterr().out == ""


def test_a_pipe_gets_the_notes_and_is_told_once_what_is_measured_why_and_how_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(Progress(True))
    captured = capsys.readouterr()
    note, why, other = captured.err.splitlines()
    assert (captured.out, note, other) == ("", "a note", "another note")
    for part in ("timing this machine", "about 10 s", "once"):
        assert part in why
    use(Progress(False))
    assert capsys.readouterr() == ("", "")
