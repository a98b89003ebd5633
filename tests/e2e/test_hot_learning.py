"""Hot experts that follow what is used, in a loaded model: uses counted by the back end, experts exchanged in the
background behind a generation, logits as stock llama.cpp's all the while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.split_cases import written
from e2e.stock import needs_programs, program
from e2e.test_engine import engine_of, nmse, stock_logits
from e2e.test_serve import serving
from e2e.test_split_hot import EMULATED, EXACT_NMSE, PROMPT, hot_case
from e2e.test_stock_programs import plugin_is_built
from processes import oallama

from oallama.core.routing import Routing, Tally
from oallama.core.types import ModelInfo
from oallama.place.learned_experts import exchanges
from oallama.profile.routing import Traffic, tallied, unknown_routing
from oallama.profile.routing_store import read_routing, write_routing
from oallama.run import hot_experts
from oallama.run.engine import Engine
from oallama.run.learned_experts import Known

DEVICES = ("cpu-pair", EMULATED, "rpc-worker:1")
N_EXPERT = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrices of tiny models take several pieces."""
    monkeypatch.setattr(hot_experts, "PIECE_BYTES", 4096)
    yield


def unknown(model: ModelInfo) -> Known:
    return Known(unknown_routing(model.fingerprint, model.n_expert, model.n_expert_used))


def settled(engine: Engine) -> None:
    """Until nothing is exchanged any more."""
    assert engine.learns
    for _ in range(6000):
        if not engine.exchanges:
            return
        time.sleep(0.01)
    raise AssertionError("the background never ends")


def hot_of(engine: Engine) -> dict[str, tuple[int, ...]]:
    return {p.name: p.hot_experts for p in engine.plan.operators if p.hot_experts}


def least_used(routing: Routing, layer: int, n: int) -> set[int]:
    uses = {each.layer: each.uses for each in routing.decode}[layer]
    return set(sorted(range(len(uses)), key=lambda e: uses[e])[:n])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("arch", "n_used"), [("qwen3moe", 2), ("gpt-oss", 2), ("llama-moe", 1), ("qwen3moe", 8)])
@pytest.mark.usefixtures("small_pieces")
def test_sets_follow_and_logits_stay_stocks(arch: str, n_used: int, device: str, models: Path) -> None:
    path = written(models, arch, n_expert_used=n_used)
    expected = stock_logits(path, PROMPT, n_ubatch=64)
    case = hot_case(path, device, (1, 2, 5))
    known = unknown(case.model)
    recorded: list[Traffic] = []
    with engine_of(case, learn=known, on_traffic=recorded.append, record_every=1) as engine:
        assert engine.plan.operators == case.plan.operators
        for seed in range(4):
            engine.generate(PROMPT[:8], max_tokens=60, temperature=2.0, seed=seed)
            assert nmse(engine.logits(PROMPT), expected) <= EXACT_NMSE, "whatever is under way"
            settled(engine)
            assert nmse(engine.logits(PROMPT), expected) <= EXACT_NMSE
        counts = {each.layer: each for each in known.routing.decode}
        hot, n_exchanged = hot_of(engine), engine.n_exchanged
        assert all(len(experts) == 3 for experts in hot.values())
    for layer, each in counts.items():
        ids = np.concatenate([run for one in recorded for run in one.decode.get(layer, ())])
        if layer == 0:
            assert list(each.latest) == np.bincount(ids.ravel(), minlength=N_EXPERT).tolist()
        n_last = 4 if layer == 1 and arch != "gpt-oss" else 0  # computed for a prompt's last token only
        assert each.n_tokens == len(ids) + n_last
        (own,) = {hot[operator.name] for operator in case.operators if operator.name in hot and operator.layer == layer}
        if n_used == N_EXPERT:
            assert own == (1, 2, 5), "where all are used alike, nothing is exchanged"
        else:
            assert exchanges([float(n) for n in each.latest], own, n_used, 0.05, 3.0) == (), (
                "nothing much better is left"
            )
    assert (n_exchanged > 0) == (n_used < N_EXPERT)


@pytest.mark.usefixtures("small_pieces")
def test_a_request_in_the_middle_of_an_exchange_computes_right(models: Path) -> None:
    """Steps stand still while it lasts: the CPU has the experts on their way."""
    path = written(models, "qwen3moe", n_expert_used=2)
    expected = stock_logits(path, PROMPT, n_ubatch=64)
    case = hot_case(path, "cpu-pair", (0, 1, 2))
    known = unknown(case.model)
    with engine_of(case, learn=known) as engine:
        steps: list[Callable[[], None]] = []
        for layer in (0, 1):
            steps += _made_steps(engine, layer)
        assert len(steps) > 12
        for number, step in enumerate(steps):
            engine.call(step)
            if number % 3 == 0:
                assert nmse(engine.logits(PROMPT), expected) <= EXACT_NMSE, number
        assert engine.set_hot_experts(0, (0, 1, 7)) >= 1
        assert nmse(engine.logits(PROMPT), expected) <= EXACT_NMSE


def _made_steps(engine: Engine, layer: int) -> Iterator[Callable[[], None]]:
    assert engine._split is not None
    return engine._hot.steps(engine._split.plan, layer, 0, 3 + layer)


def test_what_is_known_places_the_experts_at_the_load(models: Path) -> None:
    path = written(models, "qwen3moe", n_expert_used=2)
    case = hot_case(path, "cpu-pair", (0, 1, 2))
    known = unknown(case.model)
    known.routing = tallied(known.routing, {0: Tally(4000, (1, 1, 2000, 3000, 3000, 0, 0, 0))})
    with engine_of(case, learn=known) as engine:
        by_layer = {o.layer: hot_of(engine)[o.name] for o in case.operators if o.name in hot_of(engine)}
        assert by_layer == {0: (2, 3, 4), 1: (0, 1, 2)}
        assert nmse(engine.logits(PROMPT), stock_logits(path, PROMPT, n_ubatch=64)) <= EXACT_NMSE
        assert engine.warnings == ()


def test_without_learning_nothing_is_counted_or_exchanged(models: Path) -> None:
    case = hot_case(written(models, "qwen3moe", n_expert_used=2), "cpu-pair", (1, 2, 5))
    with engine_of(case) as engine:
        engine.generate(PROMPT[:8], max_tokens=60, temperature=2.0)
        assert not engine.learns and engine.n_exchanged == 0
        assert engine.plan == case.plan


def test_run_and_chat_keep_counts(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(models, "qwen3moe", n_expert_used=2)
    case = hot_case(path, "cpu-pair", (1, 2, 5))
    case.plan.save(tmp_path / "plan.json")
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    shape = (case.model.fingerprint, case.model.n_expert, case.model.n_expert_used)
    asked = ("--plan", tmp_path / "plan.json", "--threads", 1, "-n", 20)
    oallama("run", "-m", path, "once upon", *asked, "--no-learn-experts")
    assert read_routing(*shape) is None
    oallama("run", "-m", path, "once upon", *asked)
    first = read_routing(*shape)
    assert first is not None and {each.layer for each in first.decode} == {0, 1}
    assert all(0 < each.n_tokens <= 20 for each in first.decode)
    oallama("chat", "-m", path, *asked, "--verbose", input="once\nupon\n")
    second = read_routing(*shape)
    assert second is not None and second.decode[0].n_tokens > first.decode[0].n_tokens


@needs_programs
@pytest.mark.skipif(not plugin_is_built(), reason="libggml-oallama is not built")
def test_serve_keeps_counts_and_begins_with_what_is_known(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server has no call between requests, so what it counts is for the next start."""
    path = written(models, "qwen3moe", n_expert_used=2)
    case = hot_case(path, "rpc-worker:1", (0, 1, 2))
    case.plan.save(tmp_path / "plan.json")
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    shape = (case.model.fingerprint, case.model.n_expert, case.model.n_expert_used)
    known = tallied(unknown(case.model).routing, {0: Tally(4000, (1, 1, 2000, 3000, 3000, 0, 0, 0))})
    write_routing(known)
    asked = ("--plan", tmp_path / "plan.json", "--pooling", "none")
    with serving(tmp_path, program("llama-server"), *asked, model=path) as server:
        told = httpx.get(f"{server.url}/placement", timeout=30).json()
        assert told["device"].startswith("rpc"), "hot experts alone need the device"
        body = {"prompt": [5, 6, 7, 8], "n_predict": 30, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{server.url}/completion", json=body, timeout=120).status_code == 200
        lines = Path(f"/proc/{told['state']['pid']}/environ").read_bytes().split(b"\0")
        plan = next(line for line in lines if line.startswith(b"OALLAMA_PLAN="))[13:].decode()
        text = Path(plan).read_text(encoding="utf-8")
        assert "hot=2,3,4" in text and "hot=0,1,2" in text, "of layer 0, and of layer 1, of which nothing was known"
    after = read_routing(*shape)
    assert after is not None
    counts = {each.layer: each.n_tokens for each in after.decode}
    assert counts[0] >= 4000 + 29 and counts[1] >= 29
