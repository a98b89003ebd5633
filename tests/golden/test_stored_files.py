"""Files in the cache as earlier runs left them are read: history-v1, routing-v1, gate-v2. Profiles and plans have tests
of their own. A version that follows keeps its predecessor's sample, or says here that it is measured anew."""

from __future__ import annotations

import json
from pathlib import Path

from oallama.core.history import Rates
from oallama.gate.store import read_verdict, verdict_path
from oallama.profile.history import history_path, read_history
from oallama.profile.routing import read_routing, routing_path

STORED = Path(__file__).parent / "stored"
MODEL, MACHINE, TIMINGS = "ab" * 32, "0" * 16, "c" * 16


def kept(name: str, path: Path) -> None:
    """Have the sample in the cache."""
    assert path.name.startswith(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((STORED / f"{name}.json").read_bytes())


def test_a_history_of_version_1() -> None:
    kept("history-v1", history_path(MODEL, MACHINE))
    history = read_history(MODEL, MACHINE, TIMINGS)
    assert (history.decode, history.prompt, history.link) == (Rates(1.5, 1.0), Rates(1.0, 1.25), 2.0)
    assert [(passes.batch, passes.n_passes, passes.total_s) for passes in history.seen] == [(1, 64, 3.5)]


def test_a_routing_of_version_1() -> None:
    kept("routing-v1", routing_path(MODEL))
    routing = read_routing(MODEL, 4, 2)
    assert routing is not None and routing.half_life_tokens == 4096
    assert [(layer.layer, layer.n_tokens, layer.latest) for layer in routing.decode] == [(0, 7, (4, 3, 4, 3))]


def test_a_verdict_of_version_2() -> None:
    key = json.loads((STORED / "gate-v2.json").read_text())["key"]
    kept("gate-v2", verdict_path(key))
    verdict = read_verdict(key)
    assert verdict is not None and verdict.won is not None
    assert (verdict.won.policy, verdict.stock, verdict.tests[0].n_gen) == ("split", "stock-fit", 16)
    document = json.loads(json.dumps(verdict.document))
    assert (document["winner"], document["settled"]) == ("split", True) and document["races"][0]["standing"] == "won"
