"""Counts of experts: windows, halves, files, and the figures of the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from oallama.core.errors import ProfileError
from oallama.core.routing import HALF_LIFE_TOKENS, Routing, Tally
from oallama.cost.experts import expert_use
from oallama.profile.routing import (
    ENOUGH_TOKENS,
    Traffic,
    counted,
    halves,
    read_routing,
    routing_path,
    tallied,
    unknown_routing,
    write_routing,
)
from oallama.profile.store import FOLDER_VARIABLE
from oallama.report.routing import routing_table
from oallama.report.table import plain

MODEL = "f" * 64
N_EXPERT, N_USED = 8, 2

Ids = npt.NDArray[np.int32]


def ids(*tokens: tuple[int, ...]) -> Ids:
    return np.array(tokens, dtype=np.int32).reshape(len(tokens), N_USED)


def drawn(seed: int, n_tokens: int, weights: npt.NDArray[np.float64] | None = None) -> Ids:
    random = np.random.default_rng(seed)
    chosen = [random.choice(N_EXPERT, N_USED, replace=False, p=weights) for _ in range(n_tokens)]
    return np.array(chosen, dtype=np.int32).reshape(n_tokens, N_USED)


def of_decode(*runs: Ids, layer: int = 0) -> Traffic:
    return Traffic({layer: list(runs)}, {})


def unknown() -> Routing:
    return unknown_routing(MODEL, N_EXPERT, N_USED)


runs_of_ids = st.lists(
    st.lists(st.permutations(range(N_EXPERT)).map(lambda order: tuple(order[:N_USED])), max_size=6), max_size=4
)


@settings(max_examples=examples(60))
@given(runs_of_ids, runs_of_ids)
def test_counts_are_those_of_a_count_by_hand(
    first: list[list[tuple[int, ...]]], second: list[list[tuple[int, ...]]]
) -> None:
    routing = unknown()
    for recording in (first, second):
        routing = counted(routing, of_decode(*(ids(*run) for run in recording)))
    tokens = [token for recording in (first, second) for run in recording for token in run]
    if not tokens:
        assert routing.decode == ()
        return
    (layer,) = routing.decode
    uses = [0.0] * N_EXPERT
    for since, token in enumerate(reversed(tokens)):
        for expert in token:
            uses[expert] += 2 ** (-since / HALF_LIFE_TOKENS)
    last = [token for run in second for token in run] or tokens  # an empty recording is none
    assert layer.n_tokens == len(tokens)
    assert layer.uses == pytest.approx(uses, abs=1e-3)
    assert layer.latest == tuple(sum(expert in token for token in last) for expert in range(N_EXPERT))


def test_what_is_a_half_life_old_counts_half() -> None:
    old, new = ids((0, 1)), np.tile(ids((2, 3)), (HALF_LIFE_TOKENS, 1))
    (layer,) = counted(counted(unknown(), of_decode(old)), of_decode(new)).decode
    assert layer.uses[0] == pytest.approx(0.5, abs=1e-3)
    assert layer.before[0] == 1
    assert layer.latest == (0, 0, HALF_LIFE_TOKENS, HALF_LIFE_TOKENS, 0, 0, 0, 0)


def test_phases_and_layers_are_counted_apart() -> None:
    traffic = Traffic({1: [ids((0, 1))]}, {1: [ids((2, 3), (2, 4))], 5: [ids((6, 7))]})
    routing = counted(unknown(), traffic)
    assert [(layer.layer, layer.n_tokens) for layer in routing.decode] == [(1, 1)]
    assert [(layer.layer, layer.n_tokens) for layer in routing.prompt] == [(1, 2), (5, 1)]
    assert routing.prompt[0].uses[2] == pytest.approx(2, abs=1e-3)


def test_halves_keep_every_token_and_its_order() -> None:
    recordings = [of_decode(drawn(1, 3), drawn(2, 4)), of_decode(drawn(3, 6))]
    first, second = halves(recordings)
    together = [token for half in (first, second) for run in half.decode[0] for token in run.tolist()]
    assert together == [token for part in recordings for run in part.decode[0] for token in run.tolist()]
    assert sum(map(len, first.decode[0])) == 6


#
# files
#


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_written_is_read_again(cache: Path) -> None:
    routing = counted(unknown(), Traffic({0: [drawn(1, 50)]}, {0: [drawn(2, 80)], 3: [drawn(3, 8)]}))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None
    write_routing(routing)
    assert read_routing(MODEL, N_EXPERT, N_USED) == routing
    assert [path.name for path in cache.iterdir()] == [routing_path(MODEL).name]


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
    write_routing(counted(unknown(), of_decode(drawn(1, 5))))
    document = json.loads(routing_path(MODEL).read_text())
    damage(document)  # type: ignore[operator]
    routing_path(MODEL).write_text(json.dumps(document))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff", '{"version": 1}', "[" * 100_000])
def test_a_file_that_is_no_routing_is_as_good_as_none(text: str, cache: Path) -> None:
    routing_path(MODEL).parent.mkdir(parents=True)
    routing_path(MODEL).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ProfileError, match=FOLDER_VARIABLE):
        write_routing(unknown())


#
# the report
#


def test_traffic_that_changes_is_seen_in_the_report() -> None:
    hot = np.array([0.4, 0.4, *[0.2 / 6] * 6])
    same = [drawn(seed, 400, hot) for seed in (1, 2)]
    other = [drawn(1, 400, hot), drawn(2, 400, hot[::-1])]
    stays, moves = (counted(counted(unknown(), of_decode(first)), of_decode(second)) for first, second in (same, other))
    assert expert_use(stays)[0].decode[2] > 0.6
    assert expert_use(moves)[0].decode[2] < 0.2
    decode, prompt = plain(routing_table(stays)).splitlines()[-2:]
    assert decode.split()[:2] == ["decode", "800"] and f"{expert_use(stays)[0].decode[2]:.1%}" in decode.split()
    assert prompt.split() == ["prompt", "0", "12.5%", "25.0%", "50.0%", "75.0%"], "not recorded: all alike"
    assert "decode" not in plain(routing_table(unknown())), "of what was not recorded twice nothing is said"


#
# counts without an order
#


def uses_of(given: Ids) -> Tally:
    return Tally(len(given), tuple(int(n) for n in np.bincount(given.ravel(), minlength=N_EXPERT)))


def test_uses_count_nearly_as_ids_do() -> None:
    by_ids = by_uses = unknown_routing(MODEL, N_EXPERT, N_USED)
    for seed in range(4):
        given = drawn(seed, 64)
        by_ids = counted(by_ids, Traffic({0: [given]}, {0: [given[:5]]}))
        by_uses = tallied(by_uses, {0: uses_of(given)}, {0: uses_of(given[:5])})
    for one, other in ((by_ids.decode[0], by_uses.decode[0]), (by_ids.prompt[0], by_uses.prompt[0])):
        assert one.n_tokens == other.n_tokens
        assert other.uses == pytest.approx(one.uses, rel=0.02)
        assert sum(other.uses) == pytest.approx(sum(one.uses), rel=1e-3)


def test_a_recording_goes_on_until_it_can_be_judged_on() -> None:
    """So a short answer does not take the place of what sets are judged on."""
    unknown = unknown_routing(MODEL, N_EXPERT, N_USED)
    known = counted(counted(unknown, Traffic({0: [drawn(1, 300)]}, {})), Traffic({0: [drawn(2, 300)]}, {}))
    first, before = known.decode[0].before, known.decode[0].latest
    more = tallied(known, {0: uses_of(drawn(3, 20))})
    assert more.decode[0].before == first
    assert sum(more.decode[0].latest) == sum(before) + 20 * N_USED
    full = tallied(known, {0: uses_of(drawn(4, ENOUGH_TOKENS))})
    after = tallied(full, {0: uses_of(drawn(5, 7))})
    assert after.decode[0].before == full.decode[0].uses
    assert sum(after.decode[0].latest) == 7 * N_USED
    assert expert_use(more)[0].decode[4] == pytest.approx(0.5, abs=0.1)


def test_an_answer_without_tokens_changes_nothing() -> None:
    known = tallied(unknown_routing(MODEL, N_EXPERT, N_USED), {0: uses_of(drawn(1, 30))})
    assert tallied(known, {0: Tally(0, (0,) * N_EXPERT)}) == known
