"""What plans are predicted to give at the budgets of a table, beside what the table says of another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.pages import table

from card_fit.machine import Machine
from card_fit.models import Model
from card_fit.predict import decode_pass, graph_of, prompt_passes
from card_fit.tables import Run, TableError, read_csv
from oallama.core.errors import DoesNotFit
from oallama.core.profile import Profile
from oallama.core.types import Workload
from oallama.core.units import MIB
from oallama.cost.offload import cache_bytes
from oallama.place.attention import with_attention
from oallama.place.decide import decide
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes, Problem
from oallama.profile.described import described

COLUMNS = ("Model", "CtxSize", "VramMB", "TPS", "TTFT(msec)")
POLICIES = ("oato", "scheinfer")
UBATCHES = (512, 2048)  # the larger one no larger than the prompt
CONTEXT_BYTES = 300 * MIB  # of a CUDA context and its libraries
F32 = 4


@dataclass(frozen=True)
class Budget:
    """A row of such a table, and the stock runs at that context."""

    model: str
    context: int
    vram_mb: int
    tps: float
    ttft_s: float


def read_budgets(paths: Sequence[Path], models: Mapping[str, Model]) -> list[Budget]:
    """Raises TableError."""
    budgets = []
    for path in paths:
        for where, row in read_csv(path, COLUMNS):
            budget = _budget(row, where)
            if budget.model not in models:
                raise TableError(f"{path} has {budget.model}, which is not described")
            budgets.append(budget)
    return budgets


def _budget(row: dict[str, str], where: str) -> Budget:
    try:
        size = row["CtxSize"]
        context = int(size[:-1]) * 1024 if size.endswith("K") else int(size)
        return Budget(row["Model"], context, int(row["VramMB"]), float(row["TPS"]), float(row["TTFT(msec)"]) / 1e3)
    except (TypeError, ValueError):
        raise TableError(f"{where} is not in numbers: {row}") from None


def plans_of(
    machine: Machine,
    models: Mapping[str, Model],
    budgets: Sequence[Budget],
    runs: Sequence[Run],
    policies: Sequence[str] = POLICIES,
) -> list[dict[str, Any]]:
    """For each budget: what the table says, the fastest stock run that kept to it, and the best of our plans."""
    made = []
    for budget in budgets:
        name = models[budget.model].name
        stock = [r for r in runs if models[r.model].name == name and r.context == budget.context]
        if stock:
            made.append(_row(machine, models[budget.model], budget, stock, policies))
    return made


def _row(
    machine: Machine, model: Model, budget: Budget, stock: Sequence[Run], policies: Sequence[str]
) -> dict[str, Any]:
    kept = [run for run in stock if run.budget_mb is not None and run.budget_mb <= budget.vram_mb] or list(stock)
    fastest = min(kept, key=lambda r: r.n_prompt / r.prompt_tps + r.n_gen / r.eval_tps)
    load = Workload(fastest.n_prompt, fastest.n_gen, budget.context)
    row: dict[str, Any] = {
        "model": budget.model, "context": budget.context, "vram_mb": budget.vram_mb,
        "ttft_s": budget.ttft_s, "tps": budget.tps,
        "stock_ttft_s": fastest.n_prompt / fastest.prompt_tps, "stock_tps": fastest.eval_tps, "stock_ngl": fastest.ngl,
    }  # fmt: skip
    whole = -(-load.n_prompt // UBATCHES[0]) * UBATCHES[0]
    loads = [replace(load, n_ubatch=ubatch) for ubatch in sorted({min(ubatch, whole) for ubatch in UBATCHES})]
    for policy in policies:
        found = [_decided(machine, model, budget, policy, one) for one in loads]
        best = min((each for each in found if each), key=lambda each: each["total_s"], default=None)
        row[policy] = best
    return row


def _decided(machine: Machine, model: Model, budget: Budget, policy: str, load: Workload) -> dict[str, Any] | None:
    """The policy's plan for these sizes; None where nothing fits."""
    problem = _problem(machine, model, load, budget.vram_mb * MIB)
    try:
        decision = decide(problem, policy, load, "mixed")
    except DoesNotFit:
        return None
    ttft_s = decision.predicted.ttft_s + machine.first_prompt_s
    return {
        "ttft_s": ttft_s, "tps": 1 / decision.predicted.tpot_s, "n_ubatch": decision.workload.n_ubatch,
        "total_s": ttft_s + load.n_gen * decision.predicted.tpot_s,
    }  # fmt: skip


def _problem(machine: Machine, model: Model, load: Workload, vram: int) -> Problem:
    as_run = Run(model.name, load.n_ctx, 0, load.n_ubatch, None, load.n_prompt, load.n_gen, 1.0, 1.0)
    tokens = {p.n_tokens for p in (*prompt_passes(as_run), *decode_pass(as_run))} | {64, 128, 256, 512, 1024}
    profile = described(machine.host, machine.card, model.info, model.operators, sorted(tokens))
    return Problem(
        model.operators, graph_of(model), with_attention(profile, "on"),
        _Probe(model, profile), vram, 1.0, None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Probe:
    """What a load would take, reckoned: weights, KV, and a compute buffer with logits of a micro-batch, its widest
    activations and the largest weight that llama.cpp may offload."""

    model: Model
    profile: Profile

    def __call__(self, load: Workload, placed: Placed) -> LoadBytes:
        info, operators = self.model.info, self.model.operators
        there = sum(op.bytes for op, on in zip(operators, placed.on_device, strict=True) if on)
        here = sum(op.bytes for op in operators) - there
        if placed.first_device_layer > info.n_layer:
            return LoadBytes(0, here, 0, 0, self.machine_bytes())
        shape = next(case.shape for case in self.profile.rest if case.shape is not None)
        layers = info.n_layer - placed.first_device_layer
        kv = int(layers * load.n_ctx * cache_bytes(shape))
        wide = info.n_ff * max(1, info.n_expert_used) * 3 + 4 * info.n_embd
        compute = CONTEXT_BYTES + F32 * load.n_ubatch * (info.n_vocab + wide)
        compute += max((op.bytes for op, on in zip(operators, placed.on_device, strict=True) if not on), default=0)
        return LoadBytes(there, here, kv, compute, self.machine_bytes())

    def machine_bytes(self) -> int:
        return int(self.profile.fingerprint["device_memory_bytes"])


def budgets_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """TTFT in seconds and tokens per second: stock as measured, the table's program as measured, ours as predicted."""
    policies = [policy for policy in POLICIES if rows and policy in rows[0]]
    rows_of_text = [
        (row["model"], f"{row['context'] // 1024}K", row["vram_mb"], _cell(row["stock_ttft_s"], row["stock_tps"]),
         _cell(row["ttft_s"], row["tps"]),
         *(_cell(row[p]["ttft_s"], row[p]["tps"]) if row[p] else "does not fit" for p in policies))
        for row in rows
    ]  # fmt: skip
    return "\n".join(table(("model", "context", "VRAM, MB", "stock", "table", *policies), rows_of_text)[:-1])


def _cell(ttft_s: float, tps: float) -> str:
    return f"{ttft_s:.2f} s, {tps:.1f}"
