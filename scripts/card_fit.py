"""Fit a machine's few rates to runs of stock llama.cpp on a real card, and predict runs by the product's cost model.

    scripts/real_card fit TABLE.csv --models MODELS.toml -o MACHINE.json             # from a few of the rows
    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json  # the others, with the errors
    scripts/real_card machines TABLE.csv             # many machines with few rows each (docs/real-card.md)

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS. MODELS.toml describes
each model by its sizes. docs/real-card.md says what came of it on an RTX 5090.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from card_model import (
    START,
    CardModel,
    DataSheet,
    Machine,
    Predictor,
    PublishedRun,
    by_data_sheet,
    graph_of,
    rates,
    read_csv,
    read_machine,
    read_models,
    read_tables,
    with_rates,
    write_machine,
)
from reproduce.problems import Reckoned
from shared import ROOT, InputError, guarded, parser_of, read_toml, record, table, write_document

from oallama.core.errors import DoesNotFit
from oallama.core.types import Workload
from oallama.device.cards import CARDS
from oallama.place.attention import with_attention
from oallama.place.decide import decide
from oallama.place.placement import Placed
from oallama.place.price import price
from oallama.place.problem import Problem
from oallama.profile.described import TOKENS, described
from oallama.report.chart import GREY, INK, Bar, Picture, Text

Vector = npt.NDArray[np.float64]
Row = dict[str, Any]
Lever = tuple[str, ...]
"""Rates that are fitted together, by one factor."""
PHASES = ("prompt", "eval")

FITTED = (
    "host.bytes_per_s",
    "host.flops_attention_per_s",
    "host.flops_by_type.Q6_K",
    "card.bytes_per_s",
    "card.flops_per_s",
    "card.flops_float_per_s",
    "card.kernel_s",
    "card.pageable_bytes_per_s",
    "first_prompt_s",
)
"""The rates that many runs of stock llama.cpp at several depths tell. The others are constants of START: nothing in
such runs depends on the pinned link, and the small latencies cannot be told from card.kernel_s and card.copy_s."""
ALONE: tuple[Lever, ...] = tuple((name,) for name in FITTED)

#
# the fit
#

TRUSTED = 0.15  # log ratio up to which a run counts fully (Huber)
STEP = 0.02  # of a factor's logarithm, for slopes
MAX_ROUNDS = 60
LEAST_GAIN = 1e-4  # of the loss; a round that gains less is the last
FURTHEST = 1.0  # that one round moves a factor's logarithm


def fit(
    runs: Sequence[PublishedRun],
    models: Mapping[str, CardModel],
    start: Machine = START,
    levers: Sequence[Lever] = ALONE,
    phases: Sequence[str] = PHASES,
) -> Machine:
    """The machine that predicts best what was measured of these phases. Levenberg-Marquardt over the factors'
    logarithms, so that no rate gets negative."""
    x = np.zeros(len(levers))
    begin = rates(start, [name for lever in levers for name in lever])

    def machine(point: Vector) -> Machine:
        factors = zip(levers, np.exp(point).tolist(), strict=True)
        return with_rates(start, {name: begin[name] * factor for lever, factor in factors for name in lever})

    def residuals(point: Vector) -> Vector:
        return misses(machine(point), runs, models, phases)

    damping, now = 1e-2, residuals(x)
    for _ in range(MAX_ROUNDS):
        slopes = np.column_stack([(residuals(x + step) - now) / STEP for step in STEP * np.eye(len(x))])
        weights = np.minimum(1.0, TRUSTED / np.maximum(np.abs(now), 1e-12))
        normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * now)
        gained = 0.0
        while damping < 1e6:
            scale = np.diag(np.diag(normal) + 1e-9)
            moved = x - np.clip(np.linalg.solve(normal + damping * scale, gradient), -FURTHEST, FURTHEST)
            then = residuals(moved)
            gained = 1 - loss(then) / loss(now)
            if gained > 0:
                x, now, damping = moved, then, damping / 4
                break
            damping *= 4
        if gained < LEAST_GAIN:
            break
    return replace(machine(x), notes=dict(start.notes))


def misses(
    machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, CardModel], phases: Sequence[str]
) -> Vector:
    """Logarithms of predicted by measured."""
    predictor = Predictor(machine, models, runs)
    off: Vector = np.log([predictor(run, phase) / measured(run, phase) for run in runs for phase in phases
                          if measured(run, phase)])  # fmt: skip
    return off


def measured(run: PublishedRun, phase: str) -> float:
    return float(getattr(run, f"{phase}_tps"))


def loss(off: Vector) -> float:
    """Huber's: squares up to TRUSTED, then straight on."""
    size = np.abs(off)
    return float(np.sum(np.where(size <= TRUSTED, size**2 / 2, TRUSTED * (size - TRUSTED / 2))))


#
# errors
#


def rows_of(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, CardModel]) -> list[Row]:
    """Every run with its prediction."""
    predictor = Predictor(machine, models, runs)
    return [{**run.told(), **{f"{phase}_tps_predicted": predictor(run, phase) for phase in PHASES}} for run in runs]


def error(row: Row, phase: str) -> float:
    """0.1: predicted a tenth faster than it was."""
    ratio: float = row[f"{phase}_tps_predicted"] / row[f"{phase}_tps"]
    return ratio - 1


def median_error(rows: Sequence[Row], phase: str) -> float:
    return median(abs(error(row, phase)) for row in rows)


def worst(rows: Sequence[Row], phase: str) -> Row:
    return max(rows, key=lambda row: abs(error(row, phase)))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The record that --json prints."""
    far = {phase: worst(rows, phase) for phase in PHASES}
    which = ("model", "context", "ngl", "ubatch")
    return {
        "rows": list(rows),
        "median_error": {phase: median_error(rows, phase) for phase in PHASES},
        "worst_error": {p: {"error": error(row, p), **{key: row[key] for key in which}} for p, row in far.items()},
    }


def text(rows: Sequence[Row]) -> str:
    """Median error, lean and worst, a line for each model and context, prompt and generation apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']}, {row['context']}", []).append(row)
    lines = [f"{'model, context':24}{'runs':>6}" + "".join(f"   {phase:>6}: median  lean  worst" for phase in PHASES)]
    for name, group in [*sorted(groups.items()), ("all", list(rows))]:
        cells = (
            f"{median_error(group, phase):17.1%}{median(error(row, phase) for row in group):+7.1%}"
            f"{error(worst(group, phase), phase):+6.0%}" for phase in PHASES
        )  # fmt: skip
        lines.append(f"{name:24}{len(group):6}{''.join(cells)}")
    return "\n".join(lines)


#
# many machines with few runs each: docs/real-card.md, a picture, and the JSON that both are made of
#

DOCS = ROOT / "docs"
SHEETS, MODELS = (DOCS / "benchmarks" / name for name in ("machines.toml", "real-card-models.toml"))
RESULTS, PAGE, PICTURE = (DOCS / name for name in ("benchmarks/machines.json", "real-card.md", "pictures/machines.svg"))
TEXT = Path(__file__).with_name("real_card.md")
COLUMNS = (
    *("machine", "model", "quant", "ngl", "ncmoe", "ncffn", "context", "kv"),
    *("pp_test", "pp_tps", "tg_test", "tg_tps", "build", "flag", "source"),
)
SPILLED, NOT_STOCK = ("spill", "pressure"), ("branch", "cpu only")  # flags

LEVERS: dict[str, tuple[Lever, ...]] = {
    "prompt": (("card.pageable_bytes_per_s",), ("card.flops_per_s",), ("first_prompt_s",)),
    "eval": (("host.bytes_per_s", "host.flops_per_s"), ("card.bytes_per_s",), ("card.kernel_s",),
             ("card.synchronize_s",)),
}  # fmt: skip
"""Rates that may be fitted of a phase."""
FEWEST, MANY = 4, 12  # rows of a phase from which on one lever is fitted, and three
SIX = 6  # rows of a phase from which on a card that nobody named is chosen, too

CLOSE = 0.15  # median error up to which a plan is made for a machine
SERVED = 1000  # tokens in the prompt of a server whose report does not say how many
Q8_0_SHARE = 34 / 64  # of the bytes of a cache of f16


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
        int(ubatch[1]) if ubatch else 512, n_prompt, int(n_gen[1]) if n_gen else 128,
        float(row["pp_tps"] or 0), float(row["tg_tps"] or 0), row["machine"],
        int(row["context"] or 0) if sheet.context_is_depth else 0, int(row["ncmoe"] or 0), int(row["ncffn"] or 0),
        True, served, row["flag"], row["source"], row["kv"],
    )  # fmt: skip


def fitted(
    runs: Sequence[PublishedRun], models: Mapping[str, CardModel], start: Machine, phase: str, named: bool
) -> tuple[Machine, list[str], list[PublishedRun]]:
    """A machine with levers of a phase moved, one after another, each time the one that leaves the least error; the
    rates it moved; the rows that it was fitted to: a third, evenly from the first to the last.

    named: whether the report names the card; if not, it is the card of `what-if` that leaves the least error."""
    n_levers = 3 if len(runs) >= MANY else 1
    n_used = max(ceil(len(runs) / 3), n_levers)
    used = [runs[i] for i in sorted({round(i * (len(runs) - 1) / max(1, n_used - 1)) for i in range(n_used)})]
    levers = LEVERS[phase] if n_levers > 1 or phase == "eval" else LEVERS[phase][:2]  # a delay alone explains nothing
    choose = not named and phase == "prompt" and len(runs) >= SIX
    found = []
    for begin in [replace(start, card=card) for card in CARDS.values()] if choose else [start]:
        machine = begin
        moved: tuple[Lever, ...] = ()
        while len(moved) < n_levers:
            tried = [(fit(used, models, begin, (*moved, each), (phase,)), each) for each in levers if each not in moved]
            machine, best = min(tried, key=lambda pair: loss(misses(pair[0], used, models, (phase,))))
            moved = (*moved, best)
        found.append((machine, moved))
    machine, moved = min(found, key=lambda pair: loss(misses(pair[0], used, models, (phase,))))
    return machine, [lever[0] for lever in moved], used


def study(sheet: DataSheet, runs: Sequence[PublishedRun], models: Mapping[str, CardModel]) -> Row:
    """Figures of a machine for the page."""
    known = [run for run in runs if run.model in models]
    spilled = [run for run in known if any(word in run.flag for word in SPILLED)]
    usual = [run for run in known if run not in spilled]
    machine = start = by_data_sheet(sheet)
    row: Row = {"name": sheet.name, "rows": len(runs), "not_described": sorted({r.model for r in runs} - {*models})}
    points: list[Row] = []
    for phase in PHASES:
        own, used = [run for run in usual if measured(run, phase)], list[PublishedRun]()
        if own and sheet.names_card and (phase == "prompt" or sheet.dram_gb_per_s):
            row[f"{phase}_by_data_sheet"] = errors(start, own, models, phase)
        if len(own) >= FEWEST:
            machine, moved, used = fitted(own, models, machine, phase, sheet.names_card)
            row[f"{phase}_fitted"] = errors(machine, [run for run in own if run not in used], models, phase)
            row |= rates(machine, moved)
        if used or f"{phase}_by_data_sheet" in row:
            predictor = Predictor(machine, models, own)
            points += [{**_asked(run), "phase": phase, "measured": measured(run, phase), "fitted": run in used,
                        "predicted": predictor(run, phase)} for run in own]  # fmt: skip
    if machine.card.name in CARDS and not sheet.names_card and "prompt_fitted" in row:
        row["card"] = machine.card.name
    has_memory = bool(sheet.preset or sheet.memory_gib)
    for key, asked, beyond in (("spilled", spilled, True), ("held", usual, False)):
        if has_memory and asked:
            row[key] = [len(asked), sum((excess_bytes(run, models, machine) > 0) == beyond for run in asked)]
    close = all(row.get(f"{phase}_fitted", {"median": 1})["median"] <= CLOSE for phase in PHASES)
    if has_memory and close and (best := _best(usual)):
        row["plan"] = plan(best, models, machine)
    return {**row, "points": points}


def errors(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, CardModel], phase: str) -> Row:
    off = np.abs(np.expm1(misses(machine, runs, models, (phase,))))
    return {"rows": len(runs), "median": float(np.median(off)), "worst": float(np.max(off))}


def _asked(run: PublishedRun) -> Row:
    left_out = ("machine", "prompt_tps", "eval_tps", "today")
    return {key: value for key, value in run.told().items() if value and key not in left_out}


def _best(runs: Sequence[PublishedRun]) -> PublishedRun | None:
    """The fastest llama-bench row with a prompt and tokens, of the model with the most rows."""
    models = [run.model for run in runs]
    whole = [run for run in runs if run.prompt_tps and run.eval_tps and run.model == max(models, key=models.count)]
    return min(whole, key=lambda run: 512 / run.prompt_tps + 128 / run.eval_tps, default=None)


def problem(model: CardModel, machine: Machine, n_ubatch: int) -> tuple[Problem, Reckoned]:
    tokens = sorted({*TOKENS, n_ubatch})
    profile = with_attention(described(machine.host, machine.card, model.info, model.operators, tokens), "on")
    reckoned = Reckoned(model.info, model.operators, profile)
    return Problem(model.operators, graph_of(model), profile, reckoned, None, 1.0, None, host_room=2**63 - 1), reckoned


def excess_bytes(run: PublishedRun, models: Mapping[str, CardModel], machine: Machine) -> float:
    """Bytes that a run puts on the card beyond what the card has. llama-bench's cache is no larger than its test."""
    model = models[run.model]
    n_layer = model.info.n_layer
    there = tuple(run.on_device(operator, n_layer) for operator in model.operators)
    served = run.context if run.after_prompt else run.depth
    load = Workload(512, 128, max(served, run.n_prompt + 256), run.ubatch)
    needed = problem(model, machine, run.ubatch)[1](load, Placed(there, run.first_layer(n_layer)))
    kv = needed.kv * (Q8_0_SHARE if run.kv == "q8_0" else 1)
    return needed.weights_gpu + kv + needed.compute - machine.card.memory_bytes


def plan(best: PublishedRun, models: Mapping[str, CardModel], machine: Machine) -> Row:
    """The fastest plan of ours for 512 and 128 tokens beside the fastest placement measured, both predicted."""
    asked, _ = problem(models[best.model], machine, 512)
    load = Workload(512, 128, 1024, 512)
    run = replace(best, n_prompt=512, n_gen=128, ubatch=512, depth=0, context=1024)
    predictor = Predictor(machine, models, [run])
    stock = [predictor(run, phase) for phase in PHASES]
    found: Row = {
        "model": best.model, "stock": _asked(best), "measured": [best.prompt_tps, best.eval_tps],
        "stock_tps": stock,
    }  # fmt: skip
    for policy in ("oato", "scheinfer"):
        try:
            made = decide(asked, policy, load, "mixed", quick=True)
        except DoesNotFit:
            continue
        ours = price(asked, made.workload, made.placed)
        gain = (512 / stock[0] + 128 / stock[1]) / ours.total_s
        if gain > found.get("gain", 0.0):
            found |= {"policy": policy, "gain": gain, "tps": [512 / ours.ttft_s, 1 / ours.tpot_s]}
    return found


def write_machines(path: Path | None) -> int:
    """Predict the runs of a table and write JSON, page and picture; without a table the last two, from the JSON.
    Returns the exit status. Raises InputError, OallamaError."""
    if path is not None:
        sheets = {key: record(DataSheet, each, f"{SHEETS}: {key}") for key, each in read_toml(SHEETS).items()}
        runs, models = read_runs(path, sheets), read_models(MODELS)
        made = {key: study(sheet, [r for r in runs if r.machine == key], models) for key, sheet in sheets.items()}
        lines = ",\n".join(f'"{key}": {json.dumps(_short(row), ensure_ascii=False)}' for key, row in made.items())
        RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(results), encoding="utf-8")
    PICTURE.write_text(Panels("Measured and predicted tokens per second of each machine", results).svg(), "utf-8")
    return 0


def _short(row: Row) -> Row:
    """Numbers to five digits."""
    short: Row = json.loads(json.dumps(row), parse_float=lambda digits: float(f"{float(digits):.5g}"))
    return short


PHASE_NAMES = {"eval": "tokens", "prompt": "prompts"}
KINDS = [(f"{name}: {how}", f"{phase}_{key}") for phase, name in PHASE_NAMES.items()
         for how, key in (("data sheet", "by_data_sheet"), ("a third fitted", "fitted"))]  # fmt: skip
PLAN_COLUMNS = ("machine", "model", "stock's best", "measured", "predicted", "ours", "gain")


def page(results: Mapping[str, Row]) -> str:
    """The text of real_card.md with the table of errors, their medians, what overflows, and our plans."""
    rows = [(f"{key} {row['name']}", row["rows"], *(_error(row.get(kind)) for _, kind in KINDS))
            for key, row in results.items()]  # fmt: skip
    of_kind = ([row[kind]["median"] for row in results.values() if row.get(kind)] for _, kind in KINDS)
    medians = [f"{median(found):.0%} ({len(found)} machines)" if found else "" for found in of_kind]
    rows.append(("**median of machines**", "", *medians))
    plans = [(f"{key} {row['name']}", *_plan(row["plan"])) for key, row in results.items()
             if row.get("plan", {}).get("policy")]  # fmt: skip
    counts = {key: [sum(row[key][i] for row in results.values() if key in row) for i in (1, 0)]
              for key in ("spilled", "held")}  # fmt: skip
    values = {
        "machines": "\n".join(table(("machine", "rows", *(name for name, _ in KINDS)), rows)[:-1]),
        "plans": "\n".join(table(PLAN_COLUMNS, plans)[:-1]),
        "n_rows": sum(row["rows"] for row in results.values()),
        "n_machines": len(results),
        "not_described": ", ".join(sorted({name for row in results.values() for name in row["not_described"]})),
        **dict(zip(("tokens_sheet", "tokens_fitted", "prompts_sheet", "prompts_fitted"), medians, strict=True)),
        **{key: f"{right} of {of}" for key, (right, of) in counts.items()},
    }
    return re.sub(r"<(\w+)>", lambda found: str(values[found[1]]), TEXT.read_text(encoding="utf-8"))


def _error(found: Row | None) -> str:
    return f"{found['median']:.0%}, {found['worst']:.0%} ({found['rows']})" if found else ""


def _plan(row: Row) -> tuple[str, ...]:
    placed = " ".join(f"-{key} {row['stock'][key]}" for key in ("ngl", "ncmoe", "ncffn") if row["stock"].get(key))
    pairs = [f"{prompt:.0f}, {token:.1f}" for prompt, token in (row["measured"], row["stock_tps"], row["tps"])]
    return (row["model"], placed, *pairs[:2], f"{pairs[2]} ({row['policy']})", f"{row['gain']:.2f}×")


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
        for i, (phase, what) in enumerate(PHASE_NAMES.items()):
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


#
# commands
#

CONTEXTS = (1024, 16384)
EVERY = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    return guarded("real_card", lambda: int(options.run(options)), "nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("real_card", __doc__)
    commands = parser.add_subparsers(required=True, metavar="fit|predict|machines")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> Callable[..., argparse.Action]:
        made = commands.add_parser(name, help=what, description=what)
        made.set_defaults(run=run)
        made.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
        made.add_argument("--models", type=Path, required=True, metavar="MODELS.toml")
        return made.add_argument

    pinned = START.card.pinned_bytes_per_s / 1e9
    add = command("fit", _fit, "find the machine's rates from some of the rows")
    add("-o", "--output", type=Path, required=True, metavar="MACHINE.json")
    add("--name", default="card", help="what the card is called")
    add("--memory", type=float, default=32, metavar="GIB", help="of the card (default: 32)")
    add("--pinned", type=float, default=pinned, metavar="GB/S",
        help="of the link from pinned memory, which these runs do not show (default: %(default)g)")  # fmt: skip
    add("--contexts", type=_numbers, default=CONTEXTS, metavar="N,…", help="fit to rows of these (default: 1024,16384)")
    add("--every", type=_above_0, default=EVERY, metavar="N", help="and of these each Nth -ngl value (default: 3)")
    add("--json", action="store_true", help="what is left of these rows, as predict --json")
    add = command("predict", _predict, "predict the rows, and say how far off that is")
    add("--machine", type=Path, required=True, metavar="MACHINE.json")
    add("--json", action="store_true")
    add("--picture", type=Path, metavar="FILE.svg", help="measured and predicted, by model and context")
    made = commands.add_parser("machines", help="predict and draw many machines, and write docs/real-card.md")
    made.set_defaults(run=lambda options: write_machines(options.table))
    made.add_argument("table", type=Path, nargs="?", metavar="TABLE.csv", help="without one only the page is written")
    return parser


def _numbers(text_of: str) -> tuple[int, ...]:
    return tuple(_above_0(part) for part in text_of.split(","))


def _above_0(text_of: str) -> int:
    try:
        value = int(text_of)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text_of!r} is no number above 0")
    return value


def _read(options: argparse.Namespace) -> tuple[list[PublishedRun], dict[str, CardModel]]:
    runs, models = read_tables(options.tables), read_models(options.models)
    for run in runs:
        if run.model not in models:
            raise InputError(f"{options.models} does not describe {run.model}, which the tables have")
        if run.ngl > models[run.model].info.n_layer + 1:
            raise InputError(f"-ngl {run.ngl} is more than {run.model} has layers; are its sizes right?")
    return runs, models


def chosen(runs: Sequence[PublishedRun], contexts: Sequence[int], every: int) -> list[PublishedRun]:
    """Of each model, context and micro-batch every Nth -ngl value, counted from the largest: all layers on the device
    is among them."""
    values: dict[tuple[str, int, int], set[int]] = {}
    for run in runs:
        values.setdefault((run.model, run.context, run.ubatch), set()).add(run.ngl)
    kept = {(*group, ngl) for group, ngls in values.items() for ngl in sorted(ngls, reverse=True)[::every]}
    return [r for r in runs if r.context in contexts and (r.model, r.context, r.ubatch, r.ngl) in kept]


def _fit(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    used = chosen(runs, options.contexts, options.every)
    if 2 * len(used) < len(FITTED):
        raise InputError(f"{len(used)} rows are too few to fit {len(FITTED)} rates to; see --contexts and --every")
    card = replace(START.card, name=options.name, description=f"{options.name}, fitted to runs of stock llama.cpp",
                   memory_bytes=int(options.memory * 2**30), pinned_bytes_per_s=options.pinned * 1e9)  # fmt: skip
    notes = {"contexts": list(options.contexts), "every": options.every, "rows": len(used), "of": len(runs)}
    machine = fit(used, models, replace(START, card=card, notes=notes))
    write_machine(machine, options.output)
    rows = rows_of(machine, used, models)
    if options.json:
        write_document(document(rows), None)
        return 0
    print(f"{len(used)} of {len(runs)} rows, {len(FITTED)} rates")
    for name, value in rates(machine, FITTED).items():
        print(f"  {name:30}{value:12.4g}")
    print("left: " + ", ".join(f"{phase} {median_error(rows, phase):.1%}" for phase in PHASES) + " in the median")
    return 0


def _predict(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    machine = read_machine(options.machine)
    used = set(chosen(runs, machine.notes.get("contexts", ()), machine.notes.get("every", 1)))
    rows = [{**row, "fitted": run in used} for run, row in zip(runs, rows_of(machine, runs, models), strict=True)]
    if options.picture:
        groups: dict[str, Row] = {}
        for row in rows:
            group = groups.setdefault(f"{row['model']}, {row['context'] // 1024} K", {"name": "", "points": []})
            group["points"] += [
                {"phase": phase, "measured": row[f"{phase}_tps"], "predicted": row[f"{phase}_tps_predicted"],
                 "fitted": row["fitted"]} for phase in PHASES
            ]  # fmt: skip
        options.picture.write_text(
            Panels("Measured and predicted tokens per second, by context", groups).svg(), "utf-8"
        )
    if options.json:
        write_document(document(rows), None)
        return 0
    print(text(rows))
    others = [row for row in rows if not row["fitted"]]
    if others and len(others) < len(rows):
        print(f"\nThe {len(others)} rows that nothing was fitted to:\n{text(others)}")
    return 0
