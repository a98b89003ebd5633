"""Hot sets that follow what is used: exchanged only where that gains, never back and forth; simulated courses."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.core.routing import LayerRouting, Tally
from oallama.cost.experts import expert_use
from oallama.place.learned_experts import DEVIATIONS, GAIN, HALF_LIFE_TOKENS, exchanges, first_windows, learned_sets
from oallama.profile.routing import ENOUGH_TOKENS, Traffic, counted, tallied, unknown_routing, window_after

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing.drawn import RoutingDraw, draw, zipf_shares
from routing.learned import LearningTrial, simulated
from routing.main import main

N_EXPERT, N_USED = 8, 2
UNKNOWN = unknown_routing("f" * 64, N_EXPERT, N_USED)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_an_exchange_gains_more_than_the_hysteresis_and_is_not_undone(data: st.DataObject) -> None:
    n_expert = data.draw(st.integers(1, 24))
    n_used = data.draw(st.integers(1, n_expert))
    window = data.draw(st.lists(st.floats(0, 500), min_size=n_expert, max_size=n_expert))
    hot = data.draw(st.sets(st.integers(0, n_expert - 1), max_size=n_expert))
    found = exchanges(window, hot, n_used)
    for each in found:
        more = window[each.comes] - window[each.goes]
        assert more > GAIN * sum(window) / n_used
        assert more > DEVIATIONS * (window[each.comes] + window[each.goes]) ** 0.5
        assert each.goes in hot and each.comes not in hot
    after = (hot - {each.goes for each in found}) | {each.comes for each in found}
    assert len(after) == len(hot)
    assert exchanges(window, after, n_used) == ()
    most = sum(sorted(window, reverse=True)[: len(hot)])
    threshold = max(GAIN * sum(window) / n_used, DEVIATIONS * (2 * max(window)) ** 0.5)
    assert sum(window[e] for e in after) >= most - len(hot) * threshold - 1e-6, "what stays is nearly the best set"


def test_the_most_used_come_first_for_the_least_used() -> None:
    window = (0.0, 400.0, 5.0, 300.0, 1.0, 90.0, 2.0, 2.0)
    found = exchanges(window, (0, 4, 5), N_USED)
    assert [(each.comes, each.goes) for each in found] == [(1, 0), (3, 4)]
    assert exchanges((), (0, 1), N_USED) == ()
    assert exchanges(window, tuple(range(8)), N_USED) == ()
    assert exchanges(window, (), N_USED) == ()


def test_what_gains_no_more_than_the_hysteresis_is_not_exchanged() -> None:
    assert exchanges([5.0, 1.0], {1}, 1, gain=0.5, deviations=0.0)
    assert not exchanges([4.5, 1.5], {1}, 1, gain=0.5, deviations=0.0)


def test_chance_exchanges_nothing_much() -> None:
    """Experts that are used alike: sets that swing would be copied without end."""
    random, window, hot, n_copied = np.random.default_rng(5), (0.0,) * 16, set(range(8)), 0
    for _ in range(200):
        uses = np.bincount(np.concatenate([random.permutation(16)[:4] for _ in range(32)]), minlength=16)
        window = window_after(window, Tally(32, tuple(int(n) for n in uses)), HALF_LIFE_TOKENS)
        worth = exchanges(window, hot, 4)
        n_copied += len(worth)
        hot = (hot - {each.goes for each in worth}) | {each.comes for each in worth}
    always = sum(8 for _ in range(200))
    assert n_copied <= always / 4


def test_learned_sets_keep_what_nothing_is_known_of() -> None:
    windows = {0: (0.0, 100.0, 100.0, 0.0)}
    learned = learned_sets({0: (0, 3), 1: (2, 3)}, windows, 2)
    assert {layer: sorted(experts) for layer, experts in learned.items()} == {0: [1, 2], 1: [2, 3]}


def test_first_windows_have_the_weight_of_one_half_life_at_most() -> None:
    long = LayerRouting(3, 9000, (5000.0,) * N_EXPERT, (0.0,) * N_EXPERT, (0.0,) * N_EXPERT)
    short = LayerRouting(4, 10, (2.0,) * N_EXPERT, (0.0,) * N_EXPERT, (0.0,) * N_EXPERT)
    windows = first_windows(replace(UNKNOWN, decode=(long, short)))
    assert sum(windows[3]) == pytest.approx(N_USED * HALF_LIFE_TOKENS)
    assert windows[4] == short.uses


#
# counts without an order
#


def uses_of(ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tally:
    return Tally(len(ids), tuple(int(n) for n in np.bincount(ids.ravel(), minlength=N_EXPERT)))


def drawn(seed: int, n_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    random = np.random.default_rng(seed)
    return np.array([random.permutation(N_EXPERT)[:N_USED] for _ in range(n_tokens)], dtype=np.int32)


def test_uses_count_nearly_as_ids_do() -> None:
    by_ids, by_uses = UNKNOWN, UNKNOWN
    for seed in range(4):
        ids = drawn(seed, 64)
        by_ids = counted(by_ids, Traffic({0: [ids]}, {0: [ids[:5]]}))
        by_uses = tallied(by_uses, {0: uses_of(ids)}, {0: uses_of(ids[:5])})
    for phase in ("decode", "prompt"):
        (one,), (other,) = by_ids.layers(phase), by_uses.layers(phase)  # type: ignore[arg-type]
        assert one.n_tokens == other.n_tokens
        assert other.uses == pytest.approx(one.uses, rel=0.02)
        assert other.window == pytest.approx(one.window, rel=1e-3)


def test_a_recording_goes_on_until_it_can_be_judged_on() -> None:
    """So a short answer does not take the place of what sets are judged on."""
    known = counted(counted(UNKNOWN, Traffic({0: [drawn(1, 300)]}, {})), Traffic({0: [drawn(2, 300)]}, {}))
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
    known = tallied(UNKNOWN, {0: uses_of(drawn(1, 30))})
    assert tallied(known, {0: Tally(0, (0,) * N_EXPERT)}) == known


#
# courses
#

DRAWING = RoutingDraw(2, zipf_shares(32, 0.9), 4, 3000, 0.45, topics=2)
COURSE = LearningTrial(n_expert=32, n_hot=8, n_first=750, n_request=64, n_stretch=250)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_a_set_that_learns_finds_back_after_a_change_of_topic() -> None:
    found = simulated(draw(DRAWING), COURSE)
    static, learned, lru, best = (found[way].coverage for way in ("static", "learned", "lru", "hindsight"))
    assert len(static) == 9
    assert mean(static[:3]) > 0.5 and mean(static[3:]) < 0.4, "the topic changes behind 750 of 2250 tokens"
    assert mean(learned[:3]) == pytest.approx(mean(static[:3]), abs=0.02)
    assert mean(learned[5:]) == pytest.approx(mean(best[5:]), abs=0.05)
    assert mean(lru[5:]) < mean(learned[5:])
    copied = {way: mean(served.copied) for way, served in found.items()}
    assert copied["static"] == copied["hindsight"] == 0
    assert copied["learned"] < 0.1 < copied["lru"]


def test_lru_and_static_are_those_of_a_count_by_hand() -> None:
    rows = [(0, 1), (0, 1), (0, 2), (2, 3), (0, 2), (1, 3)]
    found = simulated({0: rows}, LearningTrial(n_expert=4, n_hot=2, n_first=2, n_request=1, n_stretch=4))
    assert found["static"].coverage == (3 / 8,)  # 0 | - | 0 | 1
    assert found["lru"].coverage == (3 / 8,)  # 0; 2; 2, 0 was taken out for 3 | 0 2 | nothing
    assert found["lru"].copied == (5 / 4,)


def test_the_command_writes_the_course_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, out = tmp_path / "ids.txt", tmp_path / "course.json"
    drawing = ["--layers", "2", "--experts", "16", "--used", "2", "--tokens", "900", "--zipf", "1", "--topics", "2"]
    assert main(["draw", *drawing, "-o", str(ids)]) == 0
    asked = ["--experts", "16", "--hot", "25%", "--first", "300", "--request", "50", "--stretch", "100"]
    assert main(["learn", str(ids), *asked, "-o", str(out)]) == 0
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["course"]["n_hot"] == 4 and document["n_used"] == 2
    assert set(document["ways"]) == {"static", "learned", "lru", "hindsight"}
    assert all(len(way["coverage"]) == 6 for way in document["ways"].values())
    assert "learned" in capsys.readouterr().out
    assert main(["learn", str(ids), *asked[:-1], "1000"]) == 2
    assert "too few" in capsys.readouterr().err
