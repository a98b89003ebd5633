"""Plant the faults of mutants.toml one at a time in a copy of the tree, and see whether the tests notice.

    python scripts/mutate                     # all of them: a quarter of an hour on two idle cores
    python scripts/mutate --part 2/6          # every sixth, from the second on
    python scripts/mutate --only n_g          # whose name or file has that in it
    python scripts/mutate --list              # plants nothing; says whether an entry is stale

Tests run as `pytest -x -q`. First they must pass without a fault; a mutant is caught when one of its tests then fails.
Without a part or a name all mutants are tried. Results of earlier calls are kept in build/mutate/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.child import ROOT
from experiments.command import guarded, parser_of
from experiments.inputs import InputError

import ggml_bridge
from mutate.table import Mutant, check_table, read_table

RESULTS = ROOT / "build" / "mutate" / "results.json"
PYTEST = (
    "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "first_example", "--hypothesis-seed=0", "--timeout=120"
)  # fmt: skip
PASSED, FAILED = 0, 1  # exit status of pytest

OWN_SOURCES = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""
"""sitecustomize.py of the copy: an editable install would import the checkout's sources instead."""

FIRST_EXAMPLE = """from hypothesis import Phase, settings
settings.register_profile("first", phases=(Phase.explicit, Phase.generate))
settings.load_profile("first")
"""
"""A plugin of pytest: one example that fails is enough, however large."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all were caught, 1 some survived, 2 the table is stale or the tests fail without a fault."""
    parser = parser_of("mutate", __doc__)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only mutants with TEXT in them")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th mutant from the I-th on")
    parser.add_argument("--list", action="store_true", help="list the mutants and plant none")
    options = parser.parse_args(arguments)
    return guarded("mutate", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Raises InputError."""
    mutants = read_table()
    check_table(mutants, ROOT)
    first, step = options.part
    chosen = [m for m in mutants[first - 1 :: step] if all(text in m.name + m.file for text in options.only)]
    if options.list:
        print("\n".join(f"{mutant.file}: {mutant.name}" for mutant in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        outcomes = _try_all(chosen, Path(folder))
    known = _keep(outcomes, mutants)
    survivors = [name for name, caught in known.items() if not caught]
    print(f"caught {len(known) - len(survivors)} of {len(known)} ({len(mutants) - len(known)} not tried yet)")
    for name in survivors:
        print(f"survived: {name}")
    return 1 if not all(outcomes.values()) else 0


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    part = int(first), int(step)
    if not 1 <= part[0] <= part[1]:
        raise ValueError(text)
    return part


def _try_all(mutants: Sequence[Mutant], copy: Path) -> dict[str, bool]:
    """By name, whether it was caught. Raises InputError."""
    _copy_tree(copy)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, said = _pytest(copy, tests) if tests else (PASSED, "")
    if status != PASSED:
        print(said, file=sys.stderr)
        raise InputError(f"the tests fail without a fault: {' '.join(tests)}")
    outcomes = {}
    for mutant in mutants:
        start = time.monotonic()
        file = copy / mutant.file
        sound = file.read_text(encoding="utf-8")
        file.write_text(mutant.planted(sound), encoding="utf-8")
        try:
            status, said = _pytest(copy, mutant.tests)
        finally:
            file.write_text(sound, encoding="utf-8")
        if status not in (PASSED, FAILED):
            print(said, file=sys.stderr)
            raise InputError(f"mutant {mutant.name!r} is no fault that tests can notice: pytest ends with {status}")
        outcomes[mutant.name] = status == FAILED
        outcome = "caught  " if outcomes[mutant.name] else "SURVIVED"
        print(f"{outcome} {time.monotonic() - start:5.0f} s  {mutant.file}: {mutant.name}", flush=True)
    return outcomes


def _copy_tree(copy: Path) -> None:
    """What git knows, as it is now, and the native libraries, as they were built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    built = copy / "build" / "native"
    built.mkdir(parents=True)
    for folder in ggml_bridge.__path__:
        for library in Path(folder).glob("libggml*"):
            shutil.copy2(library, built)
    (copy / "sitecustomize.py").write_text(OWN_SOURCES, encoding="utf-8")
    (copy / "first_example.py").write_text(FIRST_EXAMPLE, encoding="utf-8")


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Its exit status, and what it said."""
    # no bytecode: a fault as long as what it replaces, in the same second, would not be seen
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, *PYTEST, *tests], cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    return run.returncode, run.stdout


def _keep(outcomes: dict[str, bool], mutants: Sequence[Mutant]) -> dict[str, bool]:
    """With what earlier calls found of mutants that are still in the table, in its order."""
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    known = {m.name: (earlier | outcomes)[m.name] for m in mutants if m.name in earlier | outcomes}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return known
