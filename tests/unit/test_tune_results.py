"""What tuning found: races and their interval, the fastest options of stock llama.cpp, which class's plan is used, and
what is said of it."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import ALL

from oallama.core.types import StockOptions, Workload
from oallama.run.stock import StockPlacement, expert_overrides
from oallama.tuned.classes import LENGTHS, WorkloadClass, class_of, classes_in
from oallama.tuned.result import (
    ERROR,
    LATE,
    MOST_PAIRS,
    MOST_TESTS,
    ABTest,
    ClassResult,
    Key,
    Speed,
    StockTrial,
    TuneResult,
    speed_interval,
)

N_GEN = 100
QUESTION, PAGE, DOCUMENT = (WorkloadClass(length, False) for length in LENGTHS)
KEY = Key(
    model="m" * 64, machine="0" * 16, profile="", oallama="0.5.0", threads=2, memory=200, gpu_weights=None, n_ctx=4096,
    n_batch=None, n_ubatch=None, flash_attn="auto", type_k="f16", type_v="f16", late_first_word=False,
)  # fmt: skip


def speed(seconds):
    """Half of them for the prompt."""
    return Speed(seconds / 2, seconds / 2 / N_GEN)


# ---- tuning: a plan that is no faster wins in at most 5 of 100 cases, however often its interval is looked at


def ab_test(*times_as_fast, **changes):
    pairs = tuple((speed(t), speed(1.0)) for t in times_as_fast)
    return ABTest(**{"policy": "split", "plan": "ours", "n_gen": N_GEN, "promised": None, "pairs": pairs, **changes})


def looked_at_after_each_block(logs, error):
    """Whether an interval ever lay above 1, and whether one ever missed it."""
    pairs = [(math.exp(log), 1.0) for log in logs]
    found = [speed_interval(pairs[:n], error) for n in range(2, len(pairs) + 1, 2)]
    missed = [ratio for ratio in found if ratio is not None and not ratio.low <= 1 <= ratio.high]
    return any(ratio.low > 1 for ratio in missed), bool(missed)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.normal(0, 0.05, MOST_PAIRS),
        lambda rng: rng.standard_t(3, MOST_PAIRS) * 0.05,
        lambda rng: (
            rng.normal(0, 0.02, MOST_PAIRS) + (rng.random(MOST_PAIRS) < 0.1) * rng.choice([-0.7, 0.7], MOST_PAIRS)
        ),
        lambda rng: np.convolve(rng.normal(0, 0.05, MOST_PAIRS + 1), [1, 0.5], "valid"),
    ],
    ids=["normal", "heavy tails", "turns that stall", "turns that follow each other"],
)
def test_the_error_is_kept_whenever_it_is_looked_at(draw):
    """Of candidates as fast as stock: each has its share of the error."""
    rng, n = np.random.default_rng(7), 1000 if ALL else 300
    found = [looked_at_after_each_block(draw(rng), ERROR / MOST_TESTS) for _ in range(n)]
    assert sum(won for won, _ in found) / n <= ERROR / MOST_TESTS
    assert sum(missed for _, missed in found) / n <= ERROR


def pairs_until_it_wins(times, noise, seed):
    rng, now = np.random.default_rng(seed), ab_test()
    while now.standing == "open":
        drawn = [(speed(times * math.exp(rng.normal(0, noise))), speed(1.0)) for _ in range(2)]
        now = replace(now, pairs=(*now.pairs, *drawn))
    return len(now.pairs) if now.standing == "won" else MOST_PAIRS + 1


@pytest.mark.parametrize(("times", "noise", "most"), [(1.5, 0.05, 4), (1.3, 0.05, 6), (1.1, 0.05, 12), (1.05, 0.02, 8)])
def test_the_larger_the_difference_the_fewer_pairs_tell_it(times, noise, most):
    assert np.median([pairs_until_it_wins(times, noise, seed) for seed in range(60)]) <= most


def test_the_interval_of_tuning_needs_pairs_and_lies_around_their_mean():
    assert speed_interval([], 0.05) is speed_interval([(1.2, 1.0)] * 2, 0.05) is None
    found = speed_interval([(1.2, 1.0), (1.3, 1.0), (1.25, 1.0), (1.22, 1.0)], 0.05)
    assert found.low < found.value < found.high and found.n_pairs == 4
    assert found.value == pytest.approx((1.2 * 1.3 * 1.25 * 1.22) ** 0.25)
    same = speed_interval([(1.2, 1.0)] * 4, 0.05)
    assert (same.low, same.high) == pytest.approx((1.2, 1.2))


NOISY = [1.3, 0.8] * (MOST_PAIRS // 2)


def late(times, **changes):
    """A race whose prompts take so many times as long as the rival's, and whose tokens no time to speak of."""
    pairs = tuple((Speed(1.0, 0.1), Speed(times + 0.001 * i, 0.01)) for i in range(4))
    return ab_test(pairs=pairs, most_late=LATE, **changes)


@pytest.mark.parametrize(
    ("made", "standing"),
    [
        (ab_test(), "open"), (ab_test(1.5, 1.5), "open"), (ab_test(*NOISY[:-2]), "open"),
        (ab_test(1.5, 1.52, 1.49, 1.5), "won"),
        (ab_test(0.8, 0.81, 0.79, 0.8), "lost"),
        (ab_test(1.0, 1.001, 0.999, 1.0, 1.0, 1.0), "lost"),  # it is not worth another plan
        (ab_test(*NOISY), "lost"),  # no difference to speak of
        (ab_test(1.5, 1.52, 1.49, 1.5, refused="it ran elsewhere"), "lost"),
        (late(1.2), "won"), (late(1.3), "lost"), (replace(late(1.3), most_late=None), "won"),
    ],
)  # fmt: skip
def test_an_ab_test_is_won_lost_or_open(made, standing):
    assert made.standing == standing


def test_an_ab_test_has_three_figures():
    made = ab_test(pairs=((Speed(1.0, 0.02), Speed(2.0, 0.005)),) * 4)
    assert (made.prompts, made.tokens) == (pytest.approx(0.5), pytest.approx(4.0))
    assert made.ratio is not None and made.ratio.value == pytest.approx(3.0 / 2.5)


FIT, NO_HOST = StockPlacement(20), StockPlacement(18, options=StockOptions(no_host=True))


def of_class(*races, kind=QUESTION, **changes):
    made = {"tries": (StockTrial(FIT),), "stock_plan": "stock's", "races": races, **changes}
    return ClassResult(kind, N_GEN, 16, **made)


@pytest.mark.parametrize(
    ("no_host", "late_may_win", "fastest"),
    [
        (Speed(1.1, 0.01), False, 1), (Speed(1.1, 0.03), False, 0), (Speed(1.3, 0.01), False, 0),
        (Speed(1.3, 0.01), True, 1), (None, False, 0),
    ],
)  # fmt: skip
def test_the_rival_is_the_fastest_of_stocks_options_whose_first_word_is_not_late(no_host, late_may_win, fastest):
    fault = "" if no_host else "no room"
    found = of_class(tries=(StockTrial(FIT, Speed(1.0, 0.02)), StockTrial(NO_HOST, no_host, fault)))
    assert found.fastest(late_may_win) == fastest


def test_the_first_that_wins_is_used_and_what_is_open_goes_on():
    won, lost = ab_test(1.34, 1.35, 1.33, 1.34), ab_test(0.8, 0.8, 0.8, 0.81, policy="cpu", plan="cpu's")
    found = of_class(won, ab_test(policy="cpu", plan="cpu's"))
    assert found.settled and found.won == won and found.open is None and found.plan == "ours"
    open_ = of_class(ab_test(promised=1.53), lost)
    assert not open_.settled and open_.open == open_.races[0] and open_.plan == "stock's"
    assert of_class(lost).settled and of_class(lost).plan == "stock's"
    assert not ClassResult(QUESTION, N_GEN, 16, tries=(StockTrial(FIT),)).settled, "there is no rival yet"


def test_a_sentence_says_what_is_used_and_why():
    won, lost = ab_test(1.34, 1.35, 1.33, 1.34), ab_test(0.8, 0.8, 0.8, 0.81, policy="cpu")
    said = (
        r"short questions: split is 1\.34× as fast as llama\.cpp's placement \(1\.\d\d-1\.\d\d\), prompts 1\.3×, "
        r"tokens 1\.3×; used from now on"
    )
    assert re.fullmatch(said, of_class(won).sentence)
    using = "using llama.cpp's placement"
    assert of_class(ab_test(promised=1.53), lost).sentence == f"short questions: {using}; split may be 1.5× faster"
    assert " so far (" in of_class(ab_test(1.5, 0.9, 1.2, 1.3, promised=1.5)).sentence
    for promised in (None, 1.02):
        assert of_class(ab_test(promised=promised)).sentence.endswith("split is not yet distinguishable from it")
    assert f"{using}: the CPU alone is 0.80× as fast (0." in of_class(lost).sentence
    assert "not measurably faster" in of_class(ab_test(*[1.0, 1.01] * 10)).sentence
    assert of_class(kind=PAGE).sentence == f"pages: {using}: no plan is predicted to be faster"
    assert of_class(kind=PAGE).use == f"pages: {using}"
    assert of_class(ab_test(refused="no room")).sentence.endswith(": no room")
    assert of_class(late(2.5)).sentence.endswith(": the first word comes 2.5 times as late with split as with --fit")
    tries = (StockTrial(FIT, Speed(1.0, 0.03)), StockTrial(NO_HOST, Speed(1.0, 0.01)))
    assert of_class(tries=tries, rival=1).sentence == (
        "short questions: using llama.cpp with -ngl 18 --no-host, 2× as fast as its own placement (prompts 1.00×, "
        "tokens 3×): no plan is predicted to be faster"
    )
    tries = (StockTrial(FIT, Speed(1.0, 0.03)), StockTrial(NO_HOST, Speed(1.0, 0.0299)))
    assert of_class(ab_test(refused="split's plan is the same"), tries=tries, rival=1).sentence == (
        "short questions: using llama.cpp with -ngl 18 --no-host, about as fast as its own placement: split's plan is "
        "the same"
    )


def test_options_are_told_as_llama_cpp_spells_them():
    options = StockOptions(no_host=False, moe_cache_bytes=1500 << 20, n_cpu_moe=2)
    placement = StockPlacement(99, expert_overrides(2), options, n_ubatch=1024)
    assert placement.flags == "-ngl 99 -ncmoe 2 --moe-cache-mib 1500 --load-mode none -ub 1024"
    assert StockPlacement(-1, (("ffn", "CPU"),)).flags == "-ngl all and 1 overrides"


# ---- classes


def test_prompts_have_lengths_and_a_history_or_none():
    classes = [class_of(Workload(n, 1, 4096)) for n in (1, 128, 129, 1024, 1025)]
    assert classes == [QUESTION, QUESTION, PAGE, PAGE, DOCUMENT]
    assert class_of(Workload(64, 1, 4096, n_past=1)) == WorkloadClass("question", True)


@given(st.integers(2, 200_000))
def test_each_class_that_a_context_holds_stands_for_itself_in_it(n_ctx):
    found = classes_in(n_ctx)
    assert len(set(found)) == len(found) and found
    for kind in found:
        workload = kind.workload(n_ctx, 512)
        assert class_of(workload) == kind and workload.n_past + workload.n_prompt + workload.n_gen <= n_ctx


def test_a_usual_context_has_all_classes_and_a_small_one_fewer():
    assert len(classes_in(4096)) == 6 and classes_in(4096)[:3] == (QUESTION, PAGE, DOCUMENT)
    assert classes_in(512) == (QUESTION, PAGE)


def test_the_nearest_class_is_used_where_it_is_a_step_away_at_most():
    page, question = of_class(kind=PAGE), of_class(kind=WorkloadClass("question", True))
    found = TuneResult(KEY, (page, question, of_class(ab_test(), kind=DOCUMENT)))
    assert found.nearest(PAGE) == page and found.nearest(QUESTION) == page, "the first of two that are as near"
    assert found.nearest(DOCUMENT) == page, "its own is not settled"
    assert found.nearest(WorkloadClass("document", True)) is None
    assert TuneResult(KEY).nearest(QUESTION) is None
