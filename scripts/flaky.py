#!/usr/bin/env python3
"""Run the tests again and again, and tell which of them do not pass every time.

    python scripts/flaky.py -n 20                      # the whole suite, 20 times
    python scripts/flaky.py -n 10 --busy 2             # beside two busy loops for each core
    python scripts/flaky.py -n 50 tests/unit/test_child.py

What is behind the options goes to pytest. The number of a run, counted from --first, is the seed of what its tests draw
(OALLAMA_TEST_SEED).
Runs are kept in build/test/flaky.json as they end, and the same command goes on until there are so many. Exit status:
0 no failure, 1 failures, 2 a run that tested nothing, 130 interrupted.
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-n", type=int, default=20, metavar="N", help="runs in all [20]")
    parser.add_argument("--busy", type=float, default=0.0, metavar="X", help="busy loops beside, for each core [0]")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="of the first run [1]")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "test" / "flaky.json")
    options, of_pytest = parser.parse_known_args(arguments)
    identity = {"busy": options.busy, "arguments": of_pytest}
    try:
        record = json.loads(options.output.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    if {key: record.get(key) for key in identity} != identity:
        record = {**identity, "cores": os.cpu_count(), "runs": []}
    try:
        while len(record["runs"]) < options.n:
            with busy(round(options.busy * (os.cpu_count() or 1))):
                run = one_run(of_pytest, options.first + len(record["runs"]))
            if not run["tests"]:
                print(f"flaky: pytest ended with {run['exit_code']} and tested nothing", file=sys.stderr)
                return 2
            record["runs"].append(run)
            _write(options.output, record)
            print(
                f"{len(record['runs'])}: {run['tests']} tests in {run['seconds']} s, failed: {run['failed']}",
                flush=True,
            )
    except KeyboardInterrupt:
        print("flaky: interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(told(record))
    return int(any(run["failed"] for run in record["runs"]))


def one_run(arguments: Sequence[str], seed: int) -> dict[str, Any]:
    """Of pytest: seconds, exit code, how many tests there were, and the names of those that failed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flaky-") as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *arguments]
        seeded = {**os.environ, "OALLAMA_TEST_SEED": str(seed)}
        code = subprocess.run(command, cwd=ROOT, env=seeded, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        cases = list(ElementTree.parse(results).iter("testcase")) if results.is_file() else []
    failed = sorted(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    seconds = round(time.monotonic() - begin, 1)
    return {"seconds": seconds, "exit_code": code, "tests": len(cases), "failed": failed}


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


def told(record: dict[str, Any]) -> str:
    """How many runs failed, and how often each test did."""
    runs = record["runs"]
    counts = Counter(name for run in runs for name in run["failed"])
    n_failed = sum(bool(run["failed"]) for run in runs)
    lines = [
        f"{n_failed} of {len(runs)} runs failed ({record['busy']:g} busy loops for each of {record['cores']} cores)"
    ]
    return "\n".join([*lines, *(f"{count:4} × {name}" for name, count in counts.most_common())])


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    sys.exit(main())
