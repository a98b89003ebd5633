"""What the scripts of experiments have in common."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from experiments.child import ROOT, run_child
from interrupts import interrupted_at


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_experiment_that_is_told_to_end_ends_what_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import sys; from pathlib import Path; from experiments.child import run_child\n"
        "from experiments.command import guarded\n"
        "def job():\n"
        f"    run_child([sys.executable, '-c', {child!r}], None, Path({str(tmp_path / 'log')!r}))\n"
        "    return 0\n"
        "sys.exit(guarded('ab', job))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "ab: interrupted; the same command goes on from here\n")
    assert not psutil.pid_exists(int(started.read_text()))


def test_a_ctrl_c_at_any_moment_of_a_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while Popen waits for the child to begin, which has no name yet by which it could be ended."""

    def run() -> None:
        run_child(["sleep", "0.2"], None, tmp_path / "log")

    for name in set(os.environ) - {"PATH"}:  # each is a moment or more
        monkeypatch.delenv(name)
    us, moment = psutil.Process(), 0
    before = us.children()
    run()
    while interrupted_at(moment := moment + 1, run):
        assert us.children() == before, f"left behind at moment {moment}"
    assert moment > 100
