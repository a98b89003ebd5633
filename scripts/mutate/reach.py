"""Which tests reach which lines, as coverage.py tells, and how long they take: measured once for each file of tests."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData
from shared import ROOT

from mutate.tree import PASSED, run_pytest

KEPT = ROOT / "build" / "mutate" / "reach"
FOLDERS = ("tests/unit", "tests/golden")
IN_CHILDREN = ("tests/unit/test_fuzz.py",)
"""What reaches nothing itself, and takes minutes."""
OPTIONS = (
    "--cov", "--cov-config=reach.ini", "--cov-context=test", "--cov-report=", "--timeout=600", "-p", "few_examples"
)  # fmt: skip
SETTINGS = "[run]\nrelative_files = true\nsource = oallama,tests\ndata_file = {file}\n"


def test_files() -> list[str]:
    found = [path.relative_to(ROOT).as_posix() for name in FOLDERS for path in sorted((ROOT / name).glob("test_*.py"))]
    return [name for name in found if name not in IN_CHILDREN]


def measure(copy: Path, tests: str) -> bool:
    """Learn what a file of tests reaches, unless that is known. False: its tests fail without a fault."""
    if _is_current(tests):
        return True
    kept = _kept(tests)
    kept.parent.mkdir(parents=True, exist_ok=True)
    making = kept.with_suffix(".new")
    (copy / "reach.ini").write_text(SETTINGS.format(file=making), encoding="utf-8")
    took = making.with_suffix(".took")
    status, said = run_pytest(copy, [tests], (*OPTIONS, f"--junitxml={took}"), keep_bytecode=True)
    if status != PASSED:
        print(f"left out, as it fails without a fault: {tests}\n{said}", file=sys.stderr)
        return False
    took.replace(kept.with_suffix(".xml"))
    making.replace(kept)
    return True


class Reach:
    """What the measured files of tests reach."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._data = [_data(name) for name in tests]
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for name in tests:
            for case in ElementTree.parse(_kept(name).with_suffix(".xml")).iter("testcase"):
                self._seconds[f"{name}::{_function(case.attrib['name'])}"] += float(case.attrib["time"])
        self._files: dict[str, dict[str, set[int]]] = {}

    def tests(self, file: str, lines: tuple[int, int]) -> list[str]:
        """Those that reach one of the lines, the quickest first."""
        reached = self._of(file)
        wanted = set(range(lines[0], lines[1] + 1))
        reaching = [test for test in reached if reached[test] & wanted]
        return sorted(reaching, key=lambda test: (self._seconds[test], test))

    def seconds(self, tests: Sequence[str]) -> float:
        """That they take without a fault."""
        return sum(self._seconds[test] for test in tests)

    def within(self, tests: Sequence[str], seconds: float) -> int:
        """How many of them take so long together, but one at least."""
        return max(1, sum(total <= seconds for total in accumulate(self._seconds[test] for test in tests)))

    def _of(self, file: str) -> dict[str, set[int]]:
        """By test the lines of a file."""
        if file not in self._files:
            found = defaultdict(set)
            for data in self._data:
                for line, contexts in data.contexts_by_lineno(file).items():
                    for context in contexts:
                        if context:
                            found[_function(context.partition("|")[0])].add(line)
            self._files[file] = found
        return self._files[file]


def _function(test: str) -> str:
    """Without the parameters it ran with, of which a fault may change the names."""
    return test.partition("[")[0]


def _kept(tests: str) -> Path:
    return KEPT / f"{tests.replace('/', '.')}.coverage"


def _data(tests: str) -> CoverageData:
    data = CoverageData(str(_kept(tests)))
    data.read()
    return data


def _is_current(tests: str) -> bool:
    """Nothing that these tests reach has changed since."""
    kept = _kept(tests)
    if not kept.is_file():
        return False
    reached = [ROOT / name for name in (tests, *_data(tests).measured_files())]
    return all(path.is_file() and path.stat().st_mtime < kept.stat().st_mtime for path in reached)
