"""Ctrl-C, SIGTERM and SIGHUP at random moments: the exit code, one sentence, no process and no half-written file."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.faults import COMMANDS, Place, handles
from seeds import SEED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process handles")

not_under_nohup = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored")

LONGEST_S = {"profile": 2.0, "plan": 1.0, "run": 1.0, "bench": 3.0, "chat": 1.0, "serve": 2.0, "tune": 3.0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=not_under_nohup)])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_ends_a_command(name: str, number: signal.Signals, place: Place) -> None:
    """One moment of each command and signal, another each day. SIGTERM and SIGHUP come twice, as `timeout` and a shell
    whose terminal is closed send them."""
    seed = f"{name} {number} {SEED or time.strftime('%Y-%m-%d')}"
    print("seed:", seed)
    moments = random.Random(seed)
    started = place.start(name)
    started.until_ready()
    time.sleep(moments.random() * LONGEST_S.get(name, 1.0))
    started.signal(number)
    if number != signal.SIGINT:
        time.sleep(moments.random() * 0.002)
        started.signal(number)
    code, said = started.must_end(0, 143 if number == signal.SIGTERM else 130)
    assert not code or said.splitlines()[-1] == "oallama: interrupted"
    assert said.count("oallama: interrupted") <= 1, said
    place.must_hold_whole_files()
    place.must_hold_nothing_temporary()


@pytest.mark.parametrize(
    ("name", "arguments"), [("click", ["oallama"]), ("selectors", ["oallama.serve.launch", "true"])]
)
def test_ctrl_c_before_a_program_can_handle_it_ends_it_without_a_word(
    name: str, arguments: list[str], place: Place
) -> None:
    (place.folder / f"{name}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    command, environment = [sys.executable, "-m", *arguments], {**os.environ, "PYTHONPATH": str(place.folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_modules_are_imported_is_130(place: Place) -> None:
    """CPython would end the process by SIGINT, whatever its exit code, for one that left an exec of text."""
    code = (
        "import sys; from oallama.cli import main\n"
        "main.cli.main = lambda **_: exec('raise KeyboardInterrupt')\n"
        "main.main(['devices'])\n"
    )
    (place.folder / "interrupted.py").write_text(code)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "oallama: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_ends_changes_nothing(number: signal.Signals, place: Place) -> None:
    """CPython has given up its handlers there, and would end by the signal whatever its exit code."""
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(libc.getchar, None, None)  # behind the interpreter's end: waits until stdin is closed\n"
        "from oallama.cli import main\n"
        "main.main(['--version'])\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=place.folder) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().startswith(b"oallama ")
        while handles(process.pid, number):
            time.sleep(0.01)
        process.send_signal(number)
        process.stdin.close()
    assert process.returncode == 0


def test_ctrl_c_ends_a_command_whose_stderr_nobody_reads(place: Place) -> None:
    """It is answered there, so it may take another one."""
    code = (
        "import click; from oallama.cli import main\n"
        "main.cli.main = lambda **_: click.echo('x' * 10**6, err=True)\n"
        "main.main(['devices'])\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=place.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read(1)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        process.kill()
    assert process.returncode == 130


def test_an_interrupt_that_nobody_can_be_told_of_is_130(place: Place) -> None:
    code = (
        "from oallama.cli import main\n"
        "main.cli.main = lambda **_: exec('raise KeyboardInterrupt')\n"
        "main.main(['devices'])\n"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=place.folder, stderr=full, timeout=60)
    assert done.returncode == 130
