#!/usr/bin/env python3
"""Plan a corpus of models on recorded profiles, and compare the plans with recorded ones: did a change alter a plan?

    scripts/plan_corpus.py record [--only TEXT]       # plan and keep it
    scripts/plan_corpus.py compare [--only TEXT]      # plan again; what differs, and how predictions moved

No native code, device or file of weights is needed: models are shapes, memory is counted (planner/pure_plan.py).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from make_model import write_shape
from model_shapes import KNOWN
from shared import parser_of

from oallama.core.errors import OallamaError
from oallama.core.files import write_whole
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import HALF_LIFE_TOKENS, LayerRouting, Routing
from oallama.core.types import CPU_DEVICE, Attention, Operator, OperatorPlacement, Workload
from oallama.core.units import GIB, parse_memory
from oallama.cost.graph import build_graph
from oallama.device.cards import CARDS, USUAL_PC, preset
from oallama.model.cut import cut_extent, cut_step
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.planner.attention import ModelHeader
from oallama.planner.decide import larger_ubatches, plan, policy_named
from oallama.planner.policies.registry import Request, Rules
from oallama.planner.pure_plan import Memory, estimated_load, pure_problems
from oallama.profile.described import TOKENS, described, with_card
from oallama.profile.store import read_profile

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "corpus"
PLANS = FOLDER / "plans.json"

HOST_COPIES_LIMIT = 8 * GIB
REPACK_TYPES, REPACK_GAIN = ("Q4_0", "Q4_K"), 1.5
"""What a described CPU has in a second layout, and how many times faster it is in that."""

ROUTED = 0.8
"""Exponent of Zipf's law that generated uses of experts follow."""


@dataclass(frozen=True)
class Cell:
    """One plan of the corpus.

    machine: a recorded profile; or a card beside the CPU of the first recorded profile that has the model; or pc+CARD,
    all of it described. model: of model_shapes.KNOWN, as NAME[:TYPE[:LAYERS]]. cap: gpu_weights=SHARE;
    vram_share=SHARE of the operators' bytes, beside KV and compute buffers; or vram=SIZE.
    """

    machine: str
    model: str
    cap: str
    policy: str
    n_prompt: int = 512
    n_gen: int = 128
    n_past: int = 0
    n_ctx: int = 4096
    flash_attn: Any = "on"
    rules: tuple[tuple[str, Any], ...] = ()
    routed: bool = False

    @property
    def key(self) -> str:
        usual = Cell(self.machine, self.model, self.cap, self.policy)
        named = {"n_prompt": "p", "n_gen": "n", "n_past": "d", "n_ctx": "c", "flash_attn": "fa-"}
        extra = [f"{short}{getattr(self, name)}" for name, short in named.items()
                 if getattr(self, name) != getattr(usual, name)]  # fmt: skip
        extra += [f"{name}-{value}" for name, value in self.rules] + (["routed"] if self.routed else [])
        return "/".join((self.machine, self.model, self.cap, self.policy, *([" ".join(extra)] if extra else [])))

    def plan(self) -> Plan:
        model = header(self.model)
        workload = Workload(self.n_prompt, self.n_gen, self.n_ctx, n_past=self.n_past)
        kind, _, value = self.cap.partition("=")
        options = Options(flash_attn=self.flash_attn, gpu_weights=float(value) if kind == "gpu_weights" else None)
        device_bytes = 24 * GIB if kind == "gpu_weights" else parse_memory(value) if kind == "vram" else 0
        if kind == "vram_share":
            load = estimated_load(model, workload, Attention("on"))
            device_bytes = int(float(value) * load.weights_host) + load.kv + load.compute
        routing, rules = routing_of(self.model) if self.routed else None, Rules(**dict(self.rules))
        memory, larger = Memory(device_bytes, HOST_COPIES_LIMIT), larger_ubatches(workload, options)
        problems = pure_problems(model, profile_of(self.machine, self.model), options, memory, routing)
        return plan(problems, Request(workload, policy_named(self.policy, rules), rules=rules, n_ubatches=larger))


def cells() -> Iterator[Cell]:
    yield from _usual()
    yield from _policies()
    yield from _settings()
    yield from _large()


OURS = ("oato", "scheinfer", "split", "layers", "cpu")
OTHERS = ("auto", "fit", "hetegen", "twinpilots", "flexgen", "atsinfer")


def _usual() -> Iterator[Cell]:
    """Our policies on what was recorded, and on cards beside its CPU, under two caps."""
    models = {"llama-1b": ("emulated-rtx3060", "rpc-worker-1b"), "llama3-8b": ("emulated-rtx3060",),
              "mixtral-8x7b:Q4_0:4": ("emulated-rtx3060",)}  # fmt: skip
    for model, recorded in models.items():
        for machine in (*recorded, "rtx3090", "rtx5090"):
            for cap in ("gpu_weights=0.5", "vram_share=0.45"):
                yield from (Cell(machine, model, cap, policy) for policy in OURS)


def _policies() -> Iterator[Cell]:
    """All others by name, and hot experts."""
    for machine, model, cap in (
        ("emulated-rtx3060", "llama-1b", "vram_share=0.45"),
        ("emulated-rtx3060", "llama3-8b", "vram=3GiB"),
        ("emulated-rtx3060", "mixtral-8x7b:Q4_0:4", "vram_share=0.45"),
        ("pc+rtx3060-12", "qwen3-30b-a3b:Q4_0:12", "vram=4GiB"),
    ):
        for policy in (*OTHERS, *(("fiddler",) if KNOWN[model.partition(":")[0]].metadata.get("expert_count") else ())):
            if policy != "fit" or not cap.startswith("gpu_weights"):
                yield Cell(machine, model, cap, policy)
    for machine, model, cap in (
        ("emulated-rtx3060", "mixtral-8x7b:Q4_0:4", "vram_share=0.45"),
        ("emulated-rtx3060", "mixtral-8x7b:Q4_0:4", "vram_share=0.2"),
        ("pc+rtx3060-12", "qwen3-30b-a3b:Q4_0:12", "vram=2GiB"),
        ("pc+rtx3060-12", "gpt-oss-20b:MXFP4:12", "vram=3GiB"),
    ):
        yield Cell(machine, model, cap, "experts", routed=True)
    yield Cell("emulated-rtx3060", "mixtral-8x7b:Q4_0:4", "vram_share=0.2", "auto", routed=True)


def _settings() -> Iterator[Cell]:
    """Attention, OATO's rules, prefetch, prompts, depths and generations."""
    small = "emulated-rtx3060", "llama-1b", "vram_share=0.45"
    dense = "emulated-rtx3060", "llama3-8b", "vram=3GiB"
    routed = "emulated-rtx3060", "mixtral-8x7b:Q4_0:4", "vram_share=0.45"
    paper = ("affinity", "paper"), ("fill", "paper")
    layer = (("prefetch", "layer"),)
    for on in (small, dense, routed):
        yield from (Cell(*on, "oato", rules=rules) for rules in (paper, paper[:1], (("fill", "full"),)))
        yield from (Cell(*on, "oato", flash_attn=flash_attn) for flash_attn in ("off", "auto"))
        yield from (Cell(*on, "oato", n_prompt=n_prompt, n_ctx=8192) for n_prompt in (1024, 4096))
        yield Cell(*on, "hetegen", rules=layer)
        yield Cell(*on, "split", flash_attn="off")
        yield Cell(*on, "twinpilots", n_prompt=32, n_gen=512)
        yield Cell(*on, "oato", n_past=8192, n_ctx=16384)
    for on in (small, routed):
        yield from (Cell(*on, "auto", n_prompt=n_prompt, n_ctx=8192) for n_prompt in (1024, 4096))
        yield Cell(*on, "auto", flash_attn="auto")
        yield Cell(*on, "scheinfer", n_prompt=32, n_gen=512)
        yield Cell(*on, "scheinfer", rules=layer)
    yield Cell(*small, "scheinfer", flash_attn="off")
    yield Cell(*small, "scheinfer", n_gen=0)
    yield Cell(*small, "scheinfer", n_past=8192, n_ctx=16384)
    yield Cell(*dense, "scheinfer", n_prompt=1024, n_ctx=8192)
    yield Cell(*dense, "auto", n_prompt=4096, n_ctx=8192)
    yield Cell(*dense, "scheinfer", n_prompt=32, n_gen=512)


def _large() -> Iterator[Cell]:
    """Whole models of other types on described computers, by what a card has of memory."""
    for card, model, cap in (
        ("rtx3060-12", "llama3-8b:F16", "vram=12GiB"),
        ("rtx3060-12", "llama3-8b:Q4_K", "vram=4GiB"),
        ("rtx3060-12", "moe-2.7b:Q8_0", "vram=2GiB"),
        ("rtx3060-12", "qwen3-30b-a3b", "vram=12GiB"),
        ("rtx4090", "llama-3.3-70b", "vram=12GiB"),
        ("rtx4090", "llama-3.3-70b", "vram=24GiB"),
        ("rtx5090", "llama-3.3-70b", "vram=40GiB"),
    ):
        for policy in ("oato", "scheinfer", "layers", "fit"):
            yield Cell(f"pc+{card}", model, cap, policy)
    for model, cap in (
        ("llama3-8b:F16", "vram=12GiB"),
        ("qwen3-30b-a3b", "vram=12GiB"),
        ("llama-3.3-70b", "vram=24GiB"),
    ):
        yield Cell("pc+rtx4090", model, cap, "auto", n_prompt=1024)
        yield Cell("pc+rtx4090", model, cap, "cpu", n_prompt=1024)


#
# what plans are made from
#


@cache
def header(name: str) -> ModelHeader:
    """A known shape with all matrices of one type, by a file that has headers only."""
    known, _, rest = name.partition(":")
    kind, _, layers = rest.partition(":")
    shape = KNOWN[known].with_layers(int(layers) if layers else None)
    with tempfile.TemporaryDirectory() as folder:
        gguf = read_gguf(write_shape(Path(folder) / f"{known}.gguf", shape, kind or "Q4_0", empty=True))
        model, of, names = model_info(gguf), tuple(operators(gguf)), [tensor.name for tensor in gguf.tensors]
        return ModelHeader(model, of, build_graph(model, of, names))


@cache
def recorded() -> dict[str, Profile]:
    return {path.stem.removeprefix("profile-"): read_profile(path) for path in sorted(FOLDER.glob("profile-*.json"))}


@cache
def profile_of(machine: str, name: str) -> Profile:
    """Raises KeyError for a machine that there is not."""
    of = header(name)
    card = machine.removeprefix("pc+")
    if machine in recorded():
        return _of_model(recorded()[machine], of)
    if card != machine:
        return _repacked(described(USUAL_PC, preset(card), of.model, of.operators, TOKENS))
    wanted = {operator.mul_mat for operator in of.operators}
    host = next(p for p in recorded().values() if wanted <= {c.mul_mat for c in p.cases if c.device != CPU_DEVICE})
    return with_card(_of_model(host, of), CARDS[card], of.model, of.operators)


def _of_model(profile: Profile, of: ModelHeader) -> Profile:
    """The profile without what was measured for other models in the same store."""
    info, wanted = of.model, {operator.mul_mat for operator in of.operators}
    heads = (info.n_embd, info.n_head, info.n_head_kv)
    return replace(
        profile,
        cases=tuple(c for c in profile.cases if c.mul_mat in wanted),
        rest=tuple(r for r in profile.rest if (r.shape.n_embd, r.shape.n_head, r.shape.n_head_kv) == heads),
    )


def _repacked(profile: Profile) -> Profile:
    """The profile with a second, faster layout of the CPU."""
    cases = [c for c in profile.cases if c.device == CPU_DEVICE and c.mul_mat.type in REPACK_TYPES]
    return replace(
        profile,
        cases=profile.cases
        + tuple(replace(c, layout="CPU_REPACK", seconds=c.seconds / REPACK_GAIN, samples=()) for c in cases),
    )


def routing_of(name: str) -> Routing:
    """Generated uses: of each layer some experts are used far more than others, prompts and decode alike."""
    of = header(name)
    layers = sorted({o.layer for o in of.operators if o.routed and o.layer is not None})
    n = of.model.n_expert

    def uses(layer: int, tokens: float, tilt: float) -> tuple[float, ...]:
        ranks = [(expert * 37 + layer * 11) % n for expert in range(n)]
        shares = [1 / (1 + rank) ** ROUTED * (1 + tilt * (expert % 3)) for expert, rank in enumerate(ranks)]
        return tuple(round(tokens * of.model.n_expert_used * share / sum(shares), 3) for share in shares)

    known = tuple(
        LayerRouting(layer, 8192, uses(layer, 4000, 0.05), uses(layer, 3000, 0.0), uses(layer, 4096, 0.1))
        for layer in layers
    )
    return Routing(1, of.model.fingerprint, n, of.model.n_expert_used, HALF_LIFE_TOKENS, known, known)


#
# what is kept of a plan
#


def record_of(cell: Cell, plan: Plan) -> dict[str, Any]:
    of, memory = header(cell.model), plan.memory
    assert plan.predicted is not None
    places = [[p.name, p.gg, p.cg, p.cc, p.layout, p.hot_experts] for p in plan.operators]
    text = plugin_text(plan, of.operators, of.model.n_layer, [plan.device])
    return {
        "digest": _digest([places, plan.n_gpu_layers, plan.token_assignment, plan.workload.n_ubatch]),
        "text": _digest(text.replace(of.model.fingerprint, "")),
        "ttft_s": plan.predicted.ttft_s,
        "tpot_s": plan.predicted.tpot_s,
        "total_s": plan.predicted.total_s,
        "policy": plan.policy,
        "flash_attn": plan.attention.flash_attn if plan.attention else None,
        "n_ubatch": plan.workload.n_ubatch,
        "n_gpu_layers": plan.n_gpu_layers,
        "whole": sum(p.gg == 1 for p in plan.operators),
        "sliced": sum(0 < p.gg < 1 for p in plan.operators),
        "streamed": sum(p.cg > 0 for p in plan.operators),
        "hot": sum(len(p.hot_experts) for p in plan.operators),
        "off_step": sum(_off_step(*pair) for pair in zip(of.operators, plan.operators, strict=True)),
        "n_g": [list(pair) for pair in plan.token_assignment],
        **{name: getattr(memory, name) for name in
           ("limit", "weights_gpu", "weights_host", "kv", "compute", "staging", "spare")},
    }  # fmt: skip


def _off_step(operator: Operator, place: OperatorPlacement) -> bool:
    """Whether the device computes a part that is no multiple of the step (model/cut.py)."""
    extent, step = cut_extent(operator), cut_step(operator)
    return place.gg < 1 and any(round(part * extent) % step for part in (place.gg, place.cg))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def plans(only: Sequence[str] = ("",)) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, record) of the cells that have one of these texts in their key."""
    for cell in cells():
        if not any(text in cell.key for text in only):
            continue
        header(cell.model)
        start = time.process_time()
        try:
            plan_record = record_of(cell, cell.plan())
        except OallamaError as error:
            plan_record = {"error": type(error).__name__}
        print(f"{cell.key}: {time.process_time() - start:.1f} s", file=sys.stderr)
        yield cell.key, plan_record


def compare(only: Sequence[str] = ("",)) -> int:
    """Exit status 1 where a plan differs or takes more memory than it may. A plan that is predicted the same within
    rounding is the same."""
    old_records = json.loads(PLANS.read_text(encoding="utf-8"))
    n_same = n_differ = n_over = 0
    moved: list[tuple[float, str]] = []  # total seconds, relative to the old records
    for key, now in plans(only):
        then = old_records.get(key)
        if now.get("spare", 0) < 0:
            n_over += 1
            print(f"over      {key}: takes {-now['spare']} bytes more than the limit")
        if then is None:
            print(f"new      {key}")
            continue
        if "total_s" in then and "total_s" in now:
            moved.append((now["total_s"] / then["total_s"] - 1, key))
        if _same(then, now):
            n_same += 1
            continue
        n_differ += 1
        kind = "plan" if then.get("digest") != now.get("digest") else "text" if then["text"] != now["text"] else "price"
        changed = {name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)}
        texts = (f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in changed.items() if name != "digest")
        print(f"{kind:9}{key}: {', '.join(texts)}")
    print(f"{n_same} the same, {n_differ} differ, {n_over} exceed their memory")
    if moved:
        least, most = min(moved), max(moved)
        print(f"predicted total seconds: median {median(change for change, _ in moved):+.3%}, "
              f"best {least[0]:+.3%} ({least[1]}), worst {most[0]:+.3%} ({most[1]})")  # fmt: skip
        of_changed = [change for change, _ in moved if abs(change) > 1e-9]
        if of_changed:
            print(f"of the {len(of_changed)} that moved: median {median(of_changed):+.3%}")
    return int(n_differ + n_over > 0)


def record(only: str = "") -> None:
    """Keep the plans of these cells, and of others what was kept."""
    records = json.loads(PLANS.read_text(encoding="utf-8")) | dict(plans([only]))
    rows = [f"{json.dumps(cell.key)}: {json.dumps(records[cell.key])}" for cell in cells() if cell.key in records]
    write_whole(PLANS, "{\n" + ",\n".join(rows) + "\n}\n")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _same(then: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(
        abs(value - now[key]) <= 1e-9 * abs(value) if isinstance(value, float) and key in now else value == now.get(key)
        for key, value in then.items()
    )


def main() -> int:
    parser = parser_of("plan_corpus.py", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        commands.add_parser(name).add_argument(
            "--only", default="", metavar="TEXT", help="only cells whose key contains this"
        )
    options = parser.parse_args()
    if options.command == "record":
        record(options.only)
        return 0
    return compare([options.only])


if __name__ == "__main__":
    sys.exit(main())
