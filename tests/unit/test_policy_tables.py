"""scripts/policy_tables.py: measured and predicted times of policies under one cap, and who wins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from policy_tables import slim, tables, with_section


def planned(arm: str, total_s: float, places: str = "", error: str = "") -> dict[str, Any]:
    busy = {"prompt": {"cpu": 0.2, "gpu": 0.1, "in": 0.97, "out": 0.0}, "token": {"cpu": 0.98, "gpu": 0.1, "in": 0.9}}
    if error:
        return {"arm": arm, "error": error}
    return {"arm": arm, "places": places or arm, "ttft_s": 0.5, "tpot_s": 0.1, "total_s": total_s, "busy": busy,
            "weights": {"cc": 0.4, "cg": 0.1, "gg": 0.5}, "error": ""}  # fmt: skip


def measured(arm: str, *seconds: float, problems: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"arm": arm, "samples_ns": [round(1e9 * s) for s in seconds], "samples_ttft_s": [0.5], "problems": problems,
            "predicted": {"ttft_s": 0.4, "tpot_s": 0.09, "total_s": 1.8} if arm == "auto" else None,
            "samples_tpot_s": [0.11], "placement": {"device": ["a"]}}  # fmt: skip


def cell(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return {"model": "1b", "cap": "25%", "workload": "pp64+tg16", key: rows}


PREDICTED = {
    "cells": [
        cell([planned("layers", 3.0), planned("scheinfer", 1.5)], "arms"),
        cell([planned("auto", 1.5, "scheinfer"), planned("cpu", 0.0, error="it does not fit")], "arms"),
    ]
}
MEASURED = {
    "cells": [
        cell([measured("stock-fit", 3.0, 3.2), measured("layers", 2.9, 3.1), measured("scheinfer", 2.0, 2.2)], "rows"),
        cell([measured("stock-fit", 2.8), measured("auto", 2.0), measured("hetegen", 1.0, problems=("lost",))], "rows"),
    ]
}
NOTHING: dict[str, Any] = {"cells": []}


def test_measured_beside_predicted_with_the_least_of_each_in_bold() -> None:
    lines = tables(MEASURED, PREDICTED)
    assert "| policy | 1b, 25 % |" in lines
    assert "| `stock-fit` | 3.00 |" in lines  # of three samples in two benches
    assert "| `layers` | 3.00 (3.00) |" in lines
    assert "| `scheinfer` | 2.10 (**1.50**) |" in lines
    assert "| `auto` | **2.00** (1.50) |" in lines


def test_the_winner_and_what_is_busy_while_it_runs() -> None:
    (row,) = [line for line in tables(MEASURED, PREDICTED) if line.startswith("| 1b, 25 %")]
    assert row == (
        "| 1b, 25 % | `scheinfer` = `auto` | `layers` | 100 % | link 97 %; CPU 98 %, link 90 % | `auto` | 1.40 | 1.48 |"
    )


def test_an_arm_is_held_against_the_stock_arm_of_its_own_bench() -> None:
    lines = tables(MEASURED, PREDICTED, shares=True)
    assert "| 25 % | `auto` | 40/10/50 | 98/10/90 | 500 | 500 | 110 | 100 | 1.40 |" in lines


def test_what_has_no_time_is_listed_with_the_reason() -> None:
    lines = tables(MEASURED, PREDICTED)
    assert lines[-2:] == ["- 1b, 25 %, `cpu`: it does not fit.", "- 1b, 25 %, `hetegen`: lost."]
    assert "| `hetegen` |  |" in lines


@pytest.mark.parametrize(
    ("found", "ending"),
    [
        ((NOTHING, PREDICTED), "CPU 98 %, link 90 % | - | - | - |"),
        ((MEASURED, NOTHING), "| `auto` | 0 % | - | `auto` | 1.40 | 1.40 |"),
    ],
)
def test_half_of_it_is_shown_where_there_is_but_half(found: tuple[Any, Any], ending: str) -> None:
    assert [line for line in tables(*found) if line.endswith(ending)]


def test_lines_go_between_the_comments_of_their_name() -> None:
    page = "# A\n<!-- x -->\nold\n<!-- end of x -->\nrest\n"
    once = with_section(page, "x", ["| a |"])
    assert once == "# A\n<!-- x -->\n\n| a |\n\n<!-- end of x -->\nrest\n"
    assert with_section(once, "x", ["| a |"]) == once
    with pytest.raises(ValueError, match="needs the comments"):
        with_section(page, "y", [])


def test_a_kept_report_has_no_place_of_each_weight() -> None:
    report = {"name": "n", "about": "a", "machine": {}, "complete": True, "figures": [], **MEASURED}
    kept = slim(report)
    assert set(kept) == {"name", "about", "machine", "complete", "cells"}
    assert "placement" not in kept["cells"][0]["rows"][0]
    assert tables(kept, PREDICTED) == tables(MEASURED, PREDICTED)
