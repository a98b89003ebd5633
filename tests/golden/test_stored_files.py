"""Files in the cache as earlier runs left them are read: history-v1, routing-v1, gate-v2. Profiles and plans have tests
of their own. A version that follows keeps its predecessor's sample, or says here that it is measured anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oallama.core.files import cache_folder
from oallama.core.history import Rates
from oallama.gate.store import read_verdict, verdict_path
from oallama.profile.history import history_path, read_history
from oallama.profile.routing import read_routing, routing_path

MODEL, MACHINE, TIMINGS = "ab" * 32, "0" * 16, "c" * 16
KEY = {"model": MODEL, "machine": MACHINE, "cap": 230, "prompt": 2, "gpu_weights": None}
HISTORY = {
    "version": 1, "model_fingerprint": MODEL, "profile": TIMINGS, "decode": {"cpu": 1.5, "device": 1.0},
    "prompt": {"cpu": 1.0, "device": 1.25}, "link": 2.0, "seen": [
        {"batch": 1, "n_passes": 64, "cpu_s": 2.0, "wait_s": 1.0, "other_s": 0.5, "predicted_cpu_s": 2.0,
         "predicted_device_s": 3.0, "predicted_between_s": 0.25, "copies_last": False}],
}  # fmt: skip
ROUTING = {
    "version": 1, "model_fingerprint": MODEL, "n_expert": 4, "n_expert_used": 2, "half_life_tokens": 4096.0,
    "decode": [{"layer": 0, "n_tokens": 7, "uses": [4.0, 3.0, 4.0, 3.0], "before": [0.0, 0.0, 0.0, 0.0],
                "latest": [4.0, 3.0, 4.0, 3.0]}],
    "prompt": [],
}  # fmt: skip
VERDICT = {
    "key": KEY, "stock": "stock-fit", "placement": {"n_gpu_layers": 20, "overrides": [["blk\\.0", "CPU"]],
    "n_cpu_moe": 1}, "tests": [{"n_prompt": 64, "n_gen": 16, "n_depth": 0}], "races": [
        {"policy": "split", "promised": 1.3, "pairs": [[1.3, 1.0], [1.31, 1.0], [1.29, 1.0], [1.3, 1.0]],
         "refused": ""}], "turn_s": 0.5, "seconds": 12.5, "measured_at": "2026-11-21T05:00:00Z",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kept() -> None:
    cache_folder().mkdir(parents=True)
    assert [path.name for path in (history_path(MODEL, MACHINE), routing_path(MODEL))] == [
        f"history-v1-{MACHINE}-{MODEL[:16]}.json", f"routing-v1-{MODEL[:16]}.json"
    ]  # fmt: skip
    kept: tuple[tuple[Path, object], ...] = (
        (history_path(MODEL, MACHINE), HISTORY), (routing_path(MODEL), ROUTING), (verdict_path(KEY), VERDICT)
    )  # fmt: skip
    for path, document in kept:
        path.write_text(json.dumps(document), encoding="utf-8")


def test_a_history_of_version_1() -> None:
    history = read_history(MODEL, MACHINE, TIMINGS)
    assert (history.decode, history.prompt, history.link) == (Rates(1.5, 1.0), Rates(1.0, 1.25), 2.0)
    assert [(passes.batch, passes.n_passes, passes.total_s) for passes in history.seen] == [(1, 64, 3.5)]


def test_a_routing_of_version_1() -> None:
    routing = read_routing(MODEL, 4, 2)
    assert routing is not None and routing.half_life_tokens == 4096
    assert [(layer.layer, layer.n_tokens, layer.latest) for layer in routing.decode] == [(0, 7, (4, 3, 4, 3))]


def test_a_verdict_of_version_2() -> None:
    verdict = read_verdict(KEY)
    assert verdict is not None and verdict.won is not None
    assert (verdict.won.policy, verdict.stock, verdict.tests[0].n_gen) == ("split", "stock-fit", 16)
    document = json.loads(json.dumps(verdict.document))
    assert (document["winner"], document["settled"]) == ("split", True) and document["races"][0]["standing"] == "won"
