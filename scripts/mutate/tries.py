"""Generated mutants, each tried with the tests that reach its line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from shared import ROOT

from mutate.generated import OPEN, Drawn, Mutant, read_results, write_results
from mutate.reach import FOLDERS, Reach, measure, test_files
from mutate.tree import LATE, PASSED, PYTEST, copy_tree, environment_of, planted, run_pytest

OPTIONS = (*PYTEST, "-p", "no:cov", "-p", "few_examples", "--timeout=30", "--tb=no")
LIMIT_S, SLOWER = 120.0, 5.0
"""For some tests of a mutant, beyond so many times what they take without a fault; what takes longer is late."""
FIRST_S, FIRST_TIME_S = 1.0, 20.0
"""Of the quickest tests, which are tried before others are even imported; of all that are tried the first time."""

COPIES = ROOT / "build" / "mutate" / "copies"
"""They stay, as compiling them takes a minute."""

T = TypeVar("T")
R = TypeVar("R")


class Copy:
    """A copy of the tree, and a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_tree(folder)
        run_pytest(folder, FOLDERS, ["--collect-only"], keep_bytecode=True)  # compiles all, once
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("fork_server.py")], cwd=folder, env=environment_of(folder),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int, str]:
        """The exit status of pytest, and what it said. seconds: of these tests without a fault."""
        log = self.folder / "pytest.log"
        request = {"arguments": [*OPTIONS, *tests], "log": str(log), "limit_s": LIMIT_S + SLOWER * seconds}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def try_all(
    chosen: Sequence[Drawn], results: Path, n_copies: int, again: bool, only: Sequence[str] = ()
) -> list[Mutant]:
    """What became of each; in `results` is also what earlier calls found. again: try those too that survived, with all
    tests. only: of the tests those with one of these in their names, and what none of them reaches is not tried. Raises
    InputError."""
    known = {mutant.key: mutant for mutant in read_results(results)}
    copies = [Copy(COPIES / str(i)) for i in range(n_copies)]
    try:
        reach = Reach([name for name in _each_in_a_copy(copies, test_files(), _measured) if name is not None])
        tests = {d.mutant.key: reach.tests(d.mutant.file, d.change.lines) for d in chosen}
        open_ones = [d for d in chosen if _is_open(known.get(d.mutant.key), again)]
        if only:
            tests = {key: [test for test in of if any(text in test for text in only)] for key, of in tests.items()}
            open_ones = [d for d in open_ones if tests[d.mutant.key]]

        def tried(copy: Copy, drawn: Drawn) -> Mutant:
            of = tests[drawn.mutant.key]
            first, most = reach.within(of, FIRST_S), len(of) if again else reach.within(of, FIRST_TIME_S)
            return _tried(copy, drawn, [(some, reach.seconds(some)) for some in (of[:first], of[first:most])])

        for mutant in _each_in_a_copy(copies, open_ones, tried):
            print(f"{mutant.outcome:<8} {mutant.file}:{mutant.line}: {mutant.old} -> {mutant.new}", flush=True)
            known[mutant.key] = mutant
            write_results(results, known.values())
    finally:
        for copy in copies:
            copy.end()
    return [known[drawn.mutant.key] for drawn in chosen if drawn.mutant.key in known]


def _measured(copy: Copy, tests: str) -> str | None:
    return tests if measure(copy.folder, tests) else None


def _is_open(known: Mutant | None, again: bool) -> bool:
    return known is None or (again and known.outcome in OPEN)


def _each_in_a_copy(copies: Sequence[Copy], jobs: Sequence[T], do: Callable[[Copy, T], R]) -> Iterator[R]:
    """Several at a time, each in a copy of its own; as they end."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(job: T) -> R:
        copy = free.get()
        try:
            return do(copy, job)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = [pool.submit(run, job) for job in jobs]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tried(copy: Copy, drawn: Drawn, tests: Sequence[tuple[Sequence[str], float]]) -> Mutant:
    """tests: some after others, and what they take without a fault."""
    file = copy.folder / drawn.mutant.file
    status, said, n_tests = PASSED, "", 0
    with planted(file, drawn.change.planted(file.read_text(encoding="utf-8"))):
        for some, seconds in tests:
            if some and status == PASSED:
                n_tests += len(some)
                status, said = copy.run(some, seconds)
    outcome = "late" if status == LATE else "caught" if status != PASSED else "survived" if n_tests else "not reached"
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return replace(drawn.mutant, outcome=outcome, tests=n_tests, by=noticed[1] if noticed else "")
