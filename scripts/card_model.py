"""Runs of stock llama.cpp that others published, the models and the machine that they were made with as the product's
cost model sees them, and what it predicts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gguf
from model_shapes import attention_and_ffn, gated_ffn
from shared import InputError, read_toml, record, write_document

from oallama.core.codec import Count32, Size32
from oallama.core.types import ModelInfo, Operator
from oallama.cost.graph import Graph, build_graph
from oallama.cost.passes import Pass, passes_at
from oallama.cost.whole import Costs, placement_seconds
from oallama.device.card import Card, Host
from oallama.device.cards import USUAL_PC, preset
from oallama.place.attention import with_attention
from oallama.place.placement import Placed
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described

#
# models
#


@dataclass(frozen=True)
class Types:
    """What a file's name says of its weights, as Q4_K_M. more: of attn_v and ffn_down in the half of the layers that
    llama-quantize gives more bits to."""

    type: str
    output_type: str = ""  # each "": as `type`
    attention: str = ""
    more: str = ""

    def of(self, role: str, layer: int, n_layer: int) -> str:
        if role == "ffn_gate_inp":
            return "F32"
        eighth = n_layer // 8
        if self.more and role in MORE and (
            layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
        ):  # fmt: skip
            return self.more
        return (self.attention if role.startswith("attn_") else "") or self.type


MORE = ("attn_v", "ffn_down", "ffn_down_exps")


@dataclass(frozen=True)
class Sizes:
    """Of a described model, as TOML names them. source: where they are from."""

    n_layer: Size32
    n_embd: Size32
    n_head: Size32
    n_head_kv: Size32
    head_dim: Size32
    n_ff: Size32  # of an expert, where there are any
    n_vocab: Size32
    type: str = ""  # "": the table says it
    output_type: str = ""
    n_expert: Count32 = 0
    n_expert_used: Count32 = 0
    n_ff_shared: Count32 = 0  # of the FFN beside the experts, which every token uses
    attention_every: Size32 = 1  # layers; the others have a window or a state of one size, which cost next to nothing
    linear: tuple[int, ...] = ()  # widths of q, k, v and output in the other layers, where these have a state
    gated: bool = False  # q has a gate as wide beside it
    source: str = ""


@dataclass(frozen=True)
class CardModel:
    """What a described model is to the product."""

    name: str
    info: ModelInfo
    operators: tuple[Operator, ...]


def read_models(path: Path) -> dict[str, CardModel]:
    """By the names that the tables use; `name types` for those whose types a table says. Raises InputError."""
    document = read_toml(path)
    mixes = {name: record(Types, each, f"{path}: types.{name}") for name, each in document.pop("types", {}).items()}
    sizes: dict[str, Sizes] = {}
    for name, table in document.items():
        where = f"{path}: {name}"
        if isinstance(table, dict) and "same_as" in table:
            if table["same_as"] not in sizes:
                raise InputError(f"{where} is the same as {table['same_as']!r}, which is not above it")
            sizes[name] = sizes[table["same_as"]]
        else:
            sizes[name] = _checked(record(Sizes, table, where), where)
    if not sizes:
        raise InputError(f"{path} describes no model")
    made: dict[str, CardModel] = {}
    for name, each in sizes.items():
        own = {"": Types(each.type, each.output_type)} if each.type else mixes
        made |= {key: model_of(key, each, types) for mix, types in own.items() for key in [f"{name} {mix}".strip()]}
    return made


def _checked(sizes: Sizes, where: str) -> Sizes:
    """Raises InputError."""
    if sizes.n_head % sizes.n_head_kv:
        raise InputError(f"{where}: n_head must be a multiple of n_head_kv")
    if sizes.n_expert_used > sizes.n_expert or (sizes.n_expert > 0) != (sizes.n_expert_used > 0):
        raise InputError(f"{where}: n_expert_used must be some of n_expert")
    for name in (sizes.type, sizes.output_type):
        if name and name not in gguf.GGMLQuantizationType.__members__:
            raise InputError(f"{where}: {name!r} is not a ggml type")
    return sizes


def model_of(name: str, sizes: Sizes, types: Types) -> CardModel:
    """Llama's graph, or with experts Qwen's. Where few layers have attention over all tokens, each has a share."""
    operators = tuple(_operators(sizes, types))
    width = max(1, sizes.head_dim // sizes.attention_every)
    arch = "llama" if not sizes.n_expert else "qwen2moe" if sizes.n_ff_shared else "qwen3moe"
    info = ModelInfo(
        path=name, arch=arch, name=name, n_layer=sizes.n_layer,
        n_embd=sizes.n_embd, n_ff=sizes.n_ff, n_head=sizes.n_head, n_head_kv=sizes.n_head_kv,
        n_embd_head_k=width, n_embd_head_v=width,
        n_expert=sizes.n_expert, n_expert_used=sizes.n_expert_used, n_vocab=sizes.n_vocab, n_ctx_train=0,
        file_bytes=sum(operator.bytes for operator in operators), fingerprint="",
    )  # fmt: skip
    return CardModel(name, info, operators)


def _operators(sizes: Sizes, types: Types) -> Iterator[Operator]:
    n_embd = sizes.n_embd
    full = attention_and_ffn(
        n_embd, sizes.n_ff, sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.n_expert, sizes.n_ff
    )
    if sizes.n_ff_shared:
        full |= gated_ffn(n_embd, sizes.n_ff_shared, "_shexp")
    if sizes.gated:
        full["attn_q"] = (n_embd, 2 * full["attn_q"][1])
    of_state = dict(full)
    if sizes.linear:
        q, k, v, output = sizes.linear
        of_state |= {"attn_q": (n_embd, q), "attn_k": (n_embd, k), "attn_v": (n_embd, v)}
        of_state["attn_output"] = (output, n_embd)
    for layer in range(sizes.n_layer):
        attends = layer % sizes.attention_every == sizes.attention_every - 1
        for role, ne in (full if attends else of_state).items():
            routed = len(ne) > 2
            shape = (ne[0], ne[1], ne[2] if routed else 1)
            kind = types.of(role, layer, sizes.n_layer)
            yield _operator(
                f"blk.{layer}.{role}.weight", layer, role, kind, shape, sizes.n_expert_used if routed else 0
            )
    output_type = types.output_type or types.type
    yield _operator("output.weight", None, "output", output_type, (n_embd, sizes.n_vocab, 1))


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
"""The rates that many runs of stock llama.cpp at several depths tell. The others are constants of START: nothing in
such runs depends on the pinned link, and the small latencies cannot be told from card.kernel_s and card.copy_s."""

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


def rates(machine: FittedMachine, names: Sequence[str] = FITTED) -> dict[str, float]:
    """Its rates by name."""
    record = _record(machine)
    return {name: _part(record, name)[_last(name)] for name in names}


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


@dataclass(frozen=True)
class DataSheet:
    """What a buyer knows of a machine: peaks. What is 0 or "" nobody said."""

    name: str
    preset: str = ""  # a card of `what-if`, instead of the next five
    memory_gib: float = 0.0
    gb_per_s: float = 0.0  # of the card's memory
    tflops: float = 0.0  # FP16, with FP32 sums
    tops: float = 0.0  # INT8
    link_gb_per_s: float = 25.0  # that copies from pinned memory reach
    dram_gb_per_s: float = 0.0
    cores_ghz: float = 0.0  # cores times GHz
    context_is_depth: bool = False  # the table's context is what lies in the KV cache, not what it could hold

    @property
    def has_card(self) -> bool:
        return bool(self.preset or self.gb_per_s)

    @property
    def known(self) -> bool:
        """Whether both halves are."""
        return self.has_card and self.dram_gb_per_s > 0


CARD_BYTES, CARD_INT8, CARD_FP16, DRAM_BYTES = 0.8, 0.3, 0.8, 0.67
"""Shares of peak rates that the cards of `what-if` and its usual PC reach in llama.cpp."""


def by_data_sheet(sheet: DataSheet) -> FittedMachine:
    """A machine by its peaks and the shares of them that others reach; what is not known is as START has it."""
    card = preset(sheet.preset) if sheet.preset else replace(preset("rtx4060ti-16"), name=sheet.name)
    if sheet.gb_per_s:
        card = replace(
            card, memory_bytes=int(sheet.memory_gib * 2**30), bytes_per_s=CARD_BYTES * sheet.gb_per_s * 1e9,
            flops_per_s=CARD_INT8 * sheet.tops * 1e12, flops_float_per_s=CARD_FP16 * sheet.tflops * 1e12,
            pinned_bytes_per_s=sheet.link_gb_per_s * 1e9,
            pageable_bytes_per_s=1e9 / (1 / sheet.link_gb_per_s + 1 / 13.6),
        )  # fmt: skip
    dram = DRAM_BYTES * sheet.dram_gb_per_s * 1e9 or USUAL_PC.bytes_per_s
    flops = USUAL_PC.flops_per_s * (sheet.cores_ghz / 40 or 1)
    return FittedMachine(replace(USUAL_PC, bytes_per_s=dram, flops_per_s=flops), card, first_prompt_s=1e-3)


#
# tables of runs
#


COLUMNS = ("Model", "Context", "NGL", "Ubatch", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS")


@dataclass(frozen=True)
class PublishedRun:
    """One run: what was asked for, and tokens per second; 0: not measured."""

    model: str
    context: int  # -c
    ngl: int  # -ngl
    ubatch: int  # -ub
    budget_mb: int | None  # VRAM that NGL was chosen for
    n_prompt: int
    n_gen: int
    prompt_tps: float
    eval_tps: float  # of the tokens after the first
    machine: str = ""
    depth: int = 0  # of the KV cache before the prompt, and before the tokens
    ncmoe: int = 0  # the first layers whose experts are on the host
    ncffn: int = 0  # whose FFN is
    today: bool = False  # -ngl counts the output before all layers, and of experts the used ones are copied; b6097
    # counted it last and copied all
    after_prompt: bool = True  # the tokens come behind it; llama-bench measures them by themselves
    flag: str = ""
    source: str = ""
    kv: str = "f16"  # type of the cache

    @property
    def config(self) -> tuple[str, int, int, int, int, int]:
        """Runs with the same one are repetitions."""
        return (self.model, self.context, self.ngl, self.ubatch, self.n_prompt, self.n_gen)

    def told(self) -> dict[str, Any]:
        """Its fields but those that are as usual."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return {each.name: value for each, value in values if each.default is MISSING or value != each.default}

    def first_layer(self, n_layer: int) -> int:
        """The first one on the device."""
        return max(0, n_layer + self.today - self.ngl)

    def on_device(self, operator: Operator, n_layer: int) -> bool:
        if operator.layer is None:
            return self.ngl > 0 if self.today else self.ngl > n_layer
        if operator.role.startswith("ffn_") and operator.layer < self.ncffn:
            return False
        if operator.op == "MUL_MAT_ID" and operator.layer < self.ncmoe:
            return False
        return operator.layer >= self.first_layer(n_layer)


def read_tables(paths: list[Path]) -> list[PublishedRun]:
    """The runs of all tables that came to an end. Raises InputError for what is no such table."""
    return [run for path in paths for run in _read(path)]


def _read(path: Path) -> list[PublishedRun]:
    rows = read_csv(path, COLUMNS)
    runs = [_run(row, where) for where, row in rows if row.get("Status") in (None, "SUCCESS")]
    if not runs:
        raise InputError(f"{path} has no run that came to an end")
    return runs


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
        self.costs: dict[tuple[str, tuple[Pass, ...], bool], Costs] = {}

    def __call__(self, run: PublishedRun) -> PredictedRates:
        model = self.models[run.model]
        n_layer = model.info.n_layer
        placed = tuple(run.on_device(operator, n_layer) for operator in model.operators)
        first = run.first_layer(n_layer) if run.ngl else n_layer + 1
        prompt_s, token_s = (
            placement_seconds(self._costs(run.model, passes, run.today), placed, first) if passes else 0.0
            for passes in (prompt_passes(run), decode_pass(run))
        )
        return PredictedRates(run.n_prompt / (prompt_s + self.machine.first_prompt_s or 1.0), 1 / token_s)

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

    def _costs(self, name: str, passes: tuple[Pass, ...], today: bool) -> Costs:
        key = (name, passes, today)
        if key not in self.costs:
            costs = costs_over(self.problem(name), passes)
            self.costs[key] = costs if today else self._all_copied(costs, self.models[name].operators, passes)
        return self.costs[key]

    def _all_copied(self, costs: Costs, operators: Sequence[Operator], passes: Sequence[Pass]) -> Costs:
        """Add the time of copying the experts that no token uses."""
        made = []
        for cost, operator in zip(costs.operators, operators, strict=True):
            idle = sum(p.count * (1 - operator.mul_mat.share_routed(p.n_tokens)) for p in passes)
            more_s = idle * operator.bytes / self.machine.card.pageable_bytes_per_s if cost.streamed_s else 0.0
            made.append(replace(cost, t_cpu_s=cost.t_cpu_s + more_s, streamed_s=cost.streamed_s + more_s))
        return replace(costs, operators=tuple(made))


def prompt_passes(run: PublishedRun) -> tuple[Pass, ...]:
    return passes_at(run.depth, run.n_prompt, 0, run.ubatch) if run.n_prompt else ()


def decode_pass(run: PublishedRun) -> tuple[Pass, ...]:
    """One token in the middle of those that were generated."""
    before = run.depth + (run.n_prompt if run.after_prompt else 0)
    return (Pass(1, before + max(1, run.n_gen // 2), 1),)


@cache
def graph_of(model: CardModel) -> Graph:
    return build_graph(model.info, model.operators)


def _nothing(load: Any, placed: Placed) -> LoadBytes:
    return LoadBytes(0, 0, 0, 0, 0)
