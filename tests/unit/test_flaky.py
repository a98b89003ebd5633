"""scripts/flaky.py: which tests do not pass every time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
from pathlib import Path

COUNT = Path(__file__).with_name("count")


def test_sound():
    pass


def test_every_second_time():
    n = int(COUNT.read_text()) if COUNT.exists() else 0
    COUNT.write_text(str(n + 1))
    assert n % 2
"""


def flaky(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ["-o", str(folder / "flaky.jsonl"), "-p", "no:cacheprovider", str(folder / "test_some.py")]
    command = [sys.executable, str(ROOT / "scripts" / "flaky.py"), *arguments, *own]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def runs_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "flaky.jsonl").read_text().splitlines()]


def test_failures_are_counted_and_runs_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    done = flaky(tmp_path, "-n", "2")
    assert done.returncode == 1, done.stderr
    assert "1 of 2 runs failed (0 busy loops" in done.stdout and "1 × " in done.stdout
    done = flaky(tmp_path, "-n", "3")
    assert "2 of 3 runs failed" in done.stdout
    runs = runs_of(tmp_path)
    assert [run["tests"] for run in runs] == [2, 2, 2]
    assert [[name.split("::")[1] for name in run["failed"]] for run in runs] == [
        ["test_every_second_time"], [], ["test_every_second_time"],
    ]  # fmt: skip


def test_each_run_has_its_seed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os\n\n\ndef test_seed():\n    assert os.environ['OALLAMA_TEST_SEED'] == '101'\n"
    )
    done = flaky(tmp_path, "-n", "2", "--first", "101")
    runs = runs_of(tmp_path)
    assert [len(run["failed"]) for run in runs] == [0, 1], done.stderr


def test_other_tests_are_counted_apart_and_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_sound():\n    pass\n")
    assert flaky(tmp_path, "-n", "1", "--busy", "0.5").returncode == 0
    assert flaky(tmp_path, "-n", "2").returncode == 0
    assert [run["busy"] for run in runs_of(tmp_path)] == [0.5, 0, 0]
    done = flaky(tmp_path, "-n", "1", "--busy", "0", "-k", "no_such_test")
    assert done.returncode == 2 and "tested nothing" in done.stderr


def test_a_line_that_was_cut_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_sound():\n    pass\n")
    (tmp_path / "flaky.jsonl").write_text('{"busy": 0, "arg\n')
    assert flaky(tmp_path, "-n", "1").returncode == 0
    assert "1 of" not in flaky(tmp_path, "-n", "1").stdout
    assert len((tmp_path / "flaky.jsonl").read_text().splitlines()) == 2
