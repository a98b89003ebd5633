"""Many machines with few runs each: what their data sheets say, what a fit of a third of the rows says of the others,
and what a plan of ours is predicted to gain. Writes docs/real-card.md, pictures/machines.svg, and the JSON that both
are made of.

A table has COLUMNS and build, flag and source; docs/benchmarks/machines.toml has each machine's data sheet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, exp, log
from pathlib import Path
from statistics import median
from typing import Any

from card_model import (
    CardModel,
    DataSheet,
    FittedMachine,
    Predictor,
    PublishedRun,
    by_data_sheet,
    graph_of,
    rates,
    read_csv,
    read_models,
)
from reproduce.problems import Reckoned
from shared import ROOT, read_toml, record, table

from oallama.core.errors import DoesNotFit
from oallama.core.types import Workload
from oallama.place.attention import with_attention
from oallama.place.decide import decide
from oallama.place.placement import Placed
from oallama.place.price import price
from oallama.place.problem import Problem
from oallama.profile.described import TOKENS, described
from oallama.report.chart import GREY, INK, Bar, Picture, Text

DOCS = ROOT / "docs"
SHEETS, MODELS = (DOCS / "benchmarks" / name for name in ("machines.toml", "real-card-models.toml"))
RESULTS, PAGE, PICTURE = (DOCS / name for name in ("benchmarks/machines.json", "real-card.md", "pictures/machines.svg"))
TEXT = Path(__file__).with_name("real_card.md")
COLUMNS = (
    "machine",
    "model",
    "quant",
    "ngl",
    "ncmoe",
    "ncffn",
    "context",
    "kv",
    "pp_test",
    "pp_tps",
    "tg_test",
    "tg_tps",
)

PHASES = {"eval": "tokens", "prompt": "prompts"}
FEWEST, MANY = 4, 12  # rows of a phase from which on one rate is fitted, and three
NAMES = {
    "eval": ("host.bytes_per_s", "card.bytes_per_s", "card.synchronize_s"),
    "prompt": ("card.pageable_bytes_per_s", "card.flops_per_s", "first_prompt_s"),
}
"""Rates of each phase: the one that is fitted first, and those that are fitted too where there are many rows."""

SPILLED = ("spill", "pressure")
NOT_STOCK = ("branch", "cpu only")
Q8_0_BYTES = 34 / 32  # of an element
CLOSE = 0.15  # median error up to which a plan is made for a machine
SERVED = 1000  # tokens in the cache of a server whose report does not say how many

Fit = Callable[..., FittedMachine]
Models = Mapping[str, CardModel]
Row = dict[str, Any]


def read_runs(path: Path, sheets: Mapping[str, DataSheet]) -> list[PublishedRun]:
    """All rows but those of other programs than stock llama.cpp with its card. Raises InputError."""
    rows = [row for _, row in read_csv(path, COLUMNS)]
    return [_run(row, sheets[row["machine"]]) for row in rows if not any(word in row["flag"] for word in NOT_STOCK)]


def _run(row: Mapping[str, str], sheet: DataSheet) -> PublishedRun:
    served = row["tg_test"].startswith("server")
    prompt = re.search(r"(\d+) tok|pp(\d+)|@(\d+)k", row["pp_test"])
    n_prompt = (int(prompt[1] or prompt[2] or 0) or 1000 * int(prompt[3])) if prompt else SERVED if served else 0
    ubatch = re.search(r"(?:ub|batch )(\d+)", f"{row['flag']} {row['build']}")
    n_gen = re.search(r"tg(\d+)", row["tg_test"])
    return PublishedRun(
        f"{row['model']} {row['quant']}", int(row["context"] or 0), int(row["ngl"] or 99),
        int(ubatch[1]) if ubatch else 512, None, n_prompt, int(n_gen[1]) if n_gen else 128,
        float(row["pp_tps"] or 0), float(row["tg_tps"] or 0), row["machine"],
        int(row["context"] or 0) if sheet.context_is_depth else 0, int(row["ncmoe"] or 0), int(row["ncffn"] or 0),
        True, served, row["flag"], row["source"], row["kv"],
    )  # fmt: skip


#
# one machine
#


@dataclass(frozen=True)
class Errors:
    """Number of rows of a phase, and the median and worst |predicted / measured - 1|."""

    rows: int
    median: float
    worst: float


def errors(runs: Sequence[PublishedRun], predictor: Predictor, phase: str) -> Errors | None:
    off = [abs(getattr(predictor(run), f"{phase}_tps") / measured(run, phase) - 1) for run in runs]
    return Errors(len(off), median(off), max(off)) if off else None


def measured(run: PublishedRun, phase: str) -> float:
    return float(getattr(run, f"{phase}_tps"))


def fitted(runs: Sequence[PublishedRun], models: Models, start: FittedMachine, phase: str, fit: Fit) -> tuple[
    FittedMachine, list[PublishedRun]
]:  # fmt: skip
    """The machine with the phase's rates from a third of its rows, evenly from the first to the last; the others."""
    names = NAMES[phase] if len(runs) >= MANY else NAMES[phase][:1]
    n_used = max(ceil(len(runs) / 3), len(names))
    used = {round(i * (len(runs) - 1) / max(1, n_used - 1)) for i in range(n_used)}
    machine = fit([runs[i] for i in sorted(used)], models, start, names, (phase,))
    return machine, [run for i, run in enumerate(runs) if i not in used]


def study(sheet: DataSheet, runs: Sequence[PublishedRun], models: Models, fit: Fit) -> Row:
    """All that the page says of a machine."""
    usual = [run for run in runs if run.model in models and not any(word in run.flag for word in SPILLED)]
    machine = start = by_data_sheet(sheet)
    row: Row = {"name": sheet.name, "rows": len(runs), "not_described": sorted({r.model for r in runs} - {*models})}
    points: list[Row] = []
    for phase in PHASES:
        own = [run for run in usual if measured(run, phase)]
        if own and (sheet.known if phase == "eval" else sheet.has_card):
            by_sheet = errors(own, Predictor(start, models, own), phase)
            row[f"{phase}_by_data_sheet"] = asdict(by_sheet) if by_sheet else None
        left = own
        if len(own) >= FEWEST:
            machine, left = fitted(own, models, machine, phase, fit)
            found = errors(left, Predictor(machine, models, own), phase)
            row[f"{phase}_fitted"] = asdict(found) if found else None
            row |= rates(machine, NAMES[phase])
        predictor = Predictor(machine, models, own)
        if len(own) >= FEWEST or f"{phase}_by_data_sheet" in row:
            points += [
                {**_asked(run), "phase": phase, "measured": measured(run, phase), "fitted": run not in left,
                 "predicted": getattr(predictor(run), f"{phase}_tps")} for run in own
            ]  # fmt: skip
    memory = sheet.preset or sheet.memory_gib
    spilled = [run for run in runs if run.model in models and any(word in run.flag for word in SPILLED)]
    if memory and spilled:
        row["spilled"] = [len(spilled), sum(overflows(run, models, machine) for run in spilled)]
    if memory and usual:
        row["held"] = [len(usual), sum(not overflows(run, models, machine) for run in usual)]
    if memory and all(_close(row.get(f"{phase}_fitted")) for phase in PHASES) and (best := _best(usual)):
        row["plan"] = plan(best, models, machine)
    return {**row, "points": points}


def _close(found: Row | None) -> bool:
    return found is not None and found["median"] <= CLOSE


def _asked(run: PublishedRun) -> Row:
    left_out = ("machine", "prompt_tps", "eval_tps", "today", "budget_mb")
    return {key: value for key, value in run.told().items() if value and key not in left_out}


def _best(runs: Sequence[PublishedRun]) -> PublishedRun | None:
    """The fastest llama-bench row with a prompt and tokens, of the model with the most rows."""
    models = [run.model for run in runs]
    whole = [run for run in runs if run.prompt_tps and run.eval_tps and run.model == max(models, key=models.count)]
    return min(whole, key=lambda run: 512 / run.prompt_tps + 128 / run.eval_tps, default=None)


def problem(model_name: str, models: Models, machine: FittedMachine, n_ubatch: int) -> tuple[Problem, Reckoned]:
    model = models[model_name]
    tokens = sorted({*TOKENS, n_ubatch})
    profile = with_attention(described(machine.host, machine.card, model.info, model.operators, tokens), "on")
    reckoned = Reckoned(model.info, model.operators, profile)
    return Problem(model.operators, graph_of(model), profile, reckoned, None, 1.0, None, host_room=2**63 - 1), reckoned


def overflows(run: PublishedRun, models: Models, machine: FittedMachine) -> bool:
    """Whether what a run puts on the card is more than the card has."""
    model = models[run.model]
    _, reckoned = problem(run.model, models, machine, run.ubatch)
    n_layer = model.info.n_layer
    there = tuple(run.on_device(operator, n_layer) for operator in model.operators)
    load = Workload(512, 128, max(run.context, run.n_prompt + 256), run.ubatch)
    needed = reckoned(load, Placed(there, run.first_layer(n_layer)))
    kv = needed.kv * (Q8_0_BYTES / 2 if run.kv == "q8_0" else 1)
    return needed.weights_gpu + kv + needed.compute > machine.card.memory_bytes


def plan(best: PublishedRun, models: Models, machine: FittedMachine) -> Row:
    """The fastest plan of ours for 512 and 128 tokens beside the fastest placement measured, both predicted."""
    asked, _ = problem(best.model, models, machine, 512)
    load = Workload(512, 128, 1024, 512)
    run = replace(best, n_prompt=512, n_gen=128, ubatch=512, depth=0, context=1024)
    stock = Predictor(machine, models, [run])(run)
    found: Row = {
        "model": best.model, "stock": _asked(best), "measured": [best.prompt_tps, best.eval_tps],
        "stock_tps": [stock.prompt_tps, stock.eval_tps],
    }  # fmt: skip
    for policy in ("oato", "scheinfer"):
        try:
            made = decide(asked, policy, load, "mixed", quick=True)
        except DoesNotFit:
            continue
        ours = price(asked, made.workload, made.placed)
        stock_s = 512 / stock.prompt_tps + 128 / stock.eval_tps
        if stock_s / ours.total_s > found.get("gain", 0.0):
            found |= {"policy": policy, "gain": stock_s / ours.total_s, "tps": [512 / ours.ttft_s, 1 / ours.tpot_s]}
    return found


#
# the page and its picture
#


def write_machines(path: Path | None, fit: Fit) -> int:
    """Predict the runs of a table and write JSON, page and picture; without a table the last two, from the JSON.
    Returns the exit status. Raises InputError, OallamaError."""
    if path is not None:
        sheets = {key: record(DataSheet, each, f"{SHEETS}: {key}") for key, each in read_toml(SHEETS).items()}
        runs, models = read_runs(path, sheets), read_models(MODELS)
        made = {key: study(sheet, [r for r in runs if r.machine == key], models, fit) for key, sheet in sheets.items()}
        lines = ",\n".join(f'"{key}": {json.dumps(_short(row), ensure_ascii=False)}' for key, row in made.items())
        RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(document), encoding="utf-8")
    PICTURE.write_text(Panels("Measured and predicted tokens per second of each machine", document).svg(), "utf-8")
    return 0


def _short(value: Any) -> Any:
    """Numbers to five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def page(document: Mapping[str, Row]) -> str:
    """Within the text of real_card.md: the table of errors, their medians, what overflows, and our plans."""
    kinds = [f"{what}: {how}" for what in PHASES.values() for how in ("data sheet", "a third fitted")]
    rows = [
        (f"{key} {row['name']}", row["rows"], *(_error(row.get(f"{phase}_{how}")) for phase in PHASES for how in WAYS))
        for key, row in document.items()
    ]
    rows.append(("**median of machines**", "", *_medians(document)))
    plans = [
        (f"{key} {row['name']}", *_plan(row["plan"]))
        for key, row in document.items()
        if row.get("plan", {}).get("policy")
    ]
    spilled, held = (
        [sum(row[key][i] for row in document.values() if key in row) for i in (0, 1)] for key in ("spilled", "held")
    )
    values = {
        "machines": "\n".join(table(("machine", "rows", *kinds), rows)[:-1]),
        "plans": "\n".join(table(PLAN_COLUMNS, plans)[:-1]),
        "n_rows": sum(row["rows"] for row in document.values()),
        "n_machines": len(document),
        "spilled": f"{spilled[1]} of {spilled[0]}",
        "held": f"{held[1]} of {held[0]}",
        **dict(zip(MEDIANS, _medians(document), strict=True)),
        "not_described": ", ".join(sorted({name for row in document.values() for name in row["not_described"]})),
    }
    text = TEXT.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"<{key}>", str(value))
    return text


WAYS = ("by_data_sheet", "fitted")
MEDIANS = ("tokens_sheet", "tokens_fitted", "prompts_sheet", "prompts_fitted")
PLAN_COLUMNS = ("machine", "model", "stock's best", "measured", "predicted", "ours", "gain")


def _error(found: Row | None) -> str:
    return f"{found['median']:.0%}, {found['worst']:.0%} ({found['rows']})" if found else ""


def _medians(document: Mapping[str, Row]) -> Iterator[str]:
    for phase in PHASES:
        for how in WAYS:
            found = [row[f"{phase}_{how}"]["median"] for row in document.values() if row.get(f"{phase}_{how}")]
            yield f"{median(found):.0%} ({len(found)} machines)" if found else ""


def _plan(row: Row) -> tuple[str, ...]:
    stock = row["stock"]
    placed = " ".join(f"-{key} {stock[key]}" for key in ("ngl", "ncmoe", "ncffn") if stock.get(key))
    pairs = (f"{prompt:.0f}, {token:.1f}" for prompt, token in (row["measured"], row["stock_tps"], row["tps"]))
    shown = (row["model"], placed, *pairs)
    return (*shown[:-1], f"{shown[-1]} ({row['policy']})", f"{row['gain']:.2f}×")


COLOURS = {"eval": "#0b5cad", "prompt": "#c2571a"}
ACROSS, SIDE, GAP, TOP, MARK = 5, 140, 36, 70, 5  # pixels, but for the first: panels in a row


@dataclass(frozen=True)
class Panels(Picture):
    """A square for each machine, both axes tokens/s on one logarithmic scale: a run on the diagonal is predicted as it
    was measured. A hollow mark was fitted to."""

    label: str
    machines: Mapping[str, Row]

    @property
    def shown(self) -> list[tuple[str, Row]]:
        return [(key, row) for key, row in self.machines.items() if row["points"]]

    @property
    def height(self) -> int:
        return TOP + ceil(len(self.shown) / ACROSS) * (SIDE + GAP + 10)

    def shapes(self) -> Iterator[Bar | Text]:
        yield Text(24, 28, "Measured (across) and predicted (up), tokens per second", 16)
        for i, (phase, what) in enumerate(PHASES.items()):
            yield Bar(24 + 130 * i, 40, 10, 10, COLOURS[phase])
            yield Text(40 + 130 * i, 50, what, 12)
        yield Text(284, 50, "hollow: the rates are from it; dashed: the same", 12, GREY)
        for i, (key, row) in enumerate(self.shown):
            x, y = 24 + i % ACROSS * (SIDE + GAP), TOP + 16 + i // ACROSS * (SIDE + GAP + 10)
            yield Text(x, y - 5, f"{key} {row['name']}"[:27], 10)
            yield from _panel(x, y, row["points"])


def _panel(x: float, y: float, points: Sequence[Row]) -> Iterator[Bar | Text]:
    values = [log(point[key]) for point in points for key in ("measured", "predicted")]
    low, high = min(values) - 0.2, max(values) + 0.2

    def along(value: float) -> float:
        return SIDE * (log(value) - low) / (high - low)

    for n in range(0, SIDE, 7):
        yield Bar(x + n, y + SIDE - n - 1, 3, 1, GREY)
    yield Bar(x, y + SIDE, SIDE, 1, INK)
    yield Bar(x, y, 1, SIDE, INK)
    yield Text(x, y + SIDE + 12, _rate(exp(low)), 9, GREY)
    yield Text(x + SIDE, y + SIDE + 12, _rate(exp(high)), 9, GREY, ends_at_x=True)
    for point in points:
        left, top = x + along(point["measured"]) - MARK / 2, y + SIDE - along(point["predicted"]) - MARK / 2
        yield Bar(left, top, MARK, MARK, COLOURS[point["phase"]])
        if point["fitted"]:
            yield Bar(left + 1, top + 1, MARK - 2, MARK - 2, "#ffffff")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
