"""The gate's decision: which measured plan may be used instead of stock llama.cpp, and how long that holds. Pure.

A plan is used only if its whole 95 % interval lies above stock's speed, at every depth that was measured. Whatever the
predictions say, a plan that does not get there loses to stock-fit's placement. Where that cannot be said yet, stock's
placement is used as well, and the pairs that were measured are kept for the next time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from oallama.bench.stats import Ratio
from oallama.core.codec import from_json
from oallama.gate.key import Key
from oallama.gate.pairs import Pairs, Trial, trial

VERSION = 1

MOST_CANDIDATES = 2
CPU_ALONE = "cpu"  # the policy
ALWAYS = (CPU_ALONE, "stock-cpu")  # tried whatever is predicted for them
HOPELESS_PREDICTED = 2.0  # predicted to take more than so many times as long as stock: not measured
MEMORY_TOLERANCE = 0.05
"""Free device memory may differ by this share of what it was; beyond, other plans fit."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that might be used: placement tells plans apart that policies make alike."""

    policy: str
    predicted_s: float
    placement: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found. winner None: stock's placement is used. winner_by_depth: what each depth alone would say.
    settled False: there was no time to find out; what was measured counts the next time. gave_up_s: so many seconds
    were too short twice; it holds for those who have no more."""

    key: Key
    stock: str
    trials: tuple[Trial, ...]
    winner: str | None
    winner_by_depth: tuple[tuple[int, str | None], ...]
    free_bytes: int  # on the device, when it was measured
    measured_at: str  # RFC 3339, UTC
    seconds: float  # that the gate took
    version: int = VERSION
    settled: bool = True
    gave_up_s: float = 0.0


def ruled_out(candidate: Candidate, stock: Candidate) -> str:
    """Why a candidate need not be measured against stock; "" where it must."""
    if candidate.placement == stock.placement:
        return f"{candidate.policy}'s plan is {stock.policy}'s own placement"
    if math.isfinite(candidate.predicted_s) and candidate.predicted_s > HOPELESS_PREDICTED * stock.predicted_s:
        times = candidate.predicted_s / stock.predicted_s
        return f"{candidate.policy} is predicted to take {times:.1f} times as long as {stock.policy}"
    return ""


def choose(candidates: Sequence[Candidate], most: int = MOST_CANDIDATES) -> tuple[Candidate, ...]:
    """The candidates with the least predicted time, each placement once; ties by name, so that it is repeatable.

    The CPU alone is tried besides, whatever place its prediction has: it is what stock llama.cpp does without the
    device, and on a slow device the best there is. With stock's own way of attention too, where that is another.
    """
    chosen: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.predicted_s, c.policy)):
        chosen.setdefault(candidate.placement, candidate)
    distinct = list(chosen.values())
    return tuple(c for i, c in enumerate(distinct) if i < most or c.policy in ALWAYS)


def winner_of(trials: Sequence[Trial]) -> str | None:
    """The policy that beats stock in every one of its trials, the fastest of these by geometric mean; None: stock.

    A policy that was not tried at each depth of the others does not win.
    """
    depths = {each.n_depth for each in trials}
    means: dict[str, float] = {}
    for policy in dict.fromkeys(each.policy for each in trials):
        own = [each for each in trials if each.policy == policy]
        if {each.n_depth for each in own} == depths and all(each.beats_stock for each in own):
            means[policy] = geometric_mean([each.ratio.value for each in own if each.ratio is not None])
    return max(means, key=lambda policy: means[policy]) if means else None


def decide(
    key: Key,
    stock: str,
    trials: Sequence[Trial],
    free_bytes: int,
    measured_at: str,
    seconds: float,
    settled: bool = True,
    gave_up_s: float = 0.0,
) -> Verdict:
    """The verdict of all trials; stock's where it is not settled."""
    depths = sorted({each.n_depth for each in trials})
    by_depth = tuple((depth, winner_of([each for each in trials if each.n_depth == depth])) for depth in depths)
    if not settled:
        return Verdict(key, stock, tuple(trials), None, (), free_bytes, measured_at, seconds, settled=False)
    winner = winner_of(trials)
    return Verdict(key, stock, tuple(trials), winner, by_depth, free_bytes, measured_at, seconds, gave_up_s=gave_up_s)


def reweighed(verdict: Verdict, pairs: Sequence[Pairs], key: Key, n_prompt: int, n_gen: int) -> Verdict:
    """What the pairs behind a verdict say of another prompt and generation."""
    trials = [trial(each, n_prompt, n_gen) for each in pairs] or verdict.trials
    return decide(key, verdict.stock, trials, verdict.free_bytes, verdict.measured_at, verdict.seconds)


def answers(verdict: Verdict, budget_s: float) -> bool:
    """Whether it says what to use to somebody who has so much time to find out."""
    return verdict.settled and (not verdict.gave_up_s or budget_s <= verdict.gave_up_s)


def holds(verdict: Verdict, free_bytes: int) -> bool:
    """Whether the device's free memory is about what it was."""
    return abs(free_bytes - verdict.free_bytes) <= MEMORY_TOLERANCE * verdict.free_bytes


def sentence(verdict: Verdict) -> str:
    """The line for the user: `oallama: split 1.34x stock (95 % 1.29-1.39), using it`."""
    if not verdict.settled:
        text = f"not settled in {verdict.seconds:.0f} s, using {verdict.stock}'s placement; the next run measures on"
    elif verdict.winner is not None:
        text = f"{_ratio_text(verdict, verdict.winner)}, using it"
    elif best := _best(verdict):
        worst = _worst(verdict, best)
        found = "slower" if worst is not None and worst.high < 1.0 else "not beyond noise"
        text = f"{_ratio_text(verdict, best)}: {found}, using {verdict.stock}'s placement"
    else:
        reason = next((each.refused for each in verdict.trials if each.refused), "there was nothing to compare")
        text = f"using {verdict.stock}'s placement: {reason}"
    winners = [winner or verdict.stock for _, winner in verdict.winner_by_depth]
    if len(set(winners)) > 1:
        parts = (
            f"{winner} at {depth} tokens" for (depth, _), winner in zip(verdict.winner_by_depth, winners, strict=True)
        )
        text += f" (the answer depends on the depth: {', '.join(parts)})"
    return f"oallama: {text}"


def _ratio_text(verdict: Verdict, policy: str) -> str:
    """`split 1.34x stock (95 % 1.29-1.39)`, of the depth where it gains least."""
    worst = _worst(verdict, policy)
    if worst is None:  # of a file that somebody changed
        return policy
    return f"{policy} {worst.value:.2f}× stock (95 % {worst.low:.2f}-{worst.high:.2f})"


def _worst(verdict: Verdict, policy: str) -> Ratio | None:
    ratios = [each.ratio for each in verdict.trials if each.policy == policy and each.ratio is not None]
    return min(ratios, key=lambda ratio: ratio.value, default=None)


def _best(verdict: Verdict) -> str | None:
    measured = [each for each in verdict.trials if each.ratio is not None]
    return max(measured, key=lambda each: each.ratio.value if each.ratio else 0.0).policy if measured else None


def verdict_from_json(document: Any) -> Verdict:
    """Raises ValueError for anything that is no verdict of this version."""
    if not isinstance(document, Mapping):
        raise ValueError("the verdict is not an object")
    if document.get("version") != VERSION:
        raise ValueError(f"verdict version {document.get('version')}, not {VERSION}")
    return from_json(Verdict, document, "the verdict")
