"""The gate: it never lets a plan through whose interval reaches below stock, and it knows when to look again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from bench_cases import N_LAYER, NAMES, OPERATORS, World, report, stock
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.ab import Bench, run_bench
from oallama.bench.records import BenchTest, Block, Sample, Series
from oallama.bench.stats import Ratio
from oallama.gate.key import distance, length_class, size_class
from oallama.gate.pairs import (
    Pairs,
    Trial,
    pairs_of,
    settles,
    standing,
    together,
    trial,
    weighted_seconds,
    worth_keeping,
)
from oallama.gate.store import verdict_path
from oallama.gate.verdict import (
    Candidate,
    Verdict,
    choose,
    decide,
    holds,
    reweighed,
    ruled_out,
    sentence,
    verdict_from_json,
    winner_of,
)

KEY = {"model": "m" * 64, "n_threads": 2, "vram": None, "vram_fill": 0.9, "flash_attn": "auto"}
GIB = 1 << 30
SHORT, DEEP = BenchTest(64, 16), BenchTest(64, 16, 4096)


def ratio(value: float, low: float | None = None, high: float | None = None) -> Ratio:
    return Ratio(value, value * 0.95 if low is None else low, value * 1.05 if high is None else high, 6)


def test_verdicts_of_before_are_found_where_they_were_written() -> None:
    assert verdict_path(KEY).name == "gate-v1-40948768d426e20e.json"


def verdict(*trials: Trial) -> Verdict:
    return decide(KEY, "stock-fit", trials, 8 * GIB, "2026-11-21T05:00:00Z", 12.5)


def gate(
    seconds: Callable[[str, int], float], policies: tuple[str, ...] = ("split", "oato"), tests=(SHORT,)
) -> Verdict:
    """The gate over a fake runner: stock-fit and the candidates, measured as run_bench measures."""
    names = ("stock-fit", *policies)
    arms = tuple(stock(name, 99) for name in names)
    reports = {name: report(*NAMES, n_threads=index + 1) for index, name in enumerate(names)}
    world = World(reports, seconds)
    result = run_bench(
        Bench(arms, tests, OPERATORS, N_LAYER, n_blocks=3), start=world.start, available_memory=lambda: 1 << 40
    )
    trials = [
        trial(pairs_of(policy, "", series, index), 512, 128)
        for series in result.series
        for index, policy in enumerate(policies, 1)
    ]
    return verdict(*trials)


def test_a_plan_that_is_faster_beyond_noise_is_used() -> None:
    found = gate(lambda name, turn: {"stock-fit": 1.34, "split": 1.0, "oato": 1.2}[name] * (1 + 0.001 * (turn % 5)))
    assert found.winner == "split"
    assert sentence(found).startswith("oallama: split 1.34× stock (95 % 1.3")
    assert sentence(found).endswith(", using it")


def test_a_planted_bad_plan_is_caught() -> None:
    """Everything on the slow side, predicted to be the fastest."""
    found = gate(lambda name, turn: 3.0 if name == "split" else 1.0, ("split",))
    assert found.winner is None
    assert sentence(found) == "oallama: split 0.33× stock (95 % 0.33-0.33): slower, using stock-fit's placement"


def test_a_plan_as_fast_as_stock_is_not_used() -> None:
    found = gate(lambda name, turn: 1.0)
    assert found.winner is None and "not beyond noise" in sentence(found)


@given(
    st.dictionaries(st.sampled_from(["oato", "split", "layers"]), st.floats(0.3, 3.0), min_size=1, max_size=2),
    st.floats(0.0, 0.2),
    st.integers(0, 2**32 - 1),
)
def test_whatever_is_measured_no_interval_of_a_winner_reaches_below_stock(
    speeds: dict[str, float], noise: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def seconds(name: str, turn: int) -> float:
        return float(np.exp(rng.normal(0, noise))) / speeds.get(name, 1.0)

    found = gate(seconds, tuple(speeds))
    if found.winner is not None:
        own = [each.ratio for each in found.trials if each.policy == found.winner]
        assert all(each is not None and each.low > 1.0 for each in own)


def test_a_bad_plan_is_caught_in_practically_every_noise() -> None:
    """One that is a tenth slower, under 5 % of noise, a hundred times."""
    used = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)

        def seconds(name: str, turn: int, rng: np.random.Generator = rng) -> float:
            return (1.1 if name == "split" else 1.0) * float(np.exp(rng.normal(0, 0.05)))

        used += gate(seconds, ("split",)).winner is not None
    assert used <= 1


def test_it_must_win_at_every_depth_and_says_where_the_answer_differs() -> None:
    found = verdict(
        Trial("split", 0, ratio(1.5)), Trial("oato", 0, ratio(1.1, 1.05, 1.16)), Trial("split", 4096, ratio(0.8)),
        Trial("oato", 4096, ratio(1.2)),
    )  # fmt: skip
    assert found.winner == "oato"
    assert found.winner_by_depth == ((0, "split"), (4096, "oato"))
    assert sentence(found) == (
        "oallama: oato 1.10× stock (95 % 1.05-1.16), using it "
        "(the answer depends on the depth: split at 0 tokens, oato at 4096 tokens)"
    )


def test_no_gain_at_one_depth_makes_up_for_a_loss_at_another() -> None:
    torn = [Trial("split", 0, ratio(3.0)), Trial("split", 4096, ratio(0.9))]
    assert winner_of(torn) is None
    assert winner_of([*torn, Trial("oato", 0, ratio(1.1, 1.05)), Trial("oato", 4096, ratio(1.1, 1.05))]) == "oato"


def test_a_plan_that_was_not_tried_everywhere_does_not_win() -> None:
    assert (
        winner_of([Trial("split", 0, ratio(2.0)), Trial("oato", 0, ratio(1.2)), Trial("oato", 9, ratio(1.2))]) == "oato"
    )
    assert winner_of([]) is None


def test_a_plan_without_a_ratio_does_not_win_and_says_why() -> None:
    found = verdict(Trial("split", 0, None, "split turned out to be the same configuration as stock-fit"))
    assert found.winner is None
    assert "using stock-fit's placement: split turned out" in sentence(found)
    assert "nothing to compare" in sentence(verdict())


@pytest.mark.parametrize("low", [0.7, 0.999, 1.0])
def test_an_interval_that_touches_stock_is_not_beyond_noise(low: float) -> None:
    assert winner_of([Trial("split", 0, ratio(1.3, low))]) is None


def test_the_two_best_predictions_and_the_cpu_are_tried_each_placement_once() -> None:
    candidates = [
        Candidate("layers", 3.0, "a"), Candidate("split", 1.0, "b"), Candidate("scheinfer", 1.0, "b"),
        Candidate("oato", 2.0, "c"), Candidate("cpu", 9.0, "d"),
    ]  # fmt: skip
    assert [each.policy for each in choose(candidates)] == ["scheinfer", "oato", "cpu"]
    assert [each.policy for each in choose(candidates[1:4])] == ["scheinfer", "oato"]
    assert choose([]) == ()


def test_what_is_stocks_own_placement_or_hopeless_by_prediction_is_not_measured() -> None:
    stock = Candidate("stock-fit", 1.0, "a")
    assert "stock-fit's own placement" in ruled_out(Candidate("layers", 1.0, "a"), stock)
    assert "cpu is predicted to take 3.0 times as long" in ruled_out(Candidate("cpu", 3.0, "b"), stock)
    assert ruled_out(Candidate("cpu", 1.9, "b"), stock) == ""
    assert ruled_out(Candidate("stock-cpu", float("inf"), "b"), stock) == "", "nothing is predicted for it"
    assert ruled_out(Candidate("cpu", 3.0, "b"), Candidate("stock-cpu", float("inf"), "a")) == ""


def pairs(*times_as_fast: float, drift: float = 0.0, test: BenchTest = SHORT) -> Pairs:
    """Of a candidate so many times as fast as stock in each pair, prompt and generation alike."""
    own = [Sample(1 / each, 1 / each) for each in times_as_fast]
    blocks = (Block(((Sample(1.0, 1.0),) * 2, tuple(own[i : i + 2])), drift) for i in range(0, len(own), 2))
    return Pairs("split", "a", Series(test, tuple(blocks)))


@pytest.mark.parametrize(
    ("ratios", "stands"),
    [
        ([], "open"), ([1.5] * 4, "open"), ([1.5] * 6, "won"), ([0.5, 0.6], "lost"), ([0.5, 1.0], "open"),
        ([0.95] * 6, "lost"), ([1.0, 1.01] * 3, "lost"), ([1.3, 0.95] * 3, "open"), ([1.2, 1.02] * 6, "won"),
        ([0.2, 2.3, 0.5] * 4, "open"), ([0.98, 1.06] * 6, "lost"),
    ],
)  # fmt: skip
def test_a_candidate_wins_loses_or_needs_more_pairs(ratios: list[float], stands: str) -> None:
    assert standing(pairs(*ratios), 512, 128) == stands


def test_an_interval_that_says_nothing_is_not_kept() -> None:
    assert not settles(Ratio(0.54, 0.12, 2.30, 6))
    assert all(settles(each) for each in (Ratio(1, 0.97, 1.04, 6), Ratio(0.6, 0.2, 0.9, 6), Ratio(2, 1.1, 4.0, 6)))
    assert worth_keeping(pairs(*[0.2, 2.3, 0.5] * 4), 512, 128) is None
    some = pairs(1.5, 1.4)
    assert worth_keeping(some, 512, 128) == some
    assert worth_keeping(pairs(1.5, 1.4, drift=0.3), 512, 128) is None, "the machine changed meanwhile"
    calm = worth_keeping(together(some, pairs(1.5, 1.4, drift=0.3)), 512, 128)
    assert calm == some


def test_what_is_not_settled_uses_stock_and_says_so() -> None:
    found = decide(KEY, "stock-fit", [Trial("split", 0, ratio(1.5))], 8 * GIB, "2026-11-21T05:00:00Z", 20.4, False)
    assert (found.winner, found.settled) == (None, False)
    assert sentence(found) == ("oallama: not settled in 20 s, using stock-fit's placement; the next run measures on")
    assert verdict_from_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_verdict_from_before_there_were_others_is_settled() -> None:
    document = json.loads(json.dumps(asdict(verdict(Trial("split", 0, ratio(1.5))))))
    del document["settled"]
    assert verdict_from_json(document).settled


def test_the_pairs_of_a_verdict_say_what_holds_for_other_lengths() -> None:
    """Twice as fast at the prompt, half as fast at the generation."""
    own = (Sample(0.5, 2.0),) * 2
    made = Pairs("split", "a", Series(SHORT, (Block(((Sample(1.0, 1.0),) * 2, own), 0.0),) * 3))
    found = verdict(trial(made, 4096, 16))
    assert found.winner == "split"
    assert reweighed(found, [made], KEY, 64, 512).winner is None
    assert reweighed(found, [made], KEY, 8192, 16).winner == "split"
    assert reweighed(found, [], KEY, 64, 512).winner == "split", "a file from before has none"


def test_keys_are_as_far_apart_as_their_lengths() -> None:
    key = {**KEY, "prompt_class": 2, "gen_class": 1}
    assert distance(key, {**key, "prompt_class": 4, "gen_class": 0}) == 3
    assert distance(key, key) == 0
    assert distance(key, {**key, "n_threads": 4}) is None


def test_short_tests_stand_for_the_users_workload() -> None:
    assert weighted_seconds(Sample(2.0, 1.0), BenchTest(64, 16), 512, 160) == pytest.approx(2.0 * 8 + 1.0 * 10)
    assert weighted_seconds(Sample(2.0, 0.0), BenchTest(64, 0), 128, 100) == pytest.approx(4.0)


def test_a_verdict_survives_its_file() -> None:
    found = verdict(Trial("split", 0, Ratio(1.3, 1.2, 1.4, 6, (2,))), Trial("oato", 0, None, "no room"))
    assert verdict_from_json(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"trials": [{}]}, {"key": None}, {"winner_by_depth": None}], ids=lambda c: next(iter(c))
)
def test_what_is_no_verdict_is_not_believed(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="verdict"):
        verdict_from_json({**asdict(verdict()), **change})
    with pytest.raises(ValueError, match="verdict"):
        verdict_from_json({})


@pytest.mark.parametrize(("free", "still"), [(8 * GIB, True), (7.7 * GIB, True), (7.5 * GIB, False), (9 * GIB, False)])
def test_a_verdict_ends_when_other_programs_take_or_leave_device_memory(free: float, still: bool) -> None:
    assert holds(verdict(), int(free)) == still


def test_lengths_of_one_class_share_a_verdict() -> None:
    assert size_class(4096) == size_class(8191) == 12
    assert size_class(8192) == 13
    assert size_class(0) == size_class(1) == 0
    assert length_class(64) == length_class(511) == 2
    assert length_class(512) == 3
