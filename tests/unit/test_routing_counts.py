"""Counts of experts: windows, recordings, and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from oallama.core.routing import HALF_LIFE_TOKENS, Routing, Tally, Traffic
from oallama.cost.experts import expert_use
from oallama.profile.routing import (
    ENOUGH_TOKENS,
    LEAST_TOKENS,
    counted,
    read_routing,
    routing_path,
    unknown_routing,
    write_routing,
)
from oallama.profile.store import FOLDER_VARIABLE

MODEL = "f" * 64
N_EXPERT, N_USED = 8, 2


def drawn(seed: int, n_tokens: int, weights: npt.NDArray[np.float64] | None = None) -> Tally:
    random = np.random.default_rng(seed)
    chosen = [random.choice(N_EXPERT, N_USED, replace=False, p=weights) for _ in range(n_tokens)]
    return tally(*(tuple(map(int, token)) for token in chosen))


def tally(*tokens: tuple[int, ...]) -> Tally:
    return Tally(len(tokens), tuple(sum(expert in token for token in tokens) for expert in range(N_EXPERT)))


def after(*answers: Tally) -> Routing:
    """The decode of layer 0 counted answer by answer."""
    routing = unknown()
    for answer in answers:
        routing = counted(routing, Traffic({0: answer}, {}))
    return routing


def unknown() -> Routing:
    return unknown_routing(MODEL, N_EXPERT, N_USED)


tokens_of = st.lists(st.permutations(range(N_EXPERT)).map(lambda order: tuple(order[:N_USED])), max_size=20)


@settings(max_examples=examples(60))
@given(tokens_of, tokens_of)
def test_counts_are_those_of_a_count_by_hand(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    """Of tokens in their order; a tally takes them to be spread evenly."""
    routing = after(tally(*first), tally(*second))
    tokens = [*first, *second]
    if not tokens:
        assert routing.decode == ()
        return
    (layer,) = routing.decode
    uses = [0.0] * N_EXPERT
    for since, token in enumerate(reversed(tokens)):
        for expert in token:
            uses[expert] += 2 ** (-since / HALF_LIFE_TOKENS)
    assert layer.n_tokens == len(tokens)
    assert layer.uses == pytest.approx(uses, rel=0.01)
    assert layer.latest == tuple(sum(expert in token for token in tokens) for expert in range(N_EXPERT))


def test_a_recording_goes_on_until_it_can_be_judged_on() -> None:
    """So a short answer does not take the place of what sets are judged on: 64 tokens, then as many as before."""
    (begun,) = after(drawn(1, LEAST_TOKENS - 1), drawn(2, 1)).decode
    assert sum(begun.before) == 0 and sum(begun.latest) == LEAST_TOKENS * N_USED
    (second,) = after(drawn(1, 100), drawn(2, 99), drawn(3, 20)).decode
    assert sum(second.before) == pytest.approx(100 * N_USED, rel=0.01)
    assert sum(second.latest) == 119 * N_USED
    (third,) = after(drawn(1, 100), drawn(2, 100), drawn(3, 20)).decode
    assert sum(third.latest) == 20 * N_USED
    (full,) = after(drawn(1, 5000), drawn(2, ENOUGH_TOKENS), drawn(3, 7)).decode
    assert sum(full.latest) == 7 * N_USED


def test_traffic_that_changes_is_seen() -> None:
    hot = np.array([0.4, 0.4, *[0.2 / 6] * 6])
    stays = after(drawn(1, 400, hot), drawn(2, 400, hot))
    moves = after(drawn(1, 400, hot), drawn(2, 400, hot[::-1]))
    assert expert_use(stays)[0].decode[2] > 0.6
    assert expert_use(moves)[0].decode[2] < 0.2
    assert expert_use(stays)[0].prompt[2] == 2 / N_EXPERT, "not recorded: all alike"
    assert expert_use(unknown()) == {}


#
# files
#


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def _without_a_count(document: dict[str, object]) -> None:
    document["decode"][0]["uses"].pop()  # type: ignore[index]


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(version=99),
        lambda document: document.update(model_fingerprint="another"),
        lambda document: document.update(n_expert=9),
        lambda document: document.update(half_life_tokens=1e-300),
        lambda document: document["decode"][0].update(latest=[1e300] * 8),
        lambda document: document.update(decode=document["decode"] * 2),
        lambda document: document["decode"][0].update(n_tokens=-1),
        lambda document: document["decode"][0].update(layer="first"),
        _without_a_count,
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage: object, cache: Path) -> None:
    write_routing(after(drawn(1, 5)))
    document = json.loads(routing_path(MODEL).read_text())
    damage(document)  # type: ignore[operator]
    routing_path(MODEL).write_text(json.dumps(document))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None
