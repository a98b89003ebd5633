"""The gate's decision: which measured plan may be used instead of stock llama.cpp, and how long that holds. Pure.

A plan is used only if its whole 95 % interval lies above stock's speed, at every depth that was measured. Whatever the
predictions say, a plan that does not get there loses to stock-fit's placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oallama.bench.records import BenchTest, Block, Sample, Series
from oallama.bench.stats import Ratio, geometric_mean, speed_ratio
from oallama.core.codec import from_json

VERSION = 1

MOST_CANDIDATES = 2
CPU_ALONE = "cpu"  # the policy
ALWAYS = (CPU_ALONE, "stock-cpu")  # tried whatever is predicted for them
WORTH = 1.02  # as many times as fast as stock is worth a second look
MEMORY_TOLERANCE = 0.05
"""Free device memory may differ by this share of what it was; beyond, other plans fit."""


Key = Mapping[str, Any]
"""What a verdict holds for: text and numbers (gate/run.py, gate_key)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that might be used: placement tells plans apart that policies make alike."""

    policy: str
    predicted_s: float
    placement: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate against stock at one depth, by the time of the user's own prompt and generation. ratio None:
    there is none, for the reason in `refused`."""

    policy: str
    n_depth: int
    ratio: Ratio | None
    refused: str = ""

    @property
    def beats_stock(self) -> bool:
        return self.ratio is not None and self.ratio.low > 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found. winner None: stock's placement is used. winner_by_depth: what each depth alone would say."""

    key: Key
    stock: str
    trials: tuple[Trial, ...]
    winner: str | None
    winner_by_depth: tuple[tuple[int, str | None], ...]
    free_bytes: int  # on the device, when it was measured
    measured_at: str  # RFC 3339, UTC
    seconds: float  # that the gate took
    version: int = VERSION


def size_class(n_tokens: int) -> int:
    """The power of two that a count of tokens is nearest below: counts of one class are alike."""
    return max(n_tokens, 1).bit_length() - 1


def length_class(n_tokens: int) -> int:
    """The power of eight that a count of tokens is nearest below: what to weigh prompt against generation by."""
    return size_class(n_tokens) // 3


def choose(candidates: Sequence[Candidate], most: int = MOST_CANDIDATES) -> tuple[Candidate, ...]:
    """The candidates with the least predicted time, each placement once; ties by name, so that it is repeatable.

    The CPU alone is tried besides, whatever is predicted for it: it is what stock llama.cpp does without the device,
    and on a slow device the best there is. With stock's own way of attention too, where that is another.
    """
    chosen: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.predicted_s, c.policy)):
        chosen.setdefault(candidate.placement, candidate)
    distinct = list(chosen.values())
    return tuple(c for i, c in enumerate(distinct) if i < most or c.policy in ALWAYS)


def weighted_seconds(sample: Sample, measured: BenchTest, n_prompt: int, n_gen: int) -> float:
    """Seconds of the user's prompt and generation, from a sample of a shorter test."""
    prompt = sample.prompt_s * n_prompt / measured.n_prompt if measured.n_prompt else 0.0
    return prompt + (sample.gen_s * n_gen / measured.n_gen if measured.n_gen else 0.0)


def trial(policy: str, series: Series, arm: int, n_prompt: int, n_gen: int, refused: str | None = None) -> Trial:
    """The candidate at position `arm` of a series whose first arm is stock; `refused`: why it has no ratio."""
    if refused:
        return Trial(policy, series.test.n_depth, None, refused)
    stock, own = (
        [weighted_seconds(sample, series.test, n_prompt, n_gen) for sample in series.samples(index)]
        for index in (0, arm)
    )
    ratio = speed_ratio(stock, own)
    return Trial(policy, series.test.n_depth, ratio, "" if ratio else "too few samples")


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


def undecided(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Where no policy wins: those that seem worth it at every depth but for the noise. They are worth measuring again,
    as stock's placement costs what they would gain."""
    if winner_of(trials) is not None:
        return ()
    seconded = dict.fromkeys(each.policy for each in trials)
    for each in trials:
        if each.ratio is None or each.ratio.value < WORTH:
            seconded.pop(each.policy, None)
    return tuple(seconded)


def together(parts: Sequence[tuple[Series, int]]) -> Series:
    """One candidate's pairs with stock from several measurements of a test: parts are (series, position of its arm).
    In the result stock is arm 0 and the candidate arm 1."""
    blocks = tuple(
        Block((block.samples[0], block.samples[arm]), block.drift) for series, arm in parts for block in series.kept
    )
    return Series(parts[0][0].test, blocks)


def decide(key: Key, stock: str, trials: Sequence[Trial], free_bytes: int, measured_at: str, seconds: float) -> Verdict:
    """The verdict of all trials."""
    depths = sorted({each.n_depth for each in trials})
    by_depth = tuple((depth, winner_of([each for each in trials if each.n_depth == depth])) for depth in depths)
    return Verdict(key, stock, tuple(trials), winner_of(trials), by_depth, free_bytes, measured_at, seconds)


def holds(verdict: Verdict, free_bytes: int) -> bool:
    """Whether the device's free memory is about what it was."""
    return abs(free_bytes - verdict.free_bytes) <= MEMORY_TOLERANCE * verdict.free_bytes


def sentence(verdict: Verdict) -> str:
    """The line for the user: `oallama: split 1.34x stock (95 % 1.29-1.39), using it`."""
    if verdict.winner is not None:
        text = f"{_told(verdict, verdict.winner)}, using it"
    elif best := _best(verdict):
        text = f"{_told(verdict, best)}: not beyond noise, using {verdict.stock}'s placement"
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


def _told(verdict: Verdict, policy: str) -> str:
    """`split 1.34x stock (95 % 1.29-1.39)`, of the depth where it gains least."""
    ratios = [each.ratio for each in verdict.trials if each.policy == policy and each.ratio is not None]
    worst = min(ratios, key=lambda ratio: ratio.value)
    return f"{policy} {worst.value:.2f}× stock (95 % {worst.low:.2f}-{worst.high:.2f})"


def _best(verdict: Verdict) -> str | None:
    measured = [each for each in verdict.trials if each.ratio is not None]
    return max(measured, key=lambda each: each.ratio.value if each.ratio else 0.0).policy if measured else None


def verdict_from_json(document: Mapping[str, Any]) -> Verdict:
    """Raises ValueError for anything that is no verdict of this version."""
    if document.get("version") != VERSION:
        raise ValueError(f"verdict version {document.get('version')}, not {VERSION}")
    return from_json(Verdict, document, "the verdict")
