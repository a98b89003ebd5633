"""The child runner: answers, errors, and every way a child can die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from native_helpers import RunHere
from processes import alive, must_end
from rpc_server import RpcServer

import ggml_bridge.child as child_module
from ggml_bridge.child import Child, ChildError
from ggml_bridge.errors import BridgeError, ChildDied, ChildTimeout, OutOfMemory

CASES = "child_cases"


def test_answers(run_here: RunHere) -> None:
    text = "naïve “text”\nin two lines " + "x" * 200_000
    answer = run_here(CASES, {"case": "echo", "text": text}, env={"CHILD_CASE": "set"})
    assert answer["echo"] == text
    assert answer["variable"] == "set"
    assert answer["pid"] != os.getpid()


@pytest.mark.parametrize("options", [child_module._SAFE_PATH, ("-c", child_module._WITHOUT_FOLDER)])
def test_nothing_of_the_working_directory_is_imported(
    run_here: RunHere, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second way is that of Python 3.10."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child_module, "_SAFE_PATH", options)
    assert run_here(CASES, {"case": "echo", "text": "in"})["echo"] == "in"
    with RpcServer(threads=1) as worker:
        assert worker.endpoint


def test_what_fails_while_a_child_prepares_is_left_to_its_handler(run_here: RunHere) -> None:
    assert run_here(CASES, {"case": "echo", "text": ""})["prepared"] == "yes"


def test_requests_that_wait_are_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    child = Child(CASES)
    for case in ({"case": "progress", "steps": 3}, {"case": "value error"}, {"case": "echo", "text": "last"}):
        child.send(case)
    time.sleep(0.5)  # so that all answers are there at once
    seen: list[dict[str, Any]] = []
    assert child.answer(seen.append) == {"steps": 3}
    assert len(seen) == 3
    with pytest.raises(ValueError, match="K must be positive"):
        child.answer()
    assert child.answer()["echo"] == "last"
    child.end()


def test_progress_arrives_in_order(run_here: RunHere) -> None:
    seen: list[dict[str, Any]] = []
    assert run_here(CASES, {"case": "progress", "steps": 500}, on_progress=seen.append) == {"steps": 500}
    assert [message["step"] for message in seen] == list(range(500))


@pytest.mark.parametrize(
    ("case", "number", "words"),
    [
        ("abort", signal.SIGABRT, "died by SIGABRT (an assertion in native code failed): GGML_ASSERT(false) failed"),
        ("segv", signal.SIGSEGV, "died by SIGSEGV (native code accessed memory that it does not own)"),
        ("chatter", signal.SIGKILL, "died by SIGKILL (killed from outside, perhaps for using too much memory)"),
    ],
)
def test_death_by_signal(run_here: RunHere, case: str, number: int, words: str) -> None:
    with pytest.raises(ChildDied) as died:
        run_here(CASES, {"case": case})
    assert died.value.signal == number
    assert died.value.exit_code is None
    assert words in str(died.value)
    assert "\n" not in str(died.value)
    assert len(died.value.stderr_tail) <= 8192


def test_exit_without_an_answer(run_here: RunHere) -> None:
    with pytest.raises(ChildDied) as died:
        run_here(CASES, {"case": "exit"})
    assert (died.value.signal, died.value.exit_code) == (None, 3)
    assert str(died.value) == "the child process child_cases died with exit code 3: noise on stderr"


def test_a_module_that_does_not_exist(run_here: RunHere) -> None:
    with pytest.raises(ChildDied, match="No module named no_such_module"):
        run_here("no_such_module", {})


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("value error", ValueError, "K must be positive"),
        ("out of memory", OutOfMemory, "not enough memory of type CUDA0"),
        ("other error", ChildError, "'unforeseen'"),
    ],
)
def test_errors_keep_their_type(run_here: RunHere, case: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        run_here(CASES, {"case": case})
    assert type(error.value) is kind
    assert str(error.value) == message
    if isinstance(error.value, ChildError):
        assert error.value.type_name == "KeyError"
        assert isinstance(error.value, BridgeError)


def test_timeout_ends_the_child(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Child] = []

    class Kept(Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(child_module, "Child", Kept)
    with pytest.raises(ChildTimeout, match=r"gave no answer within 1 s"):
        run_here(CASES, {"case": "hang"}, timeout_s=1.0)
    must_end(made[0].pid)


def test_a_child_ends_that_did_not_read_a_request_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    child = Child(CASES)
    child.send({"case": "hang"})

    def interrupt(*_: object) -> None:
        raise RuntimeError("interrupted")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(RuntimeError, match="interrupted"):
            while True:
                child.send({"case": "echo", "text": "x" * 4000})
        signal.setitimer(signal.ITIMER_REAL, 20.0)
        child.end(signal.SIGTERM)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert not alive(child.pid)


def test_a_loud_child_takes_requests_without_a_thread_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    n_threads = threading.active_count()
    child = Child(CASES)
    for _ in range(5):
        child.send({"case": "loud", "ignored": "x" * 200_000})  # more than its pipe holds
    for _ in range(5):
        assert child.answer() == {}
    assert threading.active_count() == n_threads
    child.end()
    assert not alive(child.pid)


def test_a_child_that_cannot_be_started_leaves_nothing_open() -> None:
    n_open = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(ValueError, match="null byte"):
        Child(CASES, {"NAME": "a\0b"})
    assert len(list(Path("/dev/fd").iterdir())) <= n_open


def test_an_error_in_on_progress_ends_the_child(run_here: RunHere) -> None:
    pids: list[int] = []

    def fail(message: dict[str, Any]) -> None:
        pids.append(message["pid"])
        raise RuntimeError("not shown")

    with pytest.raises(RuntimeError, match="not shown"):
        run_here(CASES, {"case": "hang"}, on_progress=fail)
    must_end(pids[0])


PARENT = textwrap.dedent(
    """
    from ggml_bridge.child import run_in_child
    try:
        run_in_child("child_cases", {"case": "hang"}, on_progress=lambda m: print(m["pid"], flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_child_ends_with_its_parent(number: signal.Signals) -> None:
    """Ctrl-C is passed on and raised again; a parent that is killed takes the child along."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(number)
        rest = parent.stdout.read()
    must_end(pid)
    assert rest == ("interrupted\n" if number == signal.SIGINT else "")
