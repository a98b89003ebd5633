"""Re-planning in a loaded engine: cuts move between decodes, logits stay, memory is as the ledger says."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.test_engine import QUANTISED_NMSE, TOKENS, nmse, stock_logits
from gguf_factory import write_gguf

import ggml_bridge
from oallama.core.types import OperatorPlacement
from oallama.device.load_params import load_bridge
from oallama.place.kept_cuts import Replan
from oallama.place.replan import Choice, Replanner
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.run import replan as running
from oallama.run.engine import Engine

DEVICES = ("emulated:vram=1GiB,scale=1,values=real", "cpu-pair")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", "llama", weight_type="Q4_0", n_layer=4)


def case(model: Path, device: str) -> tuple[Placer, Plan, Replan]:
    """A plan that streams, with cuts that stream more and less."""
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=device, profile=profile, gpu_weights=0.3, threads=1)
    plan = placer.plan("scheinfer", n_prompt=64, n_gen=32)
    replan = placer.kept_cuts(plan)
    assert replan is not None and replan.moves
    return placer, plan, replan


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def move_to(engine: Engine, replan: Replan, number: int) -> None:
    """The cut of this number of every block, the last where it has fewer."""
    assert engine._split is not None
    for kept in replan.blocks:
        for name in kept.operators:
            engine._split.plan.move_cut(name, kept.cuts[min(number, len(kept.cuts) - 1)].cc)


def test_logits_are_stock_s_with_every_cut(model: Path, device: str) -> None:
    placer, plan, replan = case(model, device)
    wanted = stock_logits(model, TOKENS)
    with placer.engine(plan, progress=False, replan=replan) as engine:
        assert engine.plan.operators == plan.operators, "the plan's cuts are the first"
        for number in (0, 1, 2, 1, 0):
            move_to(engine, replan, number)
            assert nmse(engine.logits(TOKENS), wanted) <= QUANTISED_NMSE


def test_re_planning_during_generation_changes_no_token(
    model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other cuts after every second token: each token is the one that stock llama.cpp finds most likely, or as likely
    as that but for rounding."""
    numbers = cycle((1, 2, 0))

    def other_cuts(rule: Replanner, choice: Choice, observed: object) -> Choice:
        number = next(numbers)
        return Choice(tuple(min(number, len(kept.cuts) - 1) for kept in rule.replan.blocks), choice.rates)

    monkeypatch.setattr(running, "TOKENS_BETWEEN", 2)
    monkeypatch.setattr(running, "TOKENS_SETTLED", 0)
    monkeypatch.setattr(Replanner, "revised", other_cuts)
    placer, plan, replan = case(model, device)
    prompt = TOKENS[:40]
    with placer.engine(plan, progress=False, replan=replan) as engine:
        made = engine.generate(prompt, max_tokens=44, temperature=0)
        assert len(engine.replanned) >= 10 and all("were moved" in change for change in engine.replanned)
        statistics = engine.statistics
    tokens = [*prompt, *made.tokens]
    logits = stock_logits(model, tokens)
    spread = float(np.std(logits))
    for i, token in enumerate(made.tokens, start=len(prompt) - 1):
        assert logits[i][token] >= logits[i].max() - 4 * QUANTISED_NMSE**0.5 * spread
    assert {key.batch for key in statistics} >= {1} and {key.depth for key in statistics} <= {64, 128}
    assert len({key.cc for key in statistics}) > 1 and all(mean.total_s > 0 for mean in statistics.values())


def test_its_memory_is_what_the_ledger_says(model: Path, device: str) -> None:
    placer, plan, replan = case(model, device)
    with placer.engine(plan, progress=False):
        alone = load_bridge().split().memory().host_weights
    with placer.engine(plan, progress=False, replan=replan) as engine:
        twice = load_bridge().split().memory().host_weights - alone
        assert engine.plan.memory.weights_host == plan.memory.weights_host + replan.twice_bytes
        assert engine.plan.memory.staging == plan.memory.staging + replan.staging_bytes
        device_bytes = engine.memory.device_bytes
        assert not engine.warnings
        engine.generate(TOKENS[:40], max_tokens=4, temperature=0)
        for number in (1, 2):
            move_to(engine, replan, number)
            engine.generate(TOKENS[:40], max_tokens=4, temperature=0)
        held = load_bridge().split().memory()
        assert held.device_weights + held.device_compute <= device_bytes, "nothing comes with another cut"
    padding = 64 * sum(len(kept.operators) * len(kept.cuts) for kept in replan.blocks)
    assert replan.twice_bytes <= twice <= replan.twice_bytes + padding


def test_a_cut_that_was_not_kept_is_refused(model: Path) -> None:
    placer, plan, replan = case(model, DEVICES[0])
    with placer.engine(plan, progress=False) as engine:
        with pytest.raises(ggml_bridge.Unsupported, match="not kept"):
            move_to(engine, replan, 1)
        assert engine.statistics == {} and engine.replanned == () and not engine.replans


def test_blocks_with_hot_experts_keep_no_cuts_and_other_blocks_move_beside_them(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "qwen3moe", weight_type="Q4_0", n_layer=4)
    placer, plan, replan = case(model, DEVICES[0])
    kept = {name for one in replan.blocks for name in one.operators}
    first = min(o.layer for o in placer.operators if o.name in kept and o.op == "MUL_MAT_ID" and o.layer is not None)
    hot = {o.name for o in placer.operators if o.layer == first and o.op == "MUL_MAT_ID"}
    placements = tuple(
        OperatorPlacement(p.name, 0.0, 0.0, 1.0, hot_experts=(1, 2, 5)) if p.name in hot else p for p in plan.operators
    )
    table = plan.token_assignment or ((2, 0), (64, 32))
    plan = replace(plan, operators=placements, token_assignment=table)
    beside = placer.kept_cuts(plan)
    assert beside is not None and beside.moves
    assert not hot & {name for one in beside.blocks for name in one.operators}
    wanted = stock_logits(model, TOKENS)
    with placer.engine(plan, progress=False, replan=beside) as engine:
        for number, experts in ((1, (0, 3, 4)), (2, (1, 2, 5)), (0, (5, 6, 7))):
            move_to(engine, beside, number)
            assert engine.set_hot_experts(first, experts) > 0
            assert nmse(engine.logits(TOKENS), wanted) <= QUANTISED_NMSE
