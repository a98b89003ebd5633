"""scripts/mutate: its table is true of the tree, what is no table, or no longer true, is refused, and what it draws."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutate.generated import CAUGHT, read_results, sample, table, write_results  # noqa: E402
from mutate.generated import Mutant as Generated  # noqa: E402
from mutate.main import main  # noqa: E402
from mutate.operators import changes  # noqa: E402
from mutate.table import Mutant, check_table, read_table  # noqa: E402
from shared import InputError  # noqa: E402

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
    assert "oallama/gate/verdict.py: a plan as fast as stock beats it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("x = a + b", {"x = a - b"}),
        ("x = 'é' + b", set()),
        ("x -= b", {"pass", "x += b"}),
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = (a) and b or c", {"x = (a) or b or c", "x = (a) and b and c"}),
        ("x = not a", {"x = (a)"}),
        ("x = 2", {"x = 3", "x = 1"}),
        ("x = 0.5", {"x = (0.5 * 2)"}),
        ("x = min(a, key=b)", {"x = max(a, key=b)", "x = min(a, )"}),
        ("x = sorted(é)", {"x = sorted(é)[::-1]"}),
        ("x = é[a:b]", {"x = é[(a) + 1:b]", "x = é[a:(b) - 1]"}),
        ("x = é if a else b", {"x = é if (not (a)) else b"}),
        ("x = [é for é in a if b]", {"x = [é for é in a if True]"}),
        ("f(a)", {"pass"}),
        ("x.y = a", {"pass"}),
        ("return a", {"return None"}),
        ("raise a", {"pass"}),
        ("if a: f(b)", {"if False: f(b)", "if a: pass"}),
        ("log.info(a, 1)", set()),
        ("x: Literal[1] = a", set()),
        ("x = zip(a, b, strict=True)", set()),
    ],
)
def test_what_the_operators_make_of_a_line(line: str, planted: set[str]) -> None:
    source = f"def é(a, b):\n    {line}\n"
    assert {change.planted(source) for change in changes(source)} == {source.replace(line, new) for new in planted}


def test_a_change_knows_its_lines() -> None:
    """Of the head of a statement in a function; what runs as the module is imported may be of any test."""
    source = "x = 1\n\n\ndef f(a):\n    if (\n        a\n        > 2\n    ):\n        return -a\n"
    lines = {(change.new, change.line): change.lines for change in changes(source)}
    assert lines["2", 1] == (1, 10) and lines["3", 7] == (5, 8) and lines["(a)", 9] == (9, 9)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, n in {"cost": 60, "place": 120, "gate": 20, "run": 500}.items():
        folder = tmp_path / "oallama" / name
        folder.mkdir(parents=True)
        lines = [f"def f{i}(a):\n    return a + {i}\n" for i in range(n)]
        (folder / "file.py").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_a_sample_is_of_each_package_in_proportion_to_its_lines(packages: Path) -> None:
    drawn = sample(packages, 50, 1)
    assert [sum(d.mutant.package == name for d in drawn) for name in ("cost", "place", "gate", "run")] == [15, 30, 5, 0]
    assert drawn == sample(packages, 50, 1)
    assert {d.mutant.key[1:] for d in drawn} != {d.mutant.key[1:] for d in sample(packages, 50, 2)}


def test_a_sample_changes_little_with_the_sources(packages: Path) -> None:
    before = {d.mutant.key for d in sample(packages, 50, 1)}
    file = packages / "oallama" / "cost" / "file.py"
    file.write_text("import os\n\n" + file.read_text(encoding="utf-8").replace("a + 7", "7"), encoding="utf-8")
    assert len(before & {d.mutant.key for d in sample(packages, 50, 1)}) >= 47


def test_results_are_kept_and_counted(tmp_path: Path) -> None:
    outcomes = ["caught", "caught", "late", "equivalent", "survived", "not reached"]
    found = [Generated(1, "oallama/gate/a.py", i, "f", "a", "b", 1, outcome) for i, outcome in enumerate(outcomes)]
    write_results(tmp_path / "new" / "results.json", found)
    assert read_results(tmp_path / "new" / "results.json") == found
    assert read_results(tmp_path / "none.json") == []
    assert "| gate | 6 | 3 | 1 | 2 | 60.0 % |" in table(found)
    assert "| cost | 0 | 0 | 0 | 0 | - |" in table(found)


def test_each_survivor_has_a_reason() -> None:
    found = read_results(ROOT / "docs" / "benchmarks" / "mutation.json")
    assert [mutant for mutant in found if not mutant.why and mutant.outcome not in CAUGHT] == []


def test_a_sample_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generated", "--list", "-n", "20", "--only", "gate/"]) == 0
    assert all(line.startswith("oallama/gate/") for line in capsys.readouterr().out.splitlines())
