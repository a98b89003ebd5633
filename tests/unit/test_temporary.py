"""Temporary folders, and those of programs that were killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oallama.core.temporary import temporary_folder

HOLD = """
import sys
from pathlib import Path
from oallama.core.temporary import temporary_folder
with temporary_folder("a-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def held(parent):
    """A program that holds a folder until its standard input ends."""
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    return program, Path(program.stdout.readline().strip())


def test_it_is_removed_at_the_end_with_what_is_in_it(tmp_path):
    with pytest.raises(ValueError, match="of the block"), temporary_folder("a-", tmp_path) as folder:
        (folder / "file").write_text("x")
        raise ValueError("of the block")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_what_a_killed_program_left_is_removed_and_what_a_live_one_has_is_kept(tmp_path):
    killed, left = held(tmp_path)
    alive, kept = held(tmp_path)
    with killed, alive:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        with temporary_folder("a-", tmp_path) as folder:
            assert sorted(tmp_path.iterdir()) == sorted([kept, folder])
        alive.communicate("")
    assert list(tmp_path.iterdir()) == []
