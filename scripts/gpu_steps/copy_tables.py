"""Table of the wait of small copies behind streamed weights, from one results file. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.pages import table

from gpu_steps.tables import Results, of_kind


def copy_rows(document: Results) -> list[dict[str, Any]]:
    """Of each size of the small copy, and what it is begun behind: its samples, how much longer it takes than alone,
    and what one piece takes at the rate of the large copy. Seconds."""
    found: list[dict[str, Any]] = []
    for _, step in of_kind(document, "copies"):
        rows = step["data"]
        alone = {row["small_bytes"]: _median_small(row) for row in rows if row["large_bytes"] == 0}
        whole = [
            sum(sample) for row in rows if 0 < row["large_bytes"] == row["piece_bytes"] for sample in row["samples"]
        ]
        for row in rows:
            queue = "alone"
            if row["large_bytes"]:
                queue = f"one copy of {size(row['large_bytes'])}"
                if row["piece_bytes"] < row["large_bytes"]:
                    queue = f"{row['large_bytes'] // row['piece_bytes']} pieces of {size(row['piece_bytes'])}"
            share = row["piece_bytes"] / row["large_bytes"] if row["large_bytes"] else 0.0
            found.append({
                "small_bytes": row["small_bytes"], "behind": queue,
                "piece_s": share * statistics.median(whole) if share and whole else None,
                "samples_s": [small for _, small, _ in row["samples"]],
                "waits_s": _median_small(row) - alone[row["small_bytes"]] if row["small_bytes"] in alone else None,
                "queue_s": statistics.median(queue for queue, _, _ in row["samples"]),
                "rest_s": statistics.median(rest for _, _, rest in row["samples"]),
            })  # fmt: skip
    return found


def _median_small(row: Mapping[str, Any]) -> float:
    return float(statistics.median(small for _, small, _ in row["samples"]))


def size(n_bytes: int) -> str:
    return f"{n_bytes >> 20} MiB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KiB"


def copies_table(document: Results) -> list[str]:
    """In microseconds."""

    def us(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.0f}"

    rows = [
        (size(row["small_bytes"]), row["behind"], us(statistics.median(row["samples_s"])),
         f"{us(min(row['samples_s']))}..{us(max(row['samples_s']))}",
         *([us(row[key]) for key in ("waits_s", "piece_s", "queue_s", "rest_s")] if row["piece_s"] else ["-"] * 4))
        for row in copy_rows(document)
    ]  # fmt: skip
    columns = ("small copy", "begun", "µs, median", "least..most", "longer than alone", "one piece takes",
               "queueing took", "large one still took")  # fmt: skip
    return table(columns, rows)
