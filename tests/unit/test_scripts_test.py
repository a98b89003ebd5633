"""scripts/test with stand-ins for what it calls: every test is run once, and what fails beside the others is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S, must_end, until

ROOT = Path(__file__).parents[2]
BIN = ("python", "ruff", "mypy", "clang-format", "oallama")
STAND_IN = """#!/bin/bash
echo "${0##*/} $*" >> calls
case "$*" in
    *allowed_cpus*) exit $ONE_CORE ;;
    *--ignore=*) echo others; eval "$OTHERS" ;;
    *test_split_native*) echo beside; eval "$BESIDE" ;;
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


def start(tree: Path, *arguments: str, one_core: bool = False, others: str = "true", beside: str = "true"):
    told = {"ONE_CORE": str(int(one_core)), "OTHERS": others, "BESIDE": beside}
    return subprocess.Popen(
        [tree / "scripts/test", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **told},
    )  # fmt: skip


def run(tree: Path, *arguments: str, **options) -> tuple[int, str]:
    process = start(tree, *arguments, **options)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def pytests(tree: Path) -> list[list[str]]:
    calls = [line.split() for line in (tree / "calls").read_text(encoding="utf-8").splitlines()]
    return [call[3:] for call in calls if call[:3] == ["python", "-m", "pytest"]]


@pytest.mark.parametrize("one_core", [False, True])
def test_what_runs_beside_the_others_is_what_they_leave_out(tree: Path, one_core: bool) -> None:
    code, said = run(tree, one_core=one_core)
    assert code == 0 and "all passed" in said and said.index("others") < said.index("beside")
    beside, others = sorted(pytests(tree), key=lambda call: any("--ignore" in word for word in call))
    ran = {word for word in beside if word.startswith("tests/")}
    assert ran == {word.partition("=")[2] for word in others if word.startswith("--ignore=")}
    assert all((ROOT / path).exists() for path in ran) and not any(word.startswith("tests") for word in others)


@pytest.mark.parametrize("one_core", [False, True])
def test_a_failure_on_either_side_fails_the_whole(tree: Path, one_core: bool) -> None:
    code, said = run(tree, one_core=one_core, beside="exit 1")
    assert code == 1 and "failed: pytest of what times nothing" in said and "pytest: passed" in said
    code, said = run(tree, one_core=one_core, others="exit 1")
    assert code == 1 and "failed: pytest\n" in said and "what times nothing: passed" in said


def test_arguments_go_to_pytest_alone(tree: Path) -> None:
    assert run(tree, "-k", "x")[0] == 0
    (call,) = pytests(tree)
    assert call[-2:] == ["-k", "x"]


@pytest.mark.parametrize("slow", [False, True])
def test_what_runs_ends_with_the_script(slow: bool, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slow: the script has not noted yet what it started."""
    if slow:
        (tree / "slowly").write_text("set -T; trap 'case $BASH_COMMAND in beside=*) sleep 2 ;; esac' DEBUG\n")
        monkeypatch.setenv("BASH_ENV", str(tree / "slowly"))
    process = start(tree, others="echo $$ > others; exec sleep 600", beside="echo $$ > beside; sleep 600")
    started = [tree / "beside", *([] if slow else [tree / "others"])]
    until(lambda: all(each.exists() and each.read_text() for each in started))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE_S)
    must_end(*(int(each.read_text()) for each in started))
    assert "kill:" not in said
