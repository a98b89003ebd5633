"""Files of the profile cache: replaced whole, locked, damaged, and cut off."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oallama.core.errors import ProfileError
from oallama.core.files import cache_folder
from oallama.profile.merge import empty
from oallama.profile.store import Journal, load, measuring_lock, save

CASE = {
    "device": "CPU", "layout": "CPU", "type": "F16", "shape": [64, 32, 1], "n_expert_used": 1, "n_tokens": 1,
    "seconds": 0.5, "samples": [0.5], "gb_per_s": 1.0, "gflops": 1.0, "working_set_bytes": 64, "op": "MUL_MAT",
}  # fmt: skip


def test_what_is_kept_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    journal = Journal(path)
    journal.append({"cases": []})
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600
    save(path, empty({"cpu": "x"}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # of an earlier version
    save(path, empty({"cpu": "x"}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_file_is_measured_again_and_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(path, empty({}))
    path.write_text(path.read_text()[:-20])
    said: list[str] = []
    assert load(path, said.append) is None
    assert len(said) == 1 and "measured again" in said[0] and str(path) in said[0]


def test_a_file_in_the_way_of_the_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(ProfileError, match="OALLAMA_CACHE_DIR"):
        save(tmp_path / "folder" / "profile.json", empty({}))


def test_a_journal_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    said: list[ProfileError] = []
    journal = Journal(tmp_path / "folder" / "profile.json", said.append)
    for n_tokens in (1, 2):
        journal.append({"cases": [{**CASE, "n_tokens": n_tokens}]})
    assert len(said) == 1 and "OALLAMA_CACHE_DIR" in str(said[0])


def test_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OALLAMA_CACHE_DIR", "~/own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("OALLAMA_CACHE_DIR", "~nobody-of-this-name/own")
    assert cache_folder() == Path("~nobody-of-this-name/own")
    monkeypatch.delenv("OALLAMA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "xdg" / "oallama"


def test_the_second_measurement_waits_for_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from oallama.profile.store import measuring_lock\n"
        "with measuring_lock(Path(sys.argv[1]), lambda: print('waits', flush=True)): print('has it', flush=True)"
    )
    second = None
    with measuring_lock(tmp_path, lambda: pytest.fail("nobody else holds the lock")):
        second = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
        line: list[str] = []
        reader = threading.Thread(target=lambda: line.append(second.stdout.readline()))
        reader.start()
        reader.join(0.2)
        assert line == []
    reader.join(30)
    assert line == ["has it\n"]
    assert second.wait(30) == 0
    second.stdout.close()


def test_a_journal_survives_being_cut_off_anywhere(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "profile.json")
    assert journal.read() == []
    fragments = [{"cases": [{**CASE, "n_tokens": n}]} for n in (1, 2, 3)]
    for fragment in fragments:
        journal.append(fragment)
    assert journal.read() == fragments
    whole = journal.path.read_bytes()
    for length in range(len(whole)):
        journal.path.write_bytes(whole[:length])
        kept = journal.read()
        assert kept == fragments[: len(kept)]
        assert len(kept) >= whole[:length].count(b"}\n")
    journal.path.write_bytes(whole[:-5])
    journal.append({"launch_s": 1.0})  # after a cut-off line
    assert journal.read() == [*fragments[:2], {"launch_s": 1.0}]
    journal.clear()
    journal.clear()
    assert journal.read() == []
