"""Use of a layer's experts, from recordings: hit rates of hot sets, and numbers of misses and copies.

A hit rate would be too high on the tokens from which the set was chosen. So earlier recordings choose the set, and the
last one gives its hit rate, with one use added for each expert (Laplace's rule): after a short recording the experts
count as nearly equally used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import comb, exp, gamma, log
from operator import mul
from typing import NamedTuple

from oallama.core.routing import LayerRouting, Routing, Uses
from oallama.core.types import DecodeStep, MulMat


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """Use of a layer's experts. order: experts, the most used in decode first. decode, prompt: coverage (share of later
    uses served) by the number of hot experts, from 0 to all."""

    order: tuple[int, ...]
    decode: tuple[float, ...]
    prompt: tuple[float, ...]
    spread: float | None = None  # if experts follow the conversation: SPREAD of cost/following.py; None: they stay
    # coverage by the experts with the highest recent (decayed) counts, by their number from 0 to all, for single tokens
    # and for prompts; empty: not recorded
    recent_decode: tuple[float, ...] = ()
    recent_prompt: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()  # uses by reuse distance in tokens (split/uses.h); empty: not recorded
    # (tokens of a decode step, number of different experts that they use relative to independent tokens)
    step: tuple[int, float] = (1, 1.0)

    @property
    def follows(self) -> bool:
        return self.spread is not None

    def coverage(self, n_hot: int, n_tokens: int) -> float:
        """Coverage by n_hot experts in a pass over n_tokens: decode's up to the tokens of a step, else the prompt's."""
        return (self.decode if n_tokens <= self.step[0] else self.prompt)[n_hot]

    def used(self, mul_mat: MulMat, n_tokens: int) -> tuple[float, ...]:
        """The probability that n_tokens tokens use each expert, in the order of coverage: by independent draws with its
        share of the uses, scaled down if consecutive tokens are known to use fewer different experts."""
        shares = (mul_mat.n_expert_used * share for share in self._shares(n_tokens))
        drawn = tuple(1.0 - (1.0 - min(1.0, share)) ** n_tokens for share in shares)
        if n_tokens == self.step[0]:
            different = len(drawn) * mul_mat.share_read(n_tokens) * self.step[1]
        elif sum(self.gaps):
            different = len(drawn) * share_used(mul_mat, n_tokens, self.gaps)
        else:
            return drawn
        return tuple(min(1.0, odds * different / sum(drawn)) for odds in drawn)

    def misses_by_rows(self, mul_mat: MulMat, n_hot: int, n_tokens: int) -> list[tuple[float, float]]:
        """(number of different experts, share of the rows) that remain of the misses of n_tokens tokens after fetching
        0, 1, … all of the missed experts, those with the most rows first. n_hot: fewer than all experts."""
        misses = list(zip(self._shares(n_tokens), self.used(mul_mat, n_tokens), strict=True))[n_hot:]
        rows, experts = (list(accumulate(of, initial=0.0)) for of in zip(*sorted(misses, reverse=True), strict=True))
        return [(experts[-1] - n, 1.0 - m / rows[-1]) for n, m in zip(experts, rows, strict=True)]

    def _shares(self, n_tokens: int) -> tuple[float, ...]:
        """Share of the uses of each expert, in the order of coverage."""
        curve = self.decode if n_tokens <= self.step[0] else self.prompt
        return tuple(more - less for less, more in pairwise(curve))


def experts_alike(n_expert: int) -> ExpertCoverage:
    """The use of a layer without counts: all experts equally."""
    even = tuple(n / n_expert for n in range(n_expert + 1))
    return ExpertCoverage(tuple(range(n_expert)), even, even)


def expert_use(routing: Routing) -> dict[int, ExpertCoverage]:
    """Use of experts by layer, for layers whose decode was recorded at least twice. Without recorded prompts all
    experts count as equally used in prompts."""
    prompts = {layer.layer: layer for layer in routing.prompt}
    return {
        layer.layer: ExpertCoverage(
            most_used(layer.uses),
            _coverage(most_used(layer.before), layer.latest),
            _coverage(most_used(layer.before), _later(prompts.get(layer.layer), routing.n_expert)),
            recent_decode=_of_ranks(layer),
            recent_prompt=_of_ranks(prompts.get(layer.layer)),
            gaps=_gaps(layer, prompts.get(layer.layer)),
        )
        for layer in routing.decode
        if sum(layer.before) > 0 and sum(layer.latest) > 0
    }


def most_used(uses: Sequence[float]) -> tuple[int, ...]:
    """Experts by falling use; ties in order."""
    return tuple(sorted(range(len(uses)), key=lambda expert: (-uses[expert], expert)))


def miss_odds(n_used: int, coverage: float, spread: float = 0.0) -> tuple[float, ...]:
    """The probabilities of 0, 1, … n_used misses of one token: binomial; with a spread beta-binomial, as hit rates then
    differ from token to token."""
    miss = 1.0 - coverage
    if not spread or not 0 < miss < 1:
        return tuple(comb(n_used, n) * miss**n * coverage ** (n_used - n) for n in range(n_used + 1))
    scale = (1.0 - spread) / spread
    rising = [
        tuple(accumulate((share * scale + i for i in range(n_used)), mul, initial=1.0))
        for share in (miss, coverage, 1.0)
    ]
    misses, hits, (*_, all_of_them) = rising
    return tuple(comb(n_used, n) * misses[n] * hits[n_used - n] / all_of_them for n in range(n_used + 1))


class Copied(NamedTuple):
    """Shares of a streamed weight that are copied for a batch."""

    ahead: float  # before the router has run
    late: float  # after that


ALL_AHEAD = Copied(1.0, 0.0)


def share_used(mul_mat: MulMat, n_tokens: int, gaps: Sequence[float] = ()) -> float:
    """Share of the experts that a batch uses. gaps: uses by reuse distance in tokens: 1, 2 to 3, 4 to 7, …; the last:
    longer, or never used before. A use is the first one of its expert in the batch if its distance reaches before the
    batch (Denning's working set). Distances are assumed to be uniform within a class. Each recording begins with first
    uses, so of the last class no more count than the two below it have."""
    if not mul_mat.routed or not sum(gaps):
        return mul_mat.share_routed(n_tokens)
    *classes, longer = gaps
    new = min(longer, sum(classes[-2:])) * n_tokens
    for power, uses in enumerate(classes):
        # these distances reach before the batch from the first `least` tokens, and from ever fewer of the next `more`
        least = 2**power
        more = min(max(0, n_tokens - least), least - 1)
        new += uses * (min(n_tokens, least) + more - more * (more + 1) / (2 * least))
    return min(1.0, mul_mat.n_expert_used * new / sum(gaps) / mul_mat.shape[2])


CONSECUTIVE = ((1, 1.0), (2, 0.83), (4, 0.70), (8, 0.60))
"""(consecutive tokens, number of different experts that they use relative to independent tokens). Recorded in 2, 4 and
8 tokens: gpt-oss-20b 6.2, 9.3 and 12.8 of 32 experts; Qwen3-30B-A3B 9.7, 15.6 and 23.6, Gemma 4 26B-A4B 9.9, 15.7 and
23.9 of 128, with six experts per token (traces: cost/following.py)."""


def share_of_step(mul_mat: MulMat, step: DecodeStep, gaps: Sequence[float] = ()) -> float:
    """Share of the experts that a decode step uses. Tokens of one request are consecutive; tokens of different requests
    count as independent. gaps: as in share_used; empty: CONSECUTIVE."""
    n = step.n_draft + 1
    of_one = share_used(mul_mat, n, gaps) if sum(gaps) else mul_mat.share_read(n) * _of_consecutive(n)
    return 1.0 - (1.0 - of_one) ** step.n_parallel


def of_step(use: ExpertCoverage, mul_mat: MulMat, step: DecodeStep) -> ExpertCoverage:
    """The use with the number of different experts of a decode step."""
    if step.n_tokens == 1:
        return use
    share = share_of_step(mul_mat, step, use.gaps)
    return replace(use, step=(step.n_tokens, share / mul_mat.share_read(step.n_tokens)))


def _of_consecutive(n_tokens: int) -> float:
    """Linear in the logarithm of n_tokens between the points of CONSECUTIVE."""
    for (n0, low), (n1, high) in pairwise(CONSECUTIVE):
        if n_tokens <= n1:
            return low + (high - low) * log(n_tokens / n0) / log(n1 / n0)
    return CONSECUTIVE[-1][1]


def copied(mul_mat: MulMat, n_tokens: int, gaps: Sequence[float] = ()) -> Copied:
    """Shares of a weight that are copied for a batch: ahead, the experts that it uses with a probability of at least
    1/2, which the split back end knows by its counts (split/expert_odds.h); late, the others that it uses. The number
    of uses of an expert is Poisson, with a mean that follows the gamma distribution of MulMat.share_routed, scaled so
    that the share of unused experts is that of share_used (gaps: as there). So likely experts have a mean of at least
    ln 2. A single token hardly ever has likely experts."""
    used = share_used(mul_mat, n_tokens, gaps)
    if n_tokens <= 1:
        return Copied(0.0, used) if mul_mat.routed else ALL_AHEAD
    if used >= 1.0:
        return ALL_AHEAD
    spread = mul_mat.use_spread
    scale = (1.0 - used) ** (-1.0 / spread) - 1.0
    rare = _gamma_below(spread, log(2) / scale)
    rare_and_idle = (1.0 + scale) ** -spread * _gamma_below(spread, log(2) * (1.0 + 1.0 / scale))
    return Copied(1.0 - rare, rare - rare_and_idle)


def _gamma_below(shape: float, x: float) -> float:
    """The probability that a gamma variable of this shape and scale 1 is below x, by the series of the incomplete gamma
    function, whose terms are all positive."""
    if x > 100:  # no shape is above 32 (MulMat.use_spread)
        return 1.0
    term = total = 1.0 / shape
    n = 0
    while term > 1e-12 * total:
        n += 1
        term *= x / (shape + n)
        total += term
    return min(1.0, exp(shape * log(x) - x) * total / gamma(shape))


def _coverage(order: Sequence[int], uses: Uses) -> tuple[float, ...]:
    total = sum(uses) + len(uses)
    served = (0.0, *accumulate((uses[expert] + 1.0) / total for expert in order))
    return (*(min(1.0, share) for share in served[:-1]), 1.0)


def mean_gaps(routing: Routing) -> tuple[float, ...]:
    """Uses by reuse distance in decode, added up over all layers; empty if not recorded."""
    recorded = [layer.gaps for layer in routing.decode if any(layer.gaps)]
    return tuple(map(sum, zip(*recorded, strict=True)))


def _gaps(decode: LayerRouting, prompt: LayerRouting | None) -> tuple[float, ...]:
    """Uses by reuse distance of decode and prompts together, as few prompts are recorded."""
    if prompt is None or not prompt.gaps or not decode.gaps:
        return decode.gaps
    return tuple(a + b for a, b in zip(decode.gaps, prompt.gaps, strict=True))


def _of_ranks(layer: LayerRouting | None) -> tuple[float, ...]:
    return _coverage(range(len(layer.ranks)), layer.ranks) if layer is not None and any(layer.ranks) else ()


def _later(layer: LayerRouting | None, n_expert: int) -> Uses:
    if layer is None or not sum(layer.latest):
        return (1.0,) * n_expert
    return layer.latest
