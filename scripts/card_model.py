"""Runs of stock llama.cpp that others published, the models and machines they were made with, and the speed that the
product's cost model predicts of each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from model_shapes import attention_and_ffn, gated_ffn
from shared import InputError, read_toml, record, write_document

from oallama.core.codec import Count32, Size32, to_json
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.types import Attention, ModelInfo, Operator
from oallama.cost.graph import Graph, build_graph
from oallama.cost.passes import Pass, passes_at
from oallama.cost.whole import Costs, placement_seconds
from oallama.device.card import Card, Host
from oallama.device.cards import USUAL_PC, preset
from oallama.device.machines import machine_of
from oallama.place.attention import with_attention
from oallama.place.placement import Placed
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described

#
# models
#

MORE = ("attn_v", "ffn_down", "ffn_down_exps")
"""Weights that llama-quantize gives more bits to, in half of the layers."""


@dataclass(frozen=True)
class Types:
    """Types of a file's weights, by its name: Q4_K_M. An empty one is as `type`."""

    type: str
    output_type: str = ""
    attention: str = ""
    more: str = ""  # of MORE, in half of the layers

    def of(self, role: str, layer: int, n_layer: int) -> str:
        if role == "ffn_gate_inp":
            return "F32"
        eighth = n_layer // 8
        if self.more and role in MORE and (
            layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
        ):  # fmt: skip
            return self.more
        return (self.attention if role.startswith("attn_") else "") or self.type


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
    type: str = ""  # "": the table says it
    output_type: str = ""
    n_expert: Count32 = 0
    n_expert_used: Count32 = 0
    n_ff_shared: Count32 = 0  # of the FFN beside the experts, which every token uses
    attention_every: Size32 = 1  # layers; the others have a window or a state of one size, which cost next to nothing
    linear: tuple[int, ...] = ()  # widths of q, k, v and output in the other layers, where these have a state
    gated: bool = False  # q has a gate as wide beside it
    source: str = ""  # where the sizes are from


@dataclass(frozen=True)
class CardModel:
    """A described model as the product sees it."""

    name: str
    info: ModelInfo
    operators: tuple[Operator, ...]


def read_models(path: Path) -> dict[str, CardModel]:
    """Models by the names that tables use: `name`, or `name types` where a table says the types. Raises InputError."""
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
        if name and name not in GGML_TYPES_BY_NAME:
            raise InputError(f"{where}: {name!r} is not a ggml type")
    return sizes


def model_of(name: str, sizes: Sizes, types: Types) -> CardModel:
    """A model with Llama's graph, or Qwen's with experts. Where few layers have attention over all tokens, every layer
    has its share of that."""
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
    n_embd, n_ff = sizes.n_embd, sizes.n_ff
    full = attention_and_ffn(n_embd, n_ff, sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.n_expert, n_ff)
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
            used = sizes.n_expert_used if len(ne) > 2 else 0
            shape = (ne[0], ne[1], ne[2] if used else 1)
            kind = types.of(role, layer, sizes.n_layer)
            yield Operator(
                f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT_ID" if used else "MUL_MAT", kind, shape,
                GGML_TYPES_BY_NAME[kind].n_bytes(prod(shape)), used / shape[2] if used else 1.0, used or 1,
            )  # fmt: skip
    kind, shape = types.output_type or types.type, (n_embd, sizes.n_vocab, 1)
    n_bytes = GGML_TYPES_BY_NAME[kind].n_bytes(prod(shape))
    yield Operator("output.weight", None, "output", "MUL_MAT", kind, shape, n_bytes, 1.0, 1)


@cache
def graph_of(model: CardModel) -> Graph:
    return build_graph(model.info, model.operators)


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
    found = machine_of(str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    return Machine(found.host, found.card, document.get("first_prompt_s", 0.0), document.get("notes", {}))


CARD_BYTES, CARD_INT8, CARD_FP16, DRAM_BYTES = 0.8, 0.3, 0.8, 0.67
"""Shares of peak rates that the cards of `what-if` and its usual PC reach in llama.cpp."""


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a machine, as a buyer knows them. 0 or "": nobody said."""

    name: str
    preset: str = ""  # a card of `what-if`, instead of the next six
    memory_gib: float = 0.0
    gb_per_s: float = 0.0  # of the card's memory
    memory_share: float = CARD_BYTES  # of that, which mul-mats of one token reach
    tflops: float = 0.0  # FP16, with FP32 sums
    tops: float = 0.0  # INT8
    link_gb_per_s: float = 25.0  # that copies from pinned memory reach
    dram_gb_per_s: float = 0.0
    cores_ghz: float = 0.0  # cores times GHz
    context_is_depth: bool = False  # the table's context lies in the KV cache before the prompt

    @property
    def names_card(self) -> bool:
        return bool(self.preset or self.gb_per_s)


STAGING_GB_PER_S = 13.6  # of the driver's copy from pageable to pinned memory
USUAL_CORES_GHZ = 40


def by_data_sheet(sheet: DataSheet) -> Machine:
    """A machine at the usual shares of its peaks; a part that is not named is the usual PC's, or an RTX 4060 Ti."""
    card = preset(sheet.preset) if sheet.preset else replace(preset("rtx4060ti-16"), name=sheet.name)
    if sheet.gb_per_s:
        card = replace(
            card, memory_bytes=int(sheet.memory_gib * 2**30), bytes_per_s=sheet.memory_share * sheet.gb_per_s * 1e9,
            flops_per_s=CARD_INT8 * sheet.tops * 1e12, flops_float_per_s=CARD_FP16 * sheet.tflops * 1e12,
            pinned_bytes_per_s=sheet.link_gb_per_s * 1e9,
            pageable_bytes_per_s=1e9 / (1 / sheet.link_gb_per_s + 1 / STAGING_GB_PER_S),
        )  # fmt: skip
    dram = DRAM_BYTES * sheet.dram_gb_per_s * 1e9 or USUAL_PC.bytes_per_s
    flops = USUAL_PC.flops_per_s * (sheet.cores_ghz / USUAL_CORES_GHZ or 1)
    return Machine(replace(USUAL_PC, bytes_per_s=dram, flops_per_s=flops), card, first_prompt_s=1e-3)


#
# runs
#

COLUMNS = ("Model", "Context", "NGL", "Ubatch", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS")


@dataclass(frozen=True)
class PublishedRun:
    """One run: what was asked for, and tokens per second; 0: not measured."""

    model: str
    context: int  # -c
    ngl: int  # -ngl
    ubatch: int  # -ub
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

    def told(self) -> dict[str, Any]:
        """The fields that are not as usual."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return {each.name: value for each, value in values if each.default is MISSING or value != each.default}

    def first_layer(self, n_layer: int) -> int:
        """The first layer on the device."""
        return max(0, n_layer + self.today - self.ngl)

    def on_device(self, operator: Operator, n_layer: int) -> bool:
        if operator.layer is None:
            return self.ngl > 0 if self.today else self.ngl > n_layer
        if operator.role.startswith("ffn_") and operator.layer < self.ncffn:
            return False
        if operator.op == "MUL_MAT_ID" and operator.layer < self.ncmoe:
            return False
        return operator.layer >= self.first_layer(n_layer)

    def passes(self, phase: str) -> tuple[Pass, ...]:
        """The prompt's micro-batches; of the tokens one, in the middle."""
        if phase == "prompt":
            return passes_at(self.depth, self.n_prompt, 0, self.ubatch) if self.n_prompt else ()
        before = self.depth + (self.n_prompt if self.after_prompt else 0)
        return (Pass(1, before + max(1, self.n_gen // 2), 1),)


def read_tables(paths: Iterable[Path]) -> list[PublishedRun]:
    """The runs of all tables that came to an end. Raises InputError."""
    runs = []
    for path in paths:
        rows = [pair for pair in read_csv(path, COLUMNS) if pair[1].get("Status") in (None, "SUCCESS")]
        if not rows:
            raise InputError(f"{path} has no run that came to an end")
        runs += [_run(row, where) for where, row in rows]
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
    context, ubatch, n_prompt, n_gen = (
        int(_number(row, name, where)) for name in ("Context", "Ubatch", "PromptTokens", "EvalTokens")
    )
    prompt_tps, eval_tps = (_number(row, name, where, 0.001) for name in ("PromptTPS", "EvalTPS"))
    ngl = int(_number(row, "NGL", where, 0))
    return PublishedRun(row["Model"], context, ngl, ubatch, n_prompt, n_gen, prompt_tps, eval_tps)


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


class Predictor:
    """Predicts runs of these models on one machine. Passes that runs have in common are priced once."""

    def __init__(self, machine: Machine, models: Mapping[str, CardModel], runs: Iterable[PublishedRun]) -> None:
        self.machine, self.models = machine, models
        sizes: dict[str, set[int]] = {}
        for run in runs:
            sizes.setdefault(run.model, {1}).update(p.n_tokens for p in run.passes("prompt"))
        self.sizes = sizes
        self.problem = cache(self._problem)
        self.costs = cache(self._costs)

    def __call__(self, run: PublishedRun, phase: str) -> float:
        """Tokens per second of a phase; 0 for a prompt of no tokens."""
        passes = run.passes(phase)
        if not passes:
            return 0.0
        n_layer = self.models[run.model].info.n_layer
        placed = tuple(run.on_device(operator, n_layer) for operator in self.models[run.model].operators)
        first = run.first_layer(n_layer) if run.ngl else n_layer + 1
        seconds = placement_seconds(self.costs(run.model, run.kv, passes, run.today), placed, first)
        return run.n_prompt / (seconds + self.machine.first_prompt_s) if phase == "prompt" else 1 / seconds

    def _problem(self, name: str, kv: str) -> Problem:
        model, machine = self.models[name], self.machine
        cached = Attention("on", kv, kv)
        tokens = sorted(self.sizes[name])
        profile = described(machine.host, machine.card, model.info, model.operators, tokens, cached)
        flash = with_attention(profile, "on")
        return Problem(model.operators, graph_of(model), flash, _nothing, None, 0.9, None)

    def _costs(self, name: str, kv: str, passes: tuple[Pass, ...], today: bool) -> Costs:
        costs = costs_over(self.problem(name, kv), passes)
        return costs if today else self._all_copied(costs, self.models[name].operators, passes)

    def _all_copied(self, costs: Costs, operators: Sequence[Operator], passes: Sequence[Pass]) -> Costs:
        """Add the time of copying the experts that no token uses."""
        made = []
        for cost, operator in zip(costs.operators, operators, strict=True):
            idle = sum(p.count * (1 - operator.mul_mat.share_routed(p.n_tokens)) for p in passes)
            more_s = idle * operator.bytes / self.machine.card.pageable_bytes_per_s if cost.streamed_s else 0.0
            made.append(replace(cost, t_cpu_s=cost.t_cpu_s + more_s, streamed_s=cost.streamed_s + more_s))
        return replace(costs, operators=tuple(made))


def _nothing(load: Any, placed: Placed) -> LoadBytes:
    return LoadBytes(0, 0, 0, 0, 0)
