"""Plant faults one at a time in a copy of the tree, and see whether the tests notice.

    python scripts/mutate                     # those of mutants.toml: a quarter of an hour on two idle cores
    python scripts/mutate --part 2/6          # every sixth, from the second on
    python scripts/mutate --only n_g          # whose name or file has that in it
    python scripts/mutate --list              # plants nothing; says whether an entry is stale
    python scripts/mutate generated -n 400 --seed 1   # faults that nobody chose, in cost, place, plan, profile and gate
    python scripts/mutate generated --again           # once more those that survived, with the tests of now
    python scripts/mutate generated --again --tests test_slic   # but only with these

Tests run as `pytest -x -q`. First they must pass without a fault; a mutant is caught when one of its tests then fails.
Without a part or a name all mutants are tried. Results of earlier calls are kept, and the same command goes on: those
of mutants.toml in build/mutate/results.json, generated ones in build/mutate/generated.json.

A generated mutant is tried with the tests of tests/unit and tests/golden that reach its line, which coverage.py tells
(pip install pytest-cov); what those tests reach is measured once, and again where they or the sources have changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared import ROOT, InputError, guarded, parser_of

from mutate.generated import OPEN, sample, table
from mutate.table import Mutant, check_table, read_table
from mutate.tree import FAILED, PASSED, copy_tree, planted, run_pytest

RESULTS = ROOT / "build" / "mutate" / "results.json"
GENERATED = ROOT / "build" / "mutate" / "generated.json"
OPTIONS = ("--timeout=120",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all were caught, 1 some survived, 2 the table is stale or the tests fail without a fault."""
    parser = parser_of("mutate", __doc__)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only mutants with TEXT in them")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th mutant from the I-th on")
    parser.add_argument("--list", action="store_true", help="list the mutants and plant none")
    parser.add_argument("which", nargs="?", choices=["chosen", "generated"], default="chosen", help="by hand, or drawn")
    parser.add_argument("-n", type=int, default=400, help="generated mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which generated mutants (%(default)s)")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="generated mutants at a time (%(default)s)")
    parser.add_argument("--again", action="store_true", help="try generated mutants that survived once more")
    parser.add_argument("--tests", action="append", default=[], metavar="TEXT",
                        help="generated mutants: only with tests that have TEXT in their names")  # fmt: skip
    options = parser.parse_args(arguments)
    return guarded("mutate", lambda: (_generated if options.which == "generated" else _chosen)(options))


def _generated(options: argparse.Namespace) -> int:
    """Raises InputError."""
    first, step = options.part
    drawn = [d for d in sample(ROOT, options.n, options.seed) if all(text in d.mutant.file for text in options.only)]
    drawn = drawn[first - 1 :: step]
    if options.list:
        print("\n".join(f"{d.mutant.file}:{d.mutant.line}: {d.mutant.old} -> {d.mutant.new}" for d in drawn))
        return 0
    from mutate.tries import try_all  # needs pytest-cov

    tried = try_all(drawn, GENERATED, options.jobs, options.again, options.tests)
    print(table(tried))
    return 1 if any(mutant.outcome in OPEN for mutant in tried) else 0


def _chosen(options: argparse.Namespace) -> int:
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
    copy_tree(copy)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, said = run_pytest(copy, tests, OPTIONS, keep_bytecode=True) if tests else (PASSED, "")
    if status != PASSED:
        print(said, file=sys.stderr)
        raise InputError(f"the tests fail without a fault: {' '.join(tests)}")
    outcomes = {}
    for mutant in mutants:
        start = time.monotonic()
        file = copy / mutant.file
        with planted(file, mutant.planted(file.read_text(encoding="utf-8"))):
            status, said = run_pytest(copy, mutant.tests, OPTIONS)
        if status not in (PASSED, FAILED):
            print(said, file=sys.stderr)
            raise InputError(f"mutant {mutant.name!r} is no fault that tests can notice: pytest ends with {status}")
        outcomes[mutant.name] = status == FAILED
        outcome = "caught  " if outcomes[mutant.name] else "SURVIVED"
        print(f"{outcome} {time.monotonic() - start:5.0f} s  {mutant.file}: {mutant.name}", flush=True)
    return outcomes


def _keep(outcomes: dict[str, bool], mutants: Sequence[Mutant]) -> dict[str, bool]:
    """With what earlier calls found of mutants that are still in the table, in its order."""
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    known = {m.name: (earlier | outcomes)[m.name] for m in mutants if m.name in earlier | outcomes}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return known
