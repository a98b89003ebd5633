"""scripts/test with stand-ins for what it calls: every test is run once, and what fails is told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S, must_end, until

ROOT = Path(__file__).parents[2]
BIN = ("python", "ruff", "mypy", "clang-format", "oallama")
STAND_IN = """#!/bin/bash
echo "${0##*/} ${OALLAMA_TEST_ALL:-} $*" >> calls
case "$*" in
    *"not timed"*) echo untimed; eval "$UNTIMED" ;;
    *"-m timed"*) echo timed; eval "$TIMED" ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of scripts/test alone."""
    for folder in ("scripts", ".venv/bin", "ggml_bridge", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test", tmp_path / "scripts/test")
    (tmp_path / "scripts/setup_env.py").touch()
    for name in BIN:
        made = tmp_path / ".venv/bin" / name
        made.write_text(STAND_IN, encoding="utf-8")
        made.chmod(0o755)
    return tmp_path


def start(tree: Path, *arguments: str, untimed: str = "true", timed: str = "true"):
    return subprocess.Popen(
        [tree / "scripts/test", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "UNTIMED": untimed, "TIMED": timed, "OALLAMA_TEST_ALL": ""},
    )  # fmt: skip


def run(tree: Path, *arguments: str, **options) -> tuple[int, str]:
    process = start(tree, *arguments, **options)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def pytests(tree: Path) -> list[list[str]]:
    """OALLAMA_TEST_ALL and the arguments of each pytest."""
    calls = [line.split(" ") for line in (tree / "calls").read_text(encoding="utf-8").splitlines()]
    return [[call[1], *call[4:]] for call in calls if call[0] == "python" and call[2:4] == ["-m", "pytest"]]


def test_each_test_is_run_once_and_what_times_something_alone(tree: Path) -> None:
    code, said = run(tree)
    assert code == 0 and "all passed" in said and said.index("untimed") < said.index("timed\n")
    untimed, timed = (" ".join(call) for call in pytests(tree))
    assert untimed.endswith("-m not timed") and timed.endswith("-m timed")
    assert "--numprocesses" in untimed and "--numprocesses" not in timed


def test_all_tests_everything(tree: Path) -> None:
    assert run(tree, "--all")[0] == 0
    assert {call[0] for call in pytests(tree)} == {"1"}
    assert "untested.py --all " in (tree / "calls").read_text(encoding="utf-8")  # so that a skipped test may fail it


@pytest.mark.parametrize("fails", ["untimed", "timed"])
def test_a_failure_on_either_side_fails_the_whole(fails: str, tree: Path) -> None:
    code, said = run(tree, **{fails: "exit 1"})
    assert code == 1 and re.search("^failed: pytest( of what times something)?$", said, re.MULTILINE)
    assert "mypy: passed" in said


def test_arguments_go_to_pytest_alone_and_mean_all_cases(tree: Path) -> None:
    assert run(tree, "-k", "x")[0] == 0
    (call,) = pytests(tree)
    assert call[0] == "1" and call[-2:] == ["-k", "x"]


def test_what_runs_ends_with_the_script(tree: Path) -> None:
    process = start(tree, untimed="echo $$ > child; exec sleep 600")
    until(lambda: (tree / "child").exists() and (tree / "child").read_text())
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE_S)
    must_end(int((tree / "child").read_text()))
    assert "kill:" not in said
