"""A cell of a paper as the planner's problem: model and machine by name, sizes reckoned, nothing loaded or measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

from card_model import read_machine, read_models
from model_shapes import KNOWN
from shared import ROOT, InputError, planned

from oallama.core.types import ModelInfo, Operator, Workload
from oallama.core.units import GIB
from oallama.cost.graph import Graph, build_graph
from oallama.device.card import Card, Host
from oallama.device.machines import MACHINES
from oallama.place.attention import with_attention
from oallama.place.problem import Problem
from oallama.profile.described import TOKENS, described
from reproduce.figures import FigureArm, FigureCell
from reproduce.reckoned import Reckoned
from reproduce.scheinfer_constants import RATES
from reproduce.scheinfer_formulas import implied_cpu_beta

BENCHMARKS = ROOT / "docs" / "benchmarks"
FITTED = {"rtx5090": BENCHMARKS / "real-card-rtx5090.json"}
"""Machines whose rates were fitted to published runs (docs/real-card.md)."""

INT4_BYTES = 0.5
PLENTY = 1e15  # bytes/s: nobody waits for the DRAM


@cache
def model(name: str, type_name: str) -> tuple[ModelInfo, tuple[Operator, ...], Graph]:
    """By its shape's name, its matrices of one type."""
    if name not in KNOWN:
        described_models = read_models(BENCHMARKS / "real-card-models.toml")
        if name not in described_models:
            raise InputError(f"there is no shape {name!r} in scripts/model_shapes.py")
        found = described_models[name]
        return found.info, found.operators, build_graph(found.info, found.operators)
    model = planned(name, type_name)
    return model.info, model.operators, model.graph


def machine(cell: FigureCell) -> tuple[Host, Card]:
    """The cell's CPU and card. Raises InputError."""
    if cell.machine in FITTED:
        fitted = read_machine(FITTED[cell.machine])
        return fitted.host, fitted.card
    if cell.machine not in MACHINES:
        raise InputError(f"there is no machine {cell.machine!r}")
    machine = MACHINES[cell.machine]
    return machine.host if cell.threads is None else _with_threads(machine.host, cell.threads), machine.card


def _with_threads(host: Host, threads: int) -> Host:
    """Testbed A's with fewer of its 32 cores: weights as the published r_CG of so many threads implies, arithmetic in
    proportion, and the DRAM that the CPU shares with the link as it was: eight channels of DDR4-3200."""
    beta = implied_cpu_beta(RATES[threads])
    share = threads / 32
    return replace(host, name=f"{threads} threads of {host.name}", bytes_per_s=INT4_BYTES / beta,
                   flops_per_s=share * host.flops_per_s, dram_bytes_per_s=204.8e9)  # fmt: skip


def workload(cell: FigureCell) -> Workload:
    whole = cell.n_prompt + cell.n_gen
    return Workload(cell.n_prompt, cell.n_gen, cell.n_ctx or -(-whole // 256) * 256, cell.n_ubatch)


def problem(cell: FigureCell, arm: FigureArm) -> Problem:
    """What a plan of that arm is made from. Host memory is taken to be enough; flash attention is on."""
    info, ops, graph = model(cell.model, cell.type)
    host, card = machine(cell)
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
        host_room=sys.maxsize,
    )
