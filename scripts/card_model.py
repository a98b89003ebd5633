"""Runs of stock llama.cpp that others published, the models and the machine that they were made with as the product's
cost model sees them, and what it predicts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import gguf
from model_shapes import attention_and_ffn
from shared import InputError, read_toml, record, write_document

from oallama.core.codec import CodecError, Count32, Size32, from_json
from oallama.core.types import ModelInfo, Operator, Workload
from oallama.cost.graph import Graph, build_graph
from oallama.cost.passes import Pass, passes_at
from oallama.cost.placement import Costs, placement_seconds
from oallama.device.card import Card, Host
from oallama.place.attention import with_attention
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described

#
# models
#


@dataclass(frozen=True)
class Sizes:
    """Of a described model, as TOML names them. source: where they are from."""

    n_layer: Size32
    n_embd: Size32
    n_head: Size32
    n_head_kv: Size32
    head_dim: Size32
    n_ff: Size32
    n_vocab: Size32
    type: str
    output_type: str = ""  # as the others
    n_expert: Count32 = 0
    n_expert_used: Count32 = 0
    source: str = ""


@dataclass(frozen=True)
class CardModel:
    """What a described model is to the product."""

    name: str
    info: ModelInfo
    operators: tuple[Operator, ...]


def read_models(path: Path) -> dict[str, CardModel]:
    """By the names that the tables use. Raises InputError."""
    made: dict[str, CardModel] = {}
    for name, table in read_toml(path).items():
        where = f"{path}: {name}"
        if isinstance(table, dict) and "same_as" in table:
            if table["same_as"] not in made:
                raise InputError(f"{where} is the same as {table['same_as']!r}, which is not above it")
            made[name] = made[table["same_as"]]
        else:
            made[name] = model_of(name, _checked(record(Sizes, table, where), where))
    if not made:
        raise InputError(f"{path} describes no model")
    return made


def _checked(sizes: Sizes, where: str) -> Sizes:
    """With the output's type. Raises InputError."""
    if sizes.n_head % sizes.n_head_kv:
        raise InputError(f"{where}: n_head must be a multiple of n_head_kv")
    if sizes.n_expert_used > sizes.n_expert or (sizes.n_expert > 0) != (sizes.n_expert_used > 0):
        raise InputError(f"{where}: n_expert_used must be some of n_expert")
    full = replace(sizes, output_type=sizes.output_type or sizes.type)
    for name in (full.type, full.output_type):
        if name not in gguf.GGMLQuantizationType.__members__:
            raise InputError(f"{where}: {name!r} is not a ggml type")
    return full


def model_of(name: str, sizes: Sizes) -> CardModel:
    """Llama's graph, or with experts Qwen3-MoE's."""
    operators = tuple(_operators(sizes))
    info = ModelInfo(
        path=name, arch="qwen3moe" if sizes.n_expert else "llama", name=name, n_layer=sizes.n_layer,
        n_embd=sizes.n_embd, n_ff=sizes.n_ff, n_head=sizes.n_head, n_head_kv=sizes.n_head_kv,
        n_embd_head_k=sizes.head_dim, n_embd_head_v=sizes.head_dim,
        n_expert=sizes.n_expert, n_expert_used=sizes.n_expert_used, n_vocab=sizes.n_vocab, n_ctx_train=0,
        file_bytes=sum(operator.bytes for operator in operators), fingerprint="",
    )  # fmt: skip
    return CardModel(name, info, operators)


def _operators(sizes: Sizes) -> Iterator[Operator]:
    matrices = attention_and_ffn(
        sizes.n_embd, sizes.n_ff, sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.n_expert, sizes.n_ff
    )
    for layer in range(sizes.n_layer):
        for role, ne in matrices.items():
            routed = len(ne) > 2
            shape = (ne[0], ne[1], ne[2] if routed else 1)
            kind = "F32" if role == "ffn_gate_inp" else sizes.type
            yield _operator(
                f"blk.{layer}.{role}.weight", layer, role, kind, shape, sizes.n_expert_used if routed else 0
            )
    yield _operator("output.weight", None, "output", sizes.output_type, (sizes.n_embd, sizes.n_vocab, 1))


def _operator(
    name: str, layer: int | None, role: str, type_name: str, shape: tuple[int, int, int], used: int = 0
) -> Operator:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    k, n, e = shape
    op: Literal["MUL_MAT", "MUL_MAT_ID"] = "MUL_MAT_ID" if used else "MUL_MAT"
    return Operator(name, layer, role, op, type_name, shape, k * n * e // block * block_bytes,
                    used / e if used else 1.0, used or 1)  # fmt: skip


#
# machines
#


@dataclass(frozen=True)
class FittedMachine:
    """What every prediction is made from."""

    host: Host
    card: Card
    first_prompt_s: float = 0.0  # until a new process's kernels for large batches are loaded
    notes: dict[str, Any] = field(default_factory=dict)  # how it was found


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
"""The rates that runs of stock llama.cpp tell. The others are constants of START: nothing in such runs depends on the
pinned link, and the small latencies cannot be told from card.kernel_s and card.copy_s."""

START = FittedMachine(
    host=Host("host", bytes_per_s=60e9, flops_per_s=1e12, source="fitted", flops_attention_per_s=50e9,
              flops_by_type=(("Q6_K", 100e9),), kernel_s=5e-6),
    card=Card(
        name="card", description="fitted to runs of stock llama.cpp", memory_bytes=32 * 2**30, bytes_per_s=800e9,
        flops_per_s=50e12, flops_float_per_s=80e12, kernel_s=3e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=10e-6,
        copy_issue_s=2e-6, synchronize_s=5e-6, pinned_bytes_per_s=25e9, pageable_bytes_per_s=10e9,
    ),
    first_prompt_s=0.03,
)  # fmt: skip
"""Of no machine: where the fit begins."""


def rates(machine: FittedMachine) -> dict[str, float]:
    """Its fitted rates by name."""
    record = _record(machine)
    return {name: _part(record, name)[_last(name)] for name in FITTED}


def with_rates(machine: FittedMachine, values: Mapping[str, float]) -> FittedMachine:
    """The same with other rates."""
    record = _record(machine)
    for name, value in values.items():
        _part(record, name)[_last(name)] = value
    return _machine(record)


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of a record in which the rate of that name is."""
    for key in name.split(".")[:-1]:
        record = record[key]
    return record


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _record(machine: FittedMachine) -> dict[str, Any]:
    record = asdict(machine)
    record["host"]["flops_by_type"] = dict(machine.host.flops_by_type)
    return record


def _machine(record: Mapping[str, Any]) -> FittedMachine:
    host = {**record["host"], "flops_by_type": tuple(sorted(record["host"]["flops_by_type"].items()))}
    return FittedMachine(Host(**host), Card(**record["card"]), record["first_prompt_s"], record.get("notes", {}))


def write_machine(machine: FittedMachine, path: Path) -> None:
    write_document(_record(machine), path)


def read_machine(path: Path) -> FittedMachine:
    """Raises InputError."""
    try:
        made = _machine(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no machine: make one with `scripts/real_card fit`") from None
    for part in (made.host, made.card):
        for each in fields(part):
            value = getattr(part, each.name)
            if not each.name.endswith("_s") or value is None:
                continue
            if not isinstance(value, int | float) or value < 0 or (value == 0 and each.name.endswith("_per_s")):
                raise InputError(f"{path}: {each.name} is {value!r}, not above 0")
    return made


#
# tables of runs
#


COLUMNS = ("Model", "Context", "NGL", "Ubatch", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS")


@dataclass(frozen=True)
class PublishedRun:
    """One run of llama-cli: what was asked for, and tokens per second."""

    model: str
    context: int  # -c
    ngl: int  # -ngl
    ubatch: int  # -ub
    budget_mb: int | None  # VRAM that NGL was chosen for
    n_prompt: int
    n_gen: int
    prompt_tps: float
    eval_tps: float  # of the tokens after the first

    @property
    def config(self) -> tuple[str, int, int, int, int, int]:
        """Runs with the same one are repetitions."""
        return (self.model, self.context, self.ngl, self.ubatch, self.n_prompt, self.n_gen)


def read_tables(paths: list[Path]) -> list[PublishedRun]:
    """The runs of all tables that came to an end. Raises InputError for what is no such table."""
    return [run for path in paths for run in _read(path)]


def _read(path: Path) -> list[PublishedRun]:
    if path.suffix == ".json":
        return _read_json(path)
    rows = read_csv(path, COLUMNS)
    runs = [_run(row, where) for where, row in rows if row.get("Status") in (None, "SUCCESS")]
    if not runs:
        raise InputError(f"{path} has no run that came to an end")
    return runs


def _read_json(path: Path) -> list[PublishedRun]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [from_json(PublishedRun, row, f"{path}: rows[{i}]") for i, row in enumerate(rows)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except CodecError as error:
        raise InputError(str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is nothing that `real_card predict --json` wrote") from None


def read_csv(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """(file and line, row) of a table that has these columns. Raises InputError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in columns if name not in (rows.fieldnames or ())]
            if missing:
                raise InputError(f"{path} has no column {missing[0]}: it takes {', '.join(columns)}")
            return [(f"{path}, line {rows.line_num}", row) for row in rows]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV table: {error}") from None


def _run(row: dict[str, str], where: str) -> PublishedRun:
    return PublishedRun(
        model=row["Model"],
        context=int(_number(row, "Context", where)),
        ngl=int(_number(row, "NGL", where, least=0)),
        ubatch=int(_number(row, "Ubatch", where)),
        budget_mb=int(_number(row, "MVA", where)) if row.get("MVA") else None,
        n_prompt=int(_number(row, "PromptTokens", where)),
        n_gen=int(_number(row, "EvalTokens", where)),
        prompt_tps=_number(row, "PromptTPS", where, least=0.001),
        eval_tps=_number(row, "EvalTPS", where, least=0.001),
    )


def _number(row: dict[str, str], name: str, where: str, least: float = 1) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        raise InputError(f"{where}: {name} is {row[name]!r}, not a number") from None
    if not least <= value <= 1e9:
        raise InputError(f"{where}: {name} is {row[name]}, which cannot be")
    return value


#
# predictions
#


@dataclass(frozen=True)
class PredictedRates:
    """Of one run, tokens per second."""

    prompt_tps: float
    eval_tps: float


class Predictor:
    """Predicts runs of these models on one machine; what runs have in common is priced once."""

    def __init__(self, machine: FittedMachine, models: Mapping[str, CardModel], runs: Iterable[PublishedRun]) -> None:
        self.machine, self.models = machine, models
        sizes: dict[str, set[int]] = {}
        for run in runs:
            sizes.setdefault(run.model, {1}).update(p.n_tokens for p in prompt_passes(run))
        self.sizes = sizes
        self.problems: dict[str, Problem] = {}
        self.costs: dict[tuple[str, tuple[Pass, ...]], Costs] = {}

    def __call__(self, run: PublishedRun) -> PredictedRates:
        n_layer = self.models[run.model].info.n_layer
        placed = stock_ngl(self.problem(run.model), run.ngl)
        seconds = [
            placement_seconds(
                self._costs(run.model, passes), placed, max(0, n_layer - run.ngl) if run.ngl else n_layer + 1
            )
            for passes in (prompt_passes(run), decode_pass(run))
        ]
        return PredictedRates(run.n_prompt / (seconds[0] + self.machine.first_prompt_s), 1 / seconds[1])

    def problem(self, name: str) -> Problem:
        if name not in self.problems:
            model = self.models[name]
            profile = described(
                self.machine.host, self.machine.card, model.info, model.operators, sorted(self.sizes[name])
            )
            self.problems[name] = Problem(
                model.operators, graph_of(model), with_attention(profile, "on"), _nothing, None, 0.9, None
            )
        return self.problems[name]

    def _costs(self, name: str, passes: tuple[Pass, ...]) -> Costs:
        key = (name, passes)
        if key not in self.costs:
            self.costs[key] = costs_over(self.problem(name), passes)
        return self.costs[key]


def prompt_passes(run: PublishedRun) -> tuple[Pass, ...]:
    return passes_at(0, run.n_prompt, 0, run.ubatch)


def decode_pass(run: PublishedRun) -> tuple[Pass, ...]:
    """One token in the middle of those that were generated."""
    return (Pass(1, run.n_prompt + max(1, run.n_gen // 2), 1),)


@lru_cache
def graph_of(model: CardModel) -> Graph:
    return build_graph(model.info, model.operators)


def stock_ngl(problem: Problem, ngl: int) -> tuple[bool, ...]:
    """Which operators b6097's -ngl puts on the device: the last layers, and the output only when all layers are there
    (since then llama.cpp counts the output first)."""
    n_layer = problem.graph.n_layer
    return tuple(
        ngl > n_layer if layer == n_layer else layer >= n_layer - ngl for layer in problem.graph.operator_layer
    )


def _nothing(load: Workload, placed: Placed) -> LoadBytes:
    return LoadBytes(0, 0, 0, 0, 0)
