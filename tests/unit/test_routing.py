"""Counts of used experts: windows, recordings, files, and the sets that follow from them; scripts/routing.py."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_factory import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from worlds import placed, some_plan, weight

from oallama.core.routing import HALF_LIFE_TOKENS, ExpertCounts, LayerCounts, LayerRouting, Routing
from oallama.core.types import MulMat
from oallama.cost.experts import ExpertCoverage, copied, expert_use, experts_alike, miss_odds, share_used
from oallama.cost.following import following
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.planner.placement import with_used_experts
from oallama.profile.routing import (
    ENOUGH_TOKENS,
    LEAST_TOKENS,
    N_GAPS,
    counted,
    read_routing,
    routing_path,
    unknown_routing,
    write_routing,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import routing as drawing

MODEL = "f" * 64
N_EXPERT, N_USED = 8, 2
UNKNOWN = unknown_routing(MODEL, N_EXPERT, N_USED)


def layer_counts(*tokens: tuple[int, ...]) -> LayerCounts:
    return LayerCounts(len(tokens), tuple(sum(expert in token for token in tokens) for expert in range(N_EXPERT)))


def drawn(seed: int, n_tokens: int, weights: Any = None) -> LayerCounts:
    random = np.random.default_rng(seed)
    chosen = [random.choice(N_EXPERT, N_USED, replace=False, p=weights) for _ in range(n_tokens)]
    return layer_counts(*(tuple(map(int, token)) for token in chosen))


def after(*answers: dict[int, LayerCounts]) -> Routing:
    """Decode counted answer by answer, each the uses of some layers."""
    routing = UNKNOWN
    for answer in answers:
        routing = counted(routing, ExpertCounts(answer, {}))
    return routing


tokens_of = st.lists(st.permutations(range(N_EXPERT)).map(lambda order: tuple(order[:N_USED])), max_size=20)


@settings(max_examples=examples(60))
@given(tokens_of, tokens_of)
def test_counts_are_those_of_a_count_by_hand(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    """Of tokens in their order; a tally takes them to be spread evenly."""
    routing = after({0: layer_counts(*first)}, {0: layer_counts(*second)})
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


@pytest.mark.parametrize(
    ("n_tokens", "n_before", "n_latest"),
    [
        ((LEAST_TOKENS - 1, 1), 0, LEAST_TOKENS),
        ((100, 99, 20), 100, 119),
        ((100, 100, 20), 200, 20),
        ((5000, ENOUGH_TOKENS, 7), None, 7),  # before has faded
    ],
)
def test_a_recording_goes_on_until_it_can_be_judged_on(n_tokens, n_before, n_latest) -> None:
    """So a short answer does not take the place of what sets are judged on: 64 tokens, then as many as before."""
    (layer,) = after(*({0: drawn(seed, n)} for seed, n in enumerate(n_tokens))).decode
    assert sum(layer.latest) == n_latest * N_USED
    assert n_before is None or sum(layer.before) == pytest.approx(n_before * N_USED, rel=0.02)


def test_traffic_that_changes_is_seen() -> None:
    hot = np.array([0.4, 0.4, *[0.2 / 6] * 6])
    stays, moves = (after({0: drawn(1, 400, hot)}, {0: drawn(2, 400, then)}) for then in (hot, hot[::-1]))
    assert expert_use(stays)[0].decode[2] > 0.6
    assert expert_use(moves)[0].decode[2] < 0.2
    assert expert_use(stays)[0].prompt[2] == 2 / N_EXPERT, "not recorded: all alike"
    assert expert_use(UNKNOWN) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda document, layer: document.update(version=99),
        lambda document, layer: document.update(model_fingerprint="another"),
        lambda document, layer: document.update(n_expert=9),
        lambda document, layer: document.update(half_life_tokens=1e-300),
        lambda document, layer: document.update(decode=[layer, layer]),
        lambda document, layer: layer.update(latest=[1e300] * 8),
        lambda document, layer: layer.update(n_tokens=-1),
        lambda document, layer: layer.update(layer="first"),
        lambda document, layer: layer["uses"].pop(),
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage: Callable[[Any, Any], object]) -> None:
    routing = after({0: drawn(1, 5)})
    write_routing(routing)
    assert read_routing(MODEL, N_EXPERT, N_USED) == routing
    document = json.loads(routing_path(MODEL).read_text())
    damage(document, document["decode"][0])
    routing_path(MODEL).write_text(json.dumps(document))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None


def test_a_plan_s_hot_experts_are_the_most_used_by_the_time_of_the_load_where_enough_is_known() -> None:
    operators = [
        weight(role=role, k=256, n=256, layer=layer, n_expert=N_EXPERT, used=N_USED)
        for layer in range(2)
        for role in ("ffn_gate_exps", "ffn_down_exps")
    ]
    plan = some_plan((placed(operator.name, hot=(0, 1)) for operator in operators), policy="experts")
    uses = LayerCounts(2 * ENOUGH_TOKENS, (0, 96, 0, 1900, 0, 2100, 0, 0))
    known = after({0: uses}, {0: uses, 1: uses})  # of layer 1 one recording alone
    made = with_used_experts(plan, operators, known)
    assert [p.hot_experts for p in made.operators] == [(3, 5), (3, 5), (0, 1), (0, 1)]
    assert replace(made, operators=plan.operators) == plan, "nothing else changes"
    cold = replace(plan, operators=tuple(replace(p, hot_experts=()) for p in plan.operators))
    for one, routing in ((plan, None), (plan, UNKNOWN), (cold, known)):
        assert with_used_experts(one, operators, routing) is one


#
# scripts/routing.py
#


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.txt"
    asked = ["draw", "--layers", "2", "--experts", "16", "--used", "2", "--tokens", "400", "-o", str(path)]
    assert drawing.main([*asked, "--curve", "25%=50%", "--seed", "7"]) == 0
    assert path.read_text().startswith("# drawn: curve 25%=50%, seed 7")
    assert {layer: len(rows) for layer, rows in drawing.read_routing(path).items()} == {0: 400, 1: 400}
    assert drawing.main([*asked, "--curve", "25%=much"]) == 2
    assert "is not like 25%=74%" in capsys.readouterr().err
    none = str(tmp_path / "none.txt")
    assert drawing.main(["keep", none, "--model", none, "-o", none]) == 2


def test_a_file_is_kept_as_if_the_model_had_been_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf(tmp_path / "model.gguf", "llama-moe")  # two layers, 2 of 8 experts
    first = [(i % 4, 4 + i % 3) for i in range(200)]
    later = [(i % 2, 7) for i in range(201)]
    ids, rest = tmp_path / "ids.txt", tmp_path / "later.txt"
    drawing.write_routing(ids, {layer: [*first, *later] for layer in (0, 1, 7)}, "a third layer that the model has not")
    keep = ["keep", str(ids), "--model", str(model), "-o", str(rest)]
    assert drawing.main(keep) == 0
    known = read_routing(model_info(read_gguf(model)).fingerprint, N_EXPERT, N_USED)
    assert [layer.layer for layer in known.decode] == [0, 1]
    for layer in (*known.decode, *known.prompt):
        chosen, judged = (Counter(e for row in rows for e in row) for rows in (first[:100], first[100:]))
        assert layer.n_tokens == 200 and layer.latest == tuple(float(judged[e]) for e in range(8))
        assert layer.before == pytest.approx(tuple(chosen[e] for e in range(8)), rel=0.02)
        assert sum(layer.gaps) == pytest.approx(2 * 200, rel=0.05) and not any(layer.gaps[3:-1])
    for layer in known.decode:  # each expert again within four tokens: those that were used most of late are used
        assert sum(layer.ranks[:7]) == pytest.approx(sum(layer.ranks)) and 0 < sum(layer.ranks) <= 2 * 199
    assert drawing.read_routing(rest)[1] == later
    drawing.write_routing(ids, {0: [(0, 1, 2), (3, 4, 5)]}, "of three experts a token")
    capsys.readouterr()
    assert drawing.main(keep) == 2
    assert "not from a model with 8 experts, 2 per token" in capsys.readouterr().err


def test_what_a_model_was_seen_to_use_keeps_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen, ids = tmp_path / "seen.npz", tmp_path / "ids.txt"
    first = np.array([[[1, 0], [2, 3]], [[3, 1], [0, 1]]], dtype=np.uint8)
    np.savez(seen, c01=first[:1] + 4, c00=first)
    taken = ["traces", str(seen), "-o", str(ids)]
    assert drawing.main(taken) == 0
    assert drawing.read_routing(ids) == {0: [(1, 0), (3, 1), (5, 4)], 1: [(2, 3), (0, 1), (6, 7)]}
    assert drawing.main([*taken, "--layers", "1"]) == 0
    assert drawing.read_routing(ids) == {0: [(1, 0), (3, 1), (5, 4)]}
    assert capsys.readouterr().err == ""
    assert drawing.main([*taken, "--layers", "-1"]) == 2
    assert "--layers must be at least 1" in capsys.readouterr().err
    np.savez(seen, c00=first[:0])
    assert drawing.main(taken) == 2
    assert "has no tokens" in capsys.readouterr().err
    for content in (b"no archive", b""):
        seen.write_bytes(content)
        assert drawing.main(taken) == 2
    np.savez(seen, c00=first.astype(float))
    assert drawing.main(taken) == 2


#
# experts that follow the conversation
#


@given(st.integers(1, 10), st.floats(0, 1), st.sampled_from([0.0, 0.05, 0.1, 0.5]))
@settings(max_examples=examples(100))
def test_misses_are_as_many_in_the_mean_however_alike_the_ranks_of_a_token_are(
    n_used: int, coverage: float, spread: float
) -> None:
    odds = miss_odds(n_used, coverage, spread)
    assert len(odds) == n_used + 1 and min(odds) >= 0 and sum(odds) == pytest.approx(1)
    assert sum(n * p for n, p in enumerate(odds)) == pytest.approx(n_used * (1 - coverage), abs=1e-9)
    assert odds[0] >= miss_odds(n_used, coverage)[0] - 1e-9, "ranks that are alike all hit more often"


@pytest.mark.parametrize("n_expert", [32, 60, 64, 128, 256])
def test_experts_that_follow_serve_no_less_with_each_more_and_no_less_than_those_that_stay(n_expert: int) -> None:
    uses = tuple(2.0 ** -(i % 9) for i in range(n_expert))
    counts = Routing(1, "f", n_expert, 2, 4096, (LayerRouting(0, 9999, uses, uses, uses),), ())
    for own in (experts_alike(n_expert), expert_use(counts)[0]):
        follows = following(own)
        assert follows.follows and not own.follows and follows.order == own.order
        for curve, still in ((follows.decode, own.decode), (follows.prompt, own.prompt)):
            assert (curve[0], curve[-1]) == (0, 1) and all(a <= b for a, b in pairwise(curve))
            assert all(a >= b for a, b in zip(curve, still, strict=True))
    quarter = following(experts_alike(n_expert)).coverage(n_expert // 4, 1)
    assert quarter == pytest.approx(0.679 if n_expert < 64 else 0.832, abs=0.002), "as the recorded routing has it"


def test_experts_that_follow_serve_what_was_recorded_of_this_model() -> None:
    """Half of the uses are by the two experts that were used most of late, whichever these are."""
    n_expert, n_tokens = 64, 4 * ENOUGH_TOKENS
    even = (n_tokens * 2 // n_expert,) * n_expert
    ranks = (n_tokens // 2, n_tokens // 2, *[n_tokens // (n_expert - 2)] * (n_expert - 2))
    routing = unknown_routing(MODEL, n_expert, 2)
    for _ in range(2):
        routing = counted(
            routing, ExpertCounts({0: LayerCounts(n_tokens, even, ranks)}, {0: LayerCounts(n_tokens, even, ranks)})
        )
    follows = following(expert_use(routing)[0])
    assert follows.coverage(2, 1) == pytest.approx(0.5, abs=0.01) == follows.coverage(2, 256)
    assert follows.coverage(33, 1) == pytest.approx(0.75, abs=0.01), "and not what others use"
    without = replace(routing, decode=tuple(replace(layer, ranks=()) for layer in routing.decode))
    assert following(expert_use(without)[0]).coverage(32, 1) == pytest.approx(0.963, abs=0.002)
    write_routing(routing)
    assert read_routing(MODEL, n_expert, 2) == routing


#
# what a batch has copied of streamed experts
#


def gaps_of(tokens: list[tuple[int, ...]]) -> tuple[int, ...]:
    """As split/uses.h counts them."""
    last, found = dict[int, int](), [0] * N_GAPS
    for now, token in enumerate(tokens):
        for expert in token:
            gap = now - last[expert] if expert in last else 2**N_GAPS
            found[min(gap.bit_length(), N_GAPS) - 1] += 1
            last[expert] = now
    return tuple(found)


@pytest.mark.parametrize("follows", [False, True])
def test_gaps_say_how_many_experts_a_batch_of_any_size_uses(follows: bool) -> None:
    """Drawn alike, and where each text has a dozen of its own."""
    n_expert, n_used, random = 64, 4, np.random.default_rng(3)
    tokens = list[tuple[int, ...]]()
    for _ in range(40):
        own = random.choice(n_expert, 12 if follows else n_expert, replace=False)
        tokens += [tuple(map(int, random.choice(own, n_used, replace=False))) for _ in range(200)]
    mul_mat, gaps = MulMat("MUL_MAT_ID", "Q4_0", (64, 64, n_expert), n_used), gaps_of(tokens)
    for n in (1, 2, 8, 50, 200):
        batches = [tokens[i : i + n] for i in range(0, len(tokens) - n, 37)]
        used = sum(len({expert for token in batch for expert in token}) for batch in batches) / len(batches) / n_expert
        assert share_used(mul_mat, n, gaps) == pytest.approx(used, rel=0.12), n


#
# what a batch misses
#

N_LEFT = 32  # experts, four of each token


def batches_of(tokens: list[tuple[int, ...]], n: int, step: int) -> list[Counter[int]]:
    """Count the uses of each expert in batches of n tokens; a batch begins every `step` tokens."""
    return [Counter(expert for token in tokens[i : i + n] for expert in token) for i in range(0, len(tokens) - n, step)]


def left_by_hand(batches: list[Counter[int]], n_hot: int, n_fetched: int) -> tuple[float, float]:
    """(different experts, share of their rows) that are left of what is missed where experts 0, 1, … are hot, in the
    mean over batches, once so many of those with the most rows are fetched."""
    missed = [sorted((rows for expert, rows in batch.items() if expert >= n_hot), reverse=True) for batch in batches]
    of_rows = [sum(rows[n_fetched:]) / sum(rows) for rows in missed if rows]
    return sum(len(rows[n_fetched:]) for rows in missed) / len(missed), sum(of_rows) / len(of_rows)


@settings(max_examples=examples(15))
@given(st.integers(0, 99), st.floats(0.6, 1.0), st.sampled_from([2, 8, 64, 400]), st.sampled_from([4, 8, 16]))
def test_what_is_left_of_a_batch_once_the_link_has_brought_some(seed: int, fall: float, n: int, n_hot: int) -> None:
    """Against batches that are drawn with shares that fall from expert to expert: as many different experts, and of
    their rows no fewer than are left, and nowhere as many as if all were used alike."""
    random, mul_mat = np.random.default_rng(seed), MulMat("MUL_MAT_ID", "Q4_0", (64, 64, N_LEFT), 4)
    weights = fall ** np.arange(N_LEFT) + 0.02
    noise = random.gumbel(size=(max(1000, 10 * n), N_LEFT)) + np.log(weights)
    tokens = [tuple(map(int, token)) for token in np.argsort(-noise, axis=1)[:, :4]]
    uses = Counter(expert for token in tokens for expert in token)
    shares = [sum(uses[expert] for expert in range(n_held)) / uses.total() for n_held in range(N_LEFT + 1)]
    left = ExpertCoverage(tuple(range(N_LEFT)), tuple(shares), tuple(shares)).misses_by_rows(mul_mat, n_hot, n)
    batches = batches_of(tokens, n, max(1, n // 2))
    assert left[0] == (pytest.approx(left_by_hand(batches, n_hot, 0)[0], rel=0.15, abs=0.4), 1.0)
    assert left[-1] == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    for n_fetched in range(1, int(left[0][0])):
        expected = np.interp(n_fetched, [left[0][0] - experts for experts, _ in left], [rows for _, rows in left])
        assert left_by_hand(batches, n_hot, n_fetched)[1] - 0.02 <= expected <= 1 - n_fetched / left[0][0] + 1e-9


def test_tokens_in_a_row_are_known_to_miss_fewer_different_experts() -> None:
    """Where each text has a dozen experts of its own."""
    random, mul_mat = np.random.default_rng(4), MulMat("MUL_MAT_ID", "Q4_0", (64, 64, N_LEFT), 4)
    tokens = list[tuple[int, ...]]()
    for _ in range(100):
        own = random.choice(N_LEFT, 12, replace=False)
        tokens += [tuple(map(int, random.choice(own, 4, replace=False))) for _ in range(100)]
    alike = experts_alike(N_LEFT)
    for n in (10, 50):
        known = replace(alike, gaps=gaps_of(tokens)).misses_by_rows(mul_mat, 8, n)[0][0]
        assert known == pytest.approx(left_by_hand(batches_of(tokens, n, 37), 8, 0)[0], rel=0.12)
        assert known < 0.75 * alike.misses_by_rows(mul_mat, 8, n)[0][0]


@given(st.sampled_from([8, 32, 64, 128, 256, 512]), st.integers(1, 8), st.integers(1, 2048))
@settings(max_examples=examples(100))
def test_what_is_copied_of_experts(n_expert: int, n_used: int, n_tokens: int) -> None:
    """No less than a batch uses, not much more, and more of a larger batch; most of it before the router has run."""
    mul_mat = MulMat("MUL_MAT_ID", "Q4_0", (64, 64, n_expert), n_used)
    part, more = copied(mul_mat, n_tokens), copied(mul_mat, n_tokens + 1)
    used = mul_mat.share_routed(n_tokens)
    assert used - 1e-9 <= sum(part) <= min(1.0, 1.5 * used) + 1e-9 and min(part) >= 0
    assert n_tokens == 1 or sum(more) >= sum(part) - 1e-9
    assert n_tokens > 1 or part.ahead == 0
    assert n_tokens * n_used < 4 * n_expert or part.late < 0.15 * part.ahead
    assert copied(replace(mul_mat, op="MUL_MAT"), n_tokens) == (1, 0)
    always = (*[0] * 3, 1, *[0] * (N_GAPS - 4))  # each expert again within 8 to 15 tokens
    assert n_tokens < 15 or copied(mul_mat, n_tokens, always) == copied(mul_mat, 15, always)


def test_few_experts_are_used_nearly_alike_and_follow_nothing() -> None:
    assert following(experts_alike(8)) == experts_alike(8)
