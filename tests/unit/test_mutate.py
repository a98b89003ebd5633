"""scripts/mutate: its table is true of the tree, and what is no table, or no longer true, is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from experiments.inputs import InputError  # noqa: E402
from mutate.main import main  # noqa: E402
from mutate.table import Mutant, check_table, read_table  # noqa: E402

MUTANT = Mutant("a sign", "half.py", "a + b", "a - b", ("test_half.py::test_sum",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "half.py").write_text("def half(a, b):\n    return (a + b) / 2\n", encoding="utf-8")
    (tmp_path / "test_half.py").write_text("", encoding="utf-8")
    return tmp_path


def test_every_mutant_can_be_planted() -> None:
    """An entry whose text has changed says nothing any more: write it anew for what the code became."""
    mutants = read_table()
    check_table(mutants, ROOT)
    rooms = {mutant.file.split("/")[1] for mutant in mutants}
    assert {"cost", "place", "plan", "profile", "gate"} <= rooms


def test_a_mutant_changes_one_place(tree: Path) -> None:
    check_table([MUTANT], tree)
    assert MUTANT.planted("x = a + b\n") == "x = a - b\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"old": "a * b"}, "is not in half.py"), ({"old": "a"}, "times in half.py"), ({"file": "no.py"}, "no no.py"),
     ({"tests": ("test_other.py",)}, "no test_other.py")],
)  # fmt: skip
def test_a_stale_mutant_is_named(tree: Path, change: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=f"'a sign' is stale.*{said}"):
        check_table([replace(MUTANT, **change)], tree)


ENTRY = '[[mutant]]\nname = "n"\nfile = "f"\nold = "o"\nnew = "w"\ntests = ["t"]\n'


@pytest.mark.parametrize(
    "text",
    [ENTRY.replace("old", "odd"), ENTRY.replace('["t"]', "[]"), ENTRY.replace('"w"', '"o"'), ENTRY + ENTRY, "= 1"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "mutants.toml"
    table.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        read_table(table)


def test_the_list_plants_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "gate/verdict"]) == 0
    assert "oallama/gate/verdict.py: a policy wins at one depth" in capsys.readouterr().out
