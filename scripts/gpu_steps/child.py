"""python -m gpu_steps.child CASE SETTINGS OUT: what a step measures in a process of its own. SETTINGS is a JSON object;
each row that the case yields is written as a line of JSON as soon as it is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_steps import copy_queue_case, correctness, device_case, timeline_case

Rows = Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]]
CASES: Mapping[str, Rows] = {
    "correctness": correctness.rows, "copies": copy_queue_case.rows, "device": device_case.rows,
    "timeline": timeline_case.rows,
}  # fmt: skip


def main() -> int:
    case, settings, out = sys.argv[1:]
    with Path(out).open("w", encoding="utf-8") as file:
        for row in CASES[case](json.loads(settings)):
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
