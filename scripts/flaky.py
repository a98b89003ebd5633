#!/usr/bin/env python3
"""Run the tests again and again, and tell which of them do not pass every time.

    python scripts/flaky.py -n 20                      # the whole suite as scripts/test runs it, 20 times
    python scripts/flaky.py -n 10 --busy 2             # beside two busy loops for each core
    python scripts/flaky.py -n 50 tests/unit/test_child.py

What is behind the options goes to pytest, which then runs alone. Each run has a seed, from --first on, for what its
tests draw (OALLAMA_TEST_SEED).
A run that ends appends a line of JSON to build/test/flaky.jsonl, and the same command goes on until there are so many.
Several at once share that file (-o): each in a clone of its own, with seeds of its own. Exit status: 0 no failure,
1 failures, 2 a run that tested nothing, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHOLE = [ROOT / "build" / "test" / name for name in ("pytest.xml", "pytest-beside.xml")]
"""What scripts/test leaves: the results of both of its halves."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-n", type=int, default=20, metavar="N", help="runs in all [20]")
    parser.add_argument("--busy", type=float, default=0.0, metavar="X", help="busy loops beside, for each core [0]")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the least seed [1]")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "test" / "flaky.jsonl")
    options, of_pytest = parser.parse_known_args(arguments)
    try:
        while len(runs := _runs(options.output, options.busy, of_pytest)) < options.n:
            used = {run["seed"] for run in runs}
            seed = next(n for n in range(options.first, options.first + len(used) + 1) if n not in used)
            with busy(round(options.busy * (os.cpu_count() or 1))):
                run = {**_circumstances(options.busy, of_pytest), "seed": seed, **one_run(of_pytest, seed)}
            if not run["tests"]:
                print(f"flaky: pytest ended with {run['exit_code']} and tested nothing", file=sys.stderr)
                return 2
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"seed {seed}: {run['tests']} tests in {run['seconds']} s, failed: {run['failed']}", flush=True)
    except KeyboardInterrupt:
        print("flaky: interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(summary(runs))
    return int(any(run["failed"] for run in runs))


def one_run(arguments: Sequence[str], seed: int) -> dict[str, Any]:
    """Seconds, exit code, how many tests there were, and which of them failed; of the suite its checks too."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flaky-") as folder:
        alone = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={alone}", *arguments]
        results = [alone]
        if not arguments:
            command, results = [str(ROOT / "scripts" / "test")], WHOLE
            for file in WHOLE:  # where set-up fails, those of the run before would be counted
                file.unlink(missing_ok=True)
        seeded = {**os.environ, "OALLAMA_TEST_SEED": str(seed)}
        code = subprocess.run(command, cwd=ROOT, env=seeded, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        cases = [case for file in results if file.is_file() for case in ElementTree.parse(file).iter("testcase")]
    failed = sorted(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    if code and cases and not failed:
        failed = [f"no test, but the exit status is {code}"]
    seconds, load = round(time.monotonic() - begin, 1), round(os.getloadavg()[2], 1)
    return {"seconds": seconds, "load_15_min": load, "exit_code": code, "tests": len(cases), "failed": failed}


@contextlib.contextmanager
def busy(n: int) -> Iterator[None]:
    """So many processes that compute all the time; they end when this one does."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(n)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """How many runs failed, and how often each test did."""
    counts = Counter(name for run in runs for name in run["failed"])
    n_failed = sum(bool(run["failed"]) for run in runs)
    beside = "{busy:g} busy loops for each of {cores} cores".format(**runs[-1])
    lines = [f"{n_failed} of {len(runs)} runs failed ({beside})"]
    return "\n".join([*lines, *(f"{count:4} × {name}" for name, count in counts.most_common())])


def _circumstances(loops: float, arguments: list[str]) -> dict[str, Any]:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"commit": commit, "began": began, "cores": os.cpu_count(), "busy": loops, "arguments": arguments}


def _runs(path: Path, loops: float, arguments: list[str]) -> list[dict[str, Any]]:
    """Those of a file that were made with these busy loops and arguments; a line that was cut is passed over."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            run = json.loads(line)
            if (run["busy"], run["arguments"]) == (loops, arguments):
                found.append(run)
    return found


if __name__ == "__main__":
    sys.exit(main())
