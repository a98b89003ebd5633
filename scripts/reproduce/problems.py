"""A cell of a paper as the planner's problem, and its prediction: model and machine by name, sizes reckoned, nothing
loaded or measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from card_model import read_models
from model_shapes import KNOWN
from shared import ROOT, InputError, planned

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.profile import Profile
from oallama.core.types import ModelInfo, Operator, Workload
from oallama.core.units import GIB, MIB
from oallama.cost.graph import Graph, build_graph
from oallama.cost.whole import cache_bytes
from oallama.device.card import Card, Host
from oallama.device.machines import machine_of
from oallama.planner.attention import with_attention
from oallama.planner.decide import decide, policy_named
from oallama.planner.placement import Placement
from oallama.planner.policies.registry import Request, Rules
from oallama.planner.price import price
from oallama.planner.problem import LoadBytes, Problem
from oallama.profile.described import TOKENS, described
from reproduce.figures import Figure, FigureArm, FigureCell

BENCHMARKS = ROOT / "docs" / "benchmarks"
FITTED = {"rtx5090": BENCHMARKS / "real-card-rtx5090.json"}
"""Machines whose rates were fitted to published runs (docs/real-card.md)."""

TESTBEDS = Path(__file__).with_name("testbeds")
"""The papers' machines; each file says where its figures are from."""

INT4_BYTES = 0.5
PLENTY = 1e15  # bytes/s: nobody waits for the DRAM


@cache
def model(name: str, type_name: str) -> tuple[ModelInfo, tuple[Operator, ...], Graph]:
    """By its shape's name, its matrices of one type."""
    if name not in KNOWN:
        described_models = read_models(BENCHMARKS / "real-card-models.toml")
        if name not in described_models:
            raise InputError(f"unknown shape {name!r}; see scripts/model_shapes.py")
        found = described_models[name]
        return found.info, found.operators, build_graph(found.info, found.operators)
    model = planned(name, type_name)
    return model.info, model.operators, model.graph


def machine(cell: FigureCell) -> tuple[Host, Card]:
    """The cell's CPU and card. Raises InputError."""
    file = FITTED.get(cell.machine, TESTBEDS / f"{cell.machine}.json")
    try:
        machine = machine_of(str(file) if file.is_file() else cell.machine)
    except UsageError as error:
        raise InputError(str(error)) from None
    return machine.host if cell.threads is None else _with_threads(machine.host, cell.threads), machine.card


def _with_threads(host: Host, threads: int) -> Host:
    """Testbed A's with fewer of its 32 cores: weights as the published r_CG of so many threads implies, arithmetic in
    proportion, and the DRAM that the CPU shares with the link as it was: eight channels of DDR4-3200."""
    beta = next(row["implied_cpu_beta"] for row in formulas()["rates"] if row["threads"] == threads)
    share = threads / 32
    return replace(host, name=f"{threads} threads of {host.name}", bytes_per_s=INT4_BYTES / beta,
                   flops_per_s=share * host.flops_per_s, dram_bytes_per_s=204.8e9)  # fmt: skip


@cache
def formulas() -> dict[str, Any]:
    """What the solver returned from ScheInfer's formulas with ScheInfer's numbers; recorded once."""
    document: dict[str, Any] = json.loads((BENCHMARKS / "scheinfer.json").read_text(encoding="utf-8"))
    return document


def workload(cell: FigureCell) -> Workload:
    whole = cell.n_prompt + cell.n_gen
    return Workload(cell.n_prompt, cell.n_gen, cell.n_ctx or -(-whole // 256) * 256, cell.n_ubatch)


def problem(cell: FigureCell, arm: FigureArm) -> Problem:
    """What a plan of that arm is made from. Host memory is taken to be enough; flash attention is on."""
    info, ops, graph = model(cell.model, cell.type)
    host, card = machine(cell)
    if arm.cpu != 1:
        host = replace(host, bytes_per_s=arm.cpu * host.bytes_per_s, flops_per_s=arm.cpu * host.flops_per_s)
    if not arm.shares_dram:
        host = replace(host, dram_bytes_per_s=PLENTY)
    if arm.pageable:
        card = replace(card, pinned_bytes_per_s=card.pageable_bytes_per_s)
    profile = described(host, card, info, ops, sorted({*TOKENS, cell.n_ubatch}))
    vram_gib = cell.vram_gib if arm.vram_gib is None else arm.vram_gib
    share = cell.gpu_weights if arm.gpu_weights is None else arm.gpu_weights
    return Problem(
        ops,
        graph,
        with_attention(profile, "on"),
        Reckoned(info, ops, profile),
        None if vram_gib is None else int(vram_gib * GIB),
        cell.fill,
        share,
        host_budget=sys.maxsize,
    )


CONTEXT_BYTES = 300 * MIB  # of a CUDA context and its libraries
F32 = 4


@dataclass(frozen=True)
class Reckoned:
    """The probe of a Problem: weights, KV, and a compute buffer with logits of a micro-batch, its widest activations
    and the largest weight that llama.cpp may offload."""

    info: ModelInfo
    operators: Sequence[Operator]
    profile: Profile

    def __call__(self, workload: Workload, placement: Placement) -> LoadBytes:
        info, operators = self.info, self.operators
        there = sum(op.bytes for op, there_is in zip(operators, placement.on_device, strict=True) if there_is)
        here = sum(op.bytes for op in operators) - there
        if placement.first_device_layer > info.n_layer:
            return LoadBytes(0, here, 0, 0, self.card_bytes())
        shape = next(case.shape for case in self.profile.rest if case.shape is not None)
        layers = info.n_layer - placement.first_device_layer
        kv = int(layers * workload.n_ctx * cache_bytes(shape))
        compute = CONTEXT_BYTES + buffer_bytes(info, workload.n_ubatch)
        compute += max(
            (op.bytes for op, there_is in zip(operators, placement.on_device, strict=True) if not there_is),
            default=0,
        )
        return LoadBytes(there, here, kv, compute, self.card_bytes())

    def card_bytes(self) -> int:
        return int(self.profile.fingerprint["device_memory_bytes"])


def buffer_bytes(info: ModelInfo, n_ubatch: int) -> int:
    """Bytes of a micro-batch's logits and its widest activations."""
    return F32 * n_ubatch * (info.n_vocab + info.n_ff * max(1, info.n_expert_used) * 3 + 4 * info.n_embd)


Key = tuple[FigureCell, FigureArm]

SLICED = ("scheinfer", "split", "auto")
"""Policies whose plans are searched in the quick way: one takes seconds instead of a minute."""


@dataclass(frozen=True)
class ArmPrediction:
    """What the simulator says of an arm in a cell."""

    ttft_s: float
    tpot_s: float
    total_s: float
    device_bytes: int  # of weights, whole and sliced
    n_host: int  # operators of layers that the CPU computes whole
    n_ubatch: int

    def seconds(self, metric: str) -> float:
        return float(getattr(self, f"{metric}_s"))


def needed(figures: Iterable[Figure]) -> list[Key]:
    """In the order in which the figures ask for them."""
    keys: dict[Key, None] = {}
    for figure in figures:
        for cell in figure.cells:
            for arm in (figure.ours, figure.baseline, figure.variant):
                if arm is not None:
                    keys[cell, arm] = None
        for cell in figure.also[0] if figure.also else ():
            keys.update({(cell, arm): None for arm in (figure.ours, figure.also and figure.also[1]) if arm})
    return list(keys)


def run(key: Key) -> ArmPrediction | None:
    """None if the arm's plan does not fit."""
    cell, arm = key
    asked, load = problem(cell, arm), workload(cell)
    rules, quick = Rules(arm.affinity, arm.fill, arm.prefetch), arm.policy in SLICED  # type: ignore[arg-type]
    try:
        made = decide([asked], Request(load, policy_named(arm.policy, rules), rules=rules, quick=quick))
    except DoesNotFit:
        return None
    found = price(asked, made.workload, made.placement, arm.offload)
    taken = _device_bytes([operator.bytes for operator in asked.operators], made.placement)
    n_host = _n_host(asked.operators, made.placement)
    return ArmPrediction(found.ttft_s, found.tpot_s, found.total_s, taken, n_host, made.workload.n_ubatch)


def _device_bytes(sizes: list[int], placement: Placement) -> int:
    whole = sum(size for size, there in zip(sizes, placement.on_device, strict=True) if there)
    return whole + placement.gg_bytes


def _n_host(operators: Sequence[Operator], placement: Placement) -> int:
    each = zip(operators, placement.on_device, placement.gg, placement.cg, strict=True)
    return sum(o.layer is not None and not (there or on_device or streamed) for o, there, on_device, streamed in each)


def run_all(keys: list[Key], jobs: int | None = None) -> dict[Key, ArmPrediction | None]:
    """All of them, the longest first; progress on stderr."""
    found: dict[Key, ArmPrediction | None] = {}
    start = time.monotonic()
    order = sorted(keys, key=lambda key: key[1].policy not in SLICED)
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        waiting = {pool.submit(run, key): key for key in order}
        for done in as_completed(waiting):
            cell, arm = waiting[done]
            found[cell, arm] = done.result()
            print(f"{len(found)} of {len(keys)}, {time.monotonic() - start:.0f} s: {cell.machine} {cell.model} "
                  f"{arm.policy}", file=sys.stderr, flush=True)  # fmt: skip
    return found
