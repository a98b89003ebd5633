"""Comparison of arms over cells: against the best stock arm of each, the no-harm figure, means. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from oallama.bench.stats import speed_ratio

Row = Mapping[str, Any]
Place = tuple[str, str, str, str]  # of a cell: as PLACE
PLACE = ("device", "model", "cap", "workload")
METRICS: Mapping[str, str] = {"total": "samples_ns", "ttft": "samples_ttft_s", "tpot": "samples_tpot_s"}
"""Metric -> the row's samples, of which less is better."""

NO_HARM = 0.98
"""What is demanded of an arm in every cell, against the best stock arm."""


@dataclass(frozen=True)
class Comparison:
    """An arm against the best stock arm of a cell, by one metric. value above 1: faster; low and high: 95 %.

    same: it is that stock arm's very configuration, so it is as fast, whatever the samples say; what they say is then
    `noise`. refused: why there is no number.
    """

    device: str
    model: str
    cap: str
    workload: str
    arm: str
    metric: str
    stock: str
    value: float | None
    low: float | None
    high: float | None
    same: bool = False
    refused: str = ""
    noise: float | None = None

    def text(self, digits: int = 3) -> str:
        """`1.250 (1.200..1.300)`, or why there is none."""
        if self.value is None:
            return f"none: {self.refused}"
        shown = f"{self.value:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"
        return "1 (same)" if self.same else shown


@dataclass(frozen=True)
class Figures:
    """One arm over all cells, by one metric: the worst and the best cell, and the geometric mean."""

    arm: str
    metric: str
    worst: Comparison
    best: Comparison
    mean: float
    n_cells: int
    n_harmed: int  # cells below NO_HARM
    n_surely: int  # of these, cells whose whole interval lies below it
    n_same: int  # cells in which it is the best stock arm's very configuration


def is_stock(arm: str) -> bool:
    return arm.startswith("stock")


def compare_with_stock(place: Place, rows: Sequence[Row], metric: str, seed: int = 0) -> list[Comparison]:
    """Every arm that is not stock's, in order. The best stock arm is the one with the least mean time that did what it
    says."""
    key = METRICS[metric]
    honest = [row for row in rows if is_stock(row["arm"]) and row[key] and not row["problems"]]
    if not honest:
        return []
    best = min(honest, key=lambda row: sum(row[key]) / len(row[key]))
    found = []
    for row in rows:
        if is_stock(row["arm"]) or not row[key]:
            continue
        whose = (*place, row["arm"], metric, best["arm"])
        ratio = speed_ratio(best[key], row[key], seed=seed)
        if row["problems"]:
            found.append(Comparison(*whose, None, None, None, refused=row["problems"][0]))
        elif (row["same_as"] or row["arm"]) == (best["same_as"] or best["arm"]):
            found.append(Comparison(*whose, 1.0, 1.0, 1.0, same=True, noise=ratio.value if ratio else None))
        elif ratio is None:
            found.append(Comparison(*whose, None, None, None, refused="too few samples"))
        else:
            found.append(Comparison(*whose, ratio.value, ratio.low, ratio.high))
    return found


def gates(place: Place, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the gate said of the arms that passed it: the line, what it uses ("": stock's placement), what it took."""
    return [
        {**dict(zip(PLACE, place, strict=True)), "said": gate["said"], "winner": gate["winner"] or "",
         "seconds": gate["seconds"], "remembered": gate["remembered"]}
        for gate in (row.get("gate") for row in rows) if gate
    ]  # fmt: skip


def figures(found: Sequence[Comparison]) -> list[Figures]:
    """For each arm and metric, over the cells that have a number."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in found:
        if each.value is not None:
            groups.setdefault((each.arm, each.metric), []).append(each)
    made = []
    for (arm, metric), cells in groups.items():
        values = [each.value for each in cells if each.value is not None]
        made.append(
            Figures(
                arm=arm,
                metric=metric,
                worst=min(cells, key=lambda each: each.value or 0.0),
                best=max(cells, key=lambda each: each.value or 0.0),
                mean=geometric_mean(values),
                n_cells=len(cells),
                n_harmed=sum(value < NO_HARM for value in values),
                n_surely=sum(each.high is not None and each.high < NO_HARM for each in cells),
                n_same=sum(each.same for each in cells),
            )
        )
    return made


def predictions(place: Place, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Predicted and measured TTFT and TPOT of every arm that predicts, and what no placement takes less than (None:
    from before that was recorded)."""
    found = []
    for row in rows:
        for metric in ("ttft", "tpot"):
            predicted, samples = (row["predicted"] or {}).get(f"{metric}_s"), row[METRICS[metric]]
            if predicted and samples:
                found.append(
                    {**dict(zip(PLACE, place, strict=True)), "arm": row["arm"],
                     "metric": metric, "predicted_s": predicted, "measured_s": sum(samples) / len(samples),
                     "bound_s": (row.get("bound") or {}).get(f"{metric}_s")}
                )  # fmt: skip
    return found
