"""Fit a machine's few rates to runs of stock llama.cpp on a real card, and predict runs by the product's cost model.

    scripts/real_card fit TABLE.csv --models MODELS.toml -o MACHINE.json             # from a few of the rows
    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json  # the others, with the errors

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS. MODELS.toml describes
each model by its sizes. docs/real-card.md says what came of it on an RTX 5090.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf, prod
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from shared import guarded, parser_of, write_document

from oallama.core.codec import Count32, Size32, from_json, to_json
from oallama.core.errors import UsageError
from oallama.core.files import read_toml
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.types import ModelInfo, Operator
from oallama.cost.graph import build_graph
from oallama.cost.passes import Pass, prompt_passes
from oallama.cost.whole import Costs, placement_seconds
from oallama.device.card import Card, Host
from oallama.device.machines import machine_of
from oallama.model.shapes import attention_and_ffn
from oallama.planner.attention import ModelHeader, with_attention
from oallama.planner.placement import Placement
from oallama.planner.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described

Vector = npt.NDArray[np.float64]
Row = dict[str, Any]
PHASES = ("prompt", "eval")

#
# models
#


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, as TOML names them."""

    n_layer: Size32
    n_embd: Size32
    n_head: Size32
    n_head_kv: Size32
    head_dim: Size32
    n_ff: Size32  # of an expert, where there are any
    n_vocab: Size32
    type: str
    output_type: str = ""  # "": as type
    n_expert: Count32 = 0
    n_expert_used: Count32 = 0
    source: str = ""  # where the sizes are from

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if unknown := {self.type, self.output_type or self.type} - GGML_TYPES_BY_NAME.keys():
            raise ValueError(f"{min(unknown)!r} is not a ggml type")
        if self.n_head % self.n_head_kv:
            raise ValueError("n_head must be a multiple of n_head_kv")
        if self.n_expert_used > self.n_expert or bool(self.n_expert_used) != bool(self.n_expert):
            raise ValueError("n_expert_used must be from 1 to n_expert")


def read_models(path: Path) -> dict[str, ModelHeader]:
    """Models by the names that tables use. Raises UsageError."""
    sizes: dict[str, Sizes] = {}
    for name, table in read_toml(path).items():
        try:
            sizes[name] = sizes[table["same_as"]] if "same_as" in table else from_json(Sizes, table, name)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: {name} is not described: {error}") from None
    return {name: _model(name, model_sizes) for name, model_sizes in sizes.items()}


def _model(name: str, sizes: Sizes) -> ModelHeader:
    """A model with Llama's graph, or Qwen's with experts."""
    operators = tuple(_operators(sizes))
    info = ModelInfo(
        path=name, arch="qwen3moe" if sizes.n_expert else "llama", name=name, n_layer=sizes.n_layer,
        n_embd=sizes.n_embd, n_ff=sizes.n_ff, n_head=sizes.n_head, n_head_kv=sizes.n_head_kv,
        n_embd_head_k=sizes.head_dim, n_embd_head_v=sizes.head_dim,
        n_expert=sizes.n_expert, n_expert_used=sizes.n_expert_used, n_vocab=sizes.n_vocab, n_ctx_train=0,
        file_bytes=sum(operator.bytes for operator in operators), fingerprint="",
    )  # fmt: skip
    return ModelHeader(info, operators, build_graph(info, operators))


def _operators(sizes: Sizes) -> Iterator[Operator]:
    n_embd, n_ff = sizes.n_embd, sizes.n_ff
    of_layer = attention_and_ffn(n_embd, n_ff, sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.n_expert, n_ff)
    for layer in range(sizes.n_layer):
        for role, ne in of_layer.items():
            used = sizes.n_expert_used if len(ne) > 2 else 0
            shape = (ne[0], ne[1], ne[2] if used else 1)
            kind = "F32" if role == "ffn_gate_inp" else sizes.type
            yield Operator(
                f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT_ID" if used else "MUL_MAT", kind, shape,
                GGML_TYPES_BY_NAME[kind].n_bytes(prod(shape)), used / shape[2] if used else 1.0, used or 1,
            )  # fmt: skip
    kind, shape = sizes.output_type or sizes.type, (n_embd, sizes.n_vocab, 1)
    n_bytes = GGML_TYPES_BY_NAME[kind].n_bytes(prod(shape))
    yield Operator("output.weight", None, "output", "MUL_MAT", kind, shape, n_bytes, 1.0, 1)


#
# machines
#


@dataclass(frozen=True)
class Machine:
    """A described host and card."""

    host: Host
    card: Card
    first_prompt_s: float = 0.0  # until a new process's kernels for large batches are loaded
    notes: dict[str, Any] = field(default_factory=dict)  # how it was found


START = Machine(
    host=Host("host", bytes_per_s=60e9, flops_per_s=1e12, source="fitted", flops_attention_per_s=50e9,
              flops_by_type=(("Q6_K", 100e9),), kernel_s=5e-6),
    card=Card(
        name="card", description="fitted to runs of stock llama.cpp", memory_bytes=32 * 2**30, bytes_per_s=800e9,
        flops_per_s=50e12, flops_float_per_s=80e12, kernel_s=3e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=10e-6,
        copy_issue_s=2e-6, synchronize_s=5e-6, pinned_bytes_per_s=25e9, pageable_bytes_per_s=10e9,
    ),
    first_prompt_s=0.03,
)  # fmt: skip
"""No real machine: where the fit of a table begins."""


def rates(machine: Machine, names: Iterable[str]) -> dict[str, float]:
    """A machine's rates by name: `card.bytes_per_s`, `host.flops_by_type.Q6_K`, `first_prompt_s`."""
    by_type = dict(machine.host.flops_by_type)
    return {name: by_type[name[len(BY_TYPE) :]] if name.startswith(BY_TYPE) else attrgetter(name)(machine)
            for name in names}  # fmt: skip


def with_rates(machine: Machine, values: Mapping[str, float]) -> Machine:
    """The machine with other rates."""
    by_type = dict(machine.host.flops_by_type)
    parts: dict[str, dict[str, Any]] = {"host": {}, "card": {}, "": {}}
    for name, value in values.items():
        if name.startswith(BY_TYPE):
            by_type[name[len(BY_TYPE) :]] = value
        else:
            part, _, rate = name.rpartition(".")
            parts[part][rate] = value
    host = replace(machine.host, flops_by_type=tuple(sorted(by_type.items())), **parts["host"])
    return replace(machine, host=host, card=replace(machine.card, **parts["card"]), **parts[""])


BY_TYPE = "host.flops_by_type."


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine as `oallama simulate --machine` takes it, with what only the fit knows beside."""
    write_document({"name": machine.card.name, **to_json(machine)}, path)


def read_machine(path: Path) -> Machine:
    """Raises UsageError."""
    machine = machine_of(str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    return Machine(machine.host, machine.card, document.get("first_prompt_s", 0.0), document.get("notes", {}))


#
# runs
#


@dataclass(frozen=True)
class PublishedRun:
    """One run: what was asked for, and tokens per second."""

    model: str
    context: int  # -c
    ngl: int  # -ngl; llama.cpp b6097 counts the output last
    ubatch: int  # -ub
    n_prompt: int
    n_gen: int
    prompt_tps: float
    eval_tps: float  # of the tokens after the first

    def on_device(self, operator: Operator, n_layer: int) -> bool:
        return self.ngl > n_layer if operator.layer is None else operator.layer >= n_layer - self.ngl

    def passes(self, phase: str) -> tuple[Pass, ...]:
        """The prompt's micro-batches; of the tokens one, in the middle."""
        if phase == "prompt":
            return prompt_passes(0, self.n_prompt, self.ubatch)
        return (Pass(1, self.n_prompt + max(1, self.n_gen // 2), 1),)


def read_tables(paths: Iterable[Path]) -> list[PublishedRun]:
    """The runs of all tables that came to an end. Raises UsageError."""
    runs: list[PublishedRun] = []
    for path in paths:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            try:
                runs += [_run(row) for row in rows if row.get("Status") in (None, "SUCCESS")]
            except KeyError as error:
                raise UsageError(f"{path} has no column {error.args[0]}") from None
            except (TypeError, ValueError, csv.Error) as error:
                raise UsageError(f"{path}, line {rows.line_num} is not a run: {error}") from None
    if not runs:
        raise UsageError("the tables have no completed run")
    return runs


def _run(row: Mapping[str, str]) -> PublishedRun:
    """Raises ValueError, and KeyError and TypeError for a missing value."""
    context, ngl, ubatch = int(row["Context"]), int(row["NGL"]), int(row["Ubatch"])
    n_prompt, n_gen = int(row["PromptTokens"]), int(row["EvalTokens"])
    prompt_tps, eval_tps = float(row["PromptTPS"]), float(row["EvalTPS"])
    if ngl < 0 or not all(0 < value < inf for value in (context, ubatch, n_prompt, n_gen, prompt_tps, eval_tps)):
        raise ValueError("a number is out of range")
    return PublishedRun(row["Model"], context, ngl, ubatch, n_prompt, n_gen, prompt_tps, eval_tps)


#
# predictions
#


class Predictor:
    """Predicts runs of these models on one machine. Passes that runs have in common are priced once."""

    def __init__(self, machine: Machine, models: Mapping[str, ModelHeader], runs: Iterable[PublishedRun]) -> None:
        self.machine, self.models = machine, models
        sizes: dict[str, set[int]] = {}
        for run in runs:
            sizes.setdefault(run.model, {1}).update(p.n_tokens for p in run.passes("prompt"))
        self.sizes = sizes
        self.problem = cache(self._problem)
        self.costs = cache(self._costs)

    def __call__(self, run: PublishedRun, phase: str) -> float:
        """Tokens per second of a phase."""
        n_layer = self.models[run.model].model.n_layer
        placed = tuple(run.on_device(operator, n_layer) for operator in self.models[run.model].operators)
        first = max(0, n_layer - run.ngl) if run.ngl else n_layer + 1
        seconds = placement_seconds(self.costs(run.model, run.passes(phase)), placed, first)
        return run.n_prompt / (seconds + self.machine.first_prompt_s) if phase == "prompt" else 1 / seconds

    def _problem(self, name: str) -> Problem:
        model, machine = self.models[name], self.machine
        profile = described(machine.host, machine.card, model.model, model.operators, sorted(self.sizes[name]))
        return Problem(model.operators, model.graph, with_attention(profile, "on"), _nothing, None, 0.9, None)

    def _costs(self, name: str, passes: tuple[Pass, ...]) -> Costs:
        """Costs in llama.cpp b6097, which copies all experts of a layer."""
        return self._all_copied(costs_over(self.problem(name), passes), self.models[name].operators, passes)

    def _all_copied(self, costs: Costs, operators: Sequence[Operator], passes: Sequence[Pass]) -> Costs:
        """Add the time of copying the experts that no token uses."""
        costs_of_operators = []
        for cost, operator in zip(costs.operators, operators, strict=True):
            idle = sum(p.count * (1 - operator.mul_mat.share_routed(p.n_tokens)) for p in passes)
            more_s = idle * operator.bytes / self.machine.card.pageable_bytes_per_s if cost.streamed_s else 0.0
            costs_of_operators.append(replace(cost, t_cpu_s=cost.t_cpu_s + more_s, streamed_s=cost.streamed_s + more_s))
        return replace(costs, operators=tuple(costs_of_operators))


def _nothing(load: Any, placement: Placement) -> LoadBytes:
    return LoadBytes(0, 0, 0, 0, 0)


#
# the fit
#

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

TRUSTED = 0.15  # log ratio up to which a run counts fully (Huber)
STEP = 0.02  # of a factor's logarithm, for slopes
MAX_ROUNDS = 60
LEAST_GAIN = 1e-4  # of the loss; a round that gains less is the last
FURTHEST = 1.0  # that one round moves a factor's logarithm


def fit(runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader], start: Machine) -> Machine:
    """The machine whose FITTED rates predict best what was measured. Levenberg-Marquardt over the logarithms of factors
    on them, so that no rate gets negative."""
    x = np.zeros(len(FITTED))
    begin = rates(start, FITTED)

    def machine(point: Vector) -> Machine:
        return with_rates(start, dict(zip(FITTED, np.array(list(begin.values())) * np.exp(point), strict=True)))

    def residuals(point: Vector) -> Vector:
        return misses(machine(point), runs, models)

    damping, now = 1e-2, residuals(x)
    for _ in range(MAX_ROUNDS):
        if loss(now) == 0:
            break
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


def misses(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader]) -> Vector:
    """Logarithms of predicted by measured."""
    predictor = Predictor(machine, models, runs)
    off: Vector = np.log([predictor(run, phase) / getattr(run, f"{phase}_tps") for run in runs for phase in PHASES])
    return off


def loss(off: Vector) -> float:
    """Huber's: squares up to TRUSTED, then straight on."""
    size = np.abs(off)
    return float(np.sum(np.where(size <= TRUSTED, size**2 / 2, TRUSTED * (size - TRUSTED / 2))))


#
# errors
#


def rows_of(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader]) -> list[Row]:
    """List each run with its prediction."""
    predictor = Predictor(machine, models, runs)
    return [{**asdict(run), **{f"{phase}_tps_predicted": predictor(run, phase) for phase in PHASES}} for run in runs]


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
    commands = parser.add_subparsers(required=True, metavar="fit|predict")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> Callable[..., argparse.Action]:
        subparser = commands.add_parser(name, help=what, description=what)
        subparser.set_defaults(run=run)
        subparser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
        subparser.add_argument("--models", type=Path, required=True, metavar="MODELS.toml")
        return subparser.add_argument

    pinned = START.card.pinned_bytes_per_s / 1e9
    add = command("fit", _fit, "fit the machine's rates to some of the rows")
    add("-o", "--output", type=Path, required=True, metavar="MACHINE.json")
    add("--name", default="card", help="name of the card")
    add("--pinned", type=float, default=pinned, metavar="GB/S",
        help="link rate from pinned memory, which these runs do not show (default: %(default)g)")  # fmt: skip
    add("--json", action="store_true", help="the other rows, as predict --json")
    add = command("predict", _predict, "predict the rows, and show the errors")
    add("--machine", type=Path, required=True, metavar="MACHINE.json")
    add("--json", action="store_true")
    return parser


def _read(options: argparse.Namespace) -> tuple[list[PublishedRun], dict[str, ModelHeader]]:
    runs, models = read_tables(options.tables), read_models(options.models)
    for run in runs:
        if run.model not in models:
            raise UsageError(f"{options.models} does not describe {run.model} of the tables")
        if run.ngl > models[run.model].model.n_layer + 1:
            raise UsageError(f"-ngl {run.ngl} exceeds the layers of {run.model}; check its sizes")
    return runs, models


def chosen(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Choose those of CONTEXTS with each EVERYth -ngl value of a model, context and micro-batch, from the largest down,
    so that all layers on the device is among them."""
    values: dict[tuple[str, int, int], set[int]] = {}
    for run in runs:
        values.setdefault((run.model, run.context, run.ubatch), set()).add(run.ngl)
    kept = {(*group, ngl) for group, ngls in values.items() for ngl in sorted(ngls, reverse=True)[::EVERY]}
    return [r for r in runs if r.context in CONTEXTS and (r.model, r.context, r.ubatch, r.ngl) in kept]


def _fit(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    used = chosen(runs)
    if 2 * len(used) < len(FITTED):
        raise UsageError(f"{len(used)} rows are too few to fit {len(FITTED)} rates")
    card = replace(START.card, name=options.name, description=f"{options.name}, fitted to runs of stock llama.cpp",
                   pinned_bytes_per_s=options.pinned * 1e9)  # fmt: skip
    notes = {"contexts": list(CONTEXTS), "every": EVERY, "rows": len(used), "of": len(runs)}
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
    used = set(chosen(runs)) if machine.notes else set()
    rows = [{**row, "fitted": run in used} for run, row in zip(runs, rows_of(machine, runs, models), strict=True)]
    if options.json:
        write_document(document(rows), None)
        return 0
    print(text(rows))
    others = [row for row in rows if not row["fitted"]]
    if others and len(others) < len(rows):
        print(f"\nThe {len(others)} rows not used for the fit:\n{text(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
