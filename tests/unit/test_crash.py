"""A worker of the test run that dies costs the test that it died of, and no other."""

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("the_conftest", {path!r})
found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)
pytest_xdist_make_scheduler = found.pytest_xdist_make_scheduler
"""
TESTS = """
import os, signal
import pytest

@pytest.mark.parametrize("i", range(4))
def test(i):
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_is_the_failure_of_one_test(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(path=str(Path(__file__).parents[1] / "conftest.py")))
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    options = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=9", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "2 failed, 6 passed" in done.stdout, done.stdout + done.stderr
    assert all(f"FAILED {name}::test[1]" in done.stdout for name in ("test_a.py", "test_b.py"))
