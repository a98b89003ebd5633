"""Ctrl-C, wherever it comes: it ends a call, is never lost, and the engine can be used again and closed.

Where nothing but starting and ending counts, a stand-in for llama-server is started.
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from e2e.forced import Forced, attention, forced
from e2e.script import started
from interrupts import interrupted_often
from processes import PATIENCE_S, until
from seeds import ALL, FRESH

from oallama.core.errors import UsageError
from oallama.run.engine import FOLDER

STEP = 4700  # moments between two that are tried, of those of a start


def with_attention_on(device: str, model: Path) -> Forced:
    return forced(model, device, whole=None if device == "none" else attention)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines have their folders, which nobody else uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def nothing_is_left(folders: Path) -> bool:
    return not psutil.Process().children() and not list(folders.glob(f"{FOLDER}*"))


def test_a_ctrl_c_anywhere_in_a_call_leaves_the_engine_usable(f16: Path) -> None:
    """At each of several hundred moments, or a twentieth of them."""
    with forced(f16).engine() as engine:
        tokens = engine.tokenize("once upon")
        wanted = engine.generate(tokens, max_tokens=2, temperature=0).tokens

        def work() -> None:
            list(engine.stream(tokens, max_tokens=2, temperature=0))
            engine.generate(engine.tokenize("once"), max_tokens=2, temperature=0)
            engine.chat([{"role": "user", "content": "once"}], max_tokens=2)

        work()
        moment = 0
        for moment in interrupted_often(work, 1 if ALL else 40):
            assert engine.generate(tokens, max_tokens=2, temperature=0).tokens == wanted, f"moment {moment}"
    assert moment > 300


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
@pytest.mark.usefixtures("stub_server")
def test_a_ctrl_c_anywhere_in_starting_and_closing_leaves_nothing_behind(device: str, f16: Path, folders: Path) -> None:
    """No llama-server, worker or folder. Each moment costs a start."""
    case, moment = with_attention_on(device, f16), 0
    case.engine().close()
    for moment in interrupted_often(lambda: case.engine().close(), STEP // 20 if ALL else STEP):
        print("moment", moment)
        until(lambda: nothing_is_left(folders))
    assert moment > 2 * STEP
    with case.engine() as engine:
        assert engine.generate("once upon", max_tokens=2, temperature=0).n_gen == 2


@pytest.mark.usefixtures("stub_server")
def test_an_engine_can_be_closed_while_a_ctrl_c_ends_its_call(f16: Path, folders: Path) -> None:
    """As `with` does, while what was interrupted is still known."""
    case = forced(f16)
    engine = case.engine()
    n_closed = 0

    def work() -> None:
        nonlocal n_closed
        try:
            list(engine.stream("once upon", max_tokens=2, temperature=0))
        except KeyboardInterrupt:
            engine.close()
            n_closed += 1
            raise

    for _ in interrupted_often(work, 20 if ALL else 600):
        engine.close()
        assert nothing_is_left(folders)
        with pytest.raises(UsageError, match="this engine is closed"):
            engine.generate("once")
        engine = case.engine()
    engine.close()
    assert n_closed > 0


PROGRAM = """
n_times = int(words[0])
case = forced(model, device, whole=None if device == "none" else attention)
def work():
    with case.engine() as engine:
        for _ in engine.stream("once upon a time " * 8, max_tokens=3, temperature=1.5):
            pass
work()
for _ in range(n_times):
    try:
        print("ready", flush=True)
        while True:
            work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
left = time.monotonic() + 60
while psutil.Process().children() and time.monotonic() < left:
    time.sleep(0.01)
assert not psutil.Process().children()
"""


@pytest.mark.parametrize(
    ("device", "n_times", "longest_s"),
    [
        ("none", 60 if ALL else 5, 0.4),
        pytest.param("rpc-worker", 12, 1.5, marks=pytest.mark.thorough),
    ],
)
def test_a_ctrl_c_is_never_lost(
    f16: Path,
    device: str,
    n_times: int,
    longest_s: float,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """At many moments of starting, reading a prompt, answering and closing; a program then ends as if none had come.
    With llama-server itself where all is tested."""
    if not ALL:
        request.getfixturevalue("stub_server")
    monkeypatch.setenv("TMPDIR", str(folders))
    moments = random.Random(FRESH)
    with started(PROGRAM, f16, device, n_times) as process:
        assert process.stdout is not None and process.stderr is not None
        limit = threading.Timer(PATIENCE_S, process.kill)  # a lost one leaves it at work for ever
        limit.start()
        n_told = 0
        while process.stdout.readline() == "ready\n":
            time.sleep(moments.random() * longest_s)
            process.send_signal(signal.SIGINT)
            n_told += process.stdout.readline() == "interrupted\n"
        limit.cancel()
        said = process.stderr.read()
    assert (n_told, process.returncode, said) == (n_times, 0, "")
    assert not list(folders.glob(f"{FOLDER}*"))
