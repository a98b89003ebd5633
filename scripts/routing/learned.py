"""What hot sets would have served of recorded routing: one that stays, one that learns between requests, one that a
cache keeps (LRU). Counts only, no times.

All begin with the most used experts of the first tokens. `learned` is oallama's own rule (place/learned_experts.py): at
the end of each request its window gets the request's uses, and experts are exchanged. `lru` takes in every expert that
is missed, at once, in place of the one that was used least recently: each copy of it lies between a router and the
expert's mul-mat, where a token waits for it. `hindsight` has the most used experts of each stretch that is shown,
chosen from that stretch itself: no set that stays for as long serves more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from oallama.core.routing import Tally
from oallama.place.learned_experts import DEVIATIONS, GAIN, HALF_LIFE_TOKENS, exchanges
from oallama.profile.routing import window_after
from routing.table import Routing, Row

WAYS = ("static", "learned", "lru", "hindsight")


@dataclass(frozen=True)
class LearningTrial:
    """What is simulated. n_hot: experts of each layer that are hot. n_first: tokens that the first set is chosen from.
    n_request: tokens between two exchanges. n_stretch: tokens of one figure."""

    n_expert: int
    n_hot: int
    n_first: int
    n_request: int = 128
    n_stretch: int = 256
    half_life: float = HALF_LIFE_TOKENS
    gain: float = GAIN
    deviations: float = DEVIATIONS


@dataclass(frozen=True)
class HitShares:
    """Share of all uses that were hits, by stretch, and experts copied for each token, in one layer."""

    coverage: tuple[float, ...]
    copied: tuple[float, ...]


Hit = tuple[int, int]  # of a token: uses that were hits, experts copied for it


def simulated(routing: Routing, course: LearningTrial) -> dict[str, HitShares]:
    """By way; means over the layers. Raises ValueError where there are too few tokens."""
    found: dict[str, list[HitShares]] = {way: [] for way in WAYS}
    for _, rows in sorted(routing.items()):
        later = rows[course.n_first :]
        if not 0 < course.n_first < len(rows) or len(later) < course.n_stretch:
            raise ValueError(f"{len(rows)} tokens are too few behind the {course.n_first} first ones")
        if max(max(row) for row in rows) >= course.n_expert:
            raise ValueError(f"there are experts beyond the {course.n_expert} of --experts")
        first = [0] * course.n_expert
        for row in rows[: course.n_first]:
            for expert in row:
                first[expert] += 1
        hot = sorted(range(course.n_expert), key=lambda e: (-first[e], e))[: course.n_hot]
        of_ways = {
            "static": [(sum(e in hot for e in row), 0) for row in later],
            "learned": list(_learned(later, first, hot, course)),
            "lru": list(_lru(later, rows[: course.n_first], hot)),
            "hindsight": list(_hindsight(later, course)),
        }
        for way, hits in of_ways.items():
            found[way].append(_stretches(hits, len(rows[0]), course.n_stretch))
    return {way: _mean(layers) for way, layers in found.items()}


def _learned(rows: Sequence[Row], first: Sequence[int], hot: Sequence[int], course: LearningTrial) -> Iterator[Hit]:
    n_used, now = len(rows[0]), set(hot)
    weight = min(1.0, course.half_life / course.n_first)
    window: tuple[float, ...] = tuple(weight * uses for uses in first)
    for begin in range(0, len(rows), course.n_request):
        request = rows[begin : begin + course.n_request]
        uses = Counter(expert for row in request for expert in row)
        hits = [(sum(expert in now for expert in row), 0) for row in request]
        window = window_after(window, Tally(len(request), tuple(uses[e] for e in range(len(first)))), course.half_life)
        worth = exchanges(window, now, n_used, course.gain, course.deviations)
        now = now - {each.goes for each in worth} | {each.comes for each in worth}
        hits[-1] = (hits[-1][0], len(worth))
        yield from hits


def _lru(rows: Sequence[Row], first: Sequence[Row], hot: Sequence[int]) -> Iterator[Hit]:
    cache = OrderedDict.fromkeys(hot)
    for row in first:
        for expert in row:
            if expert in cache:
                cache.move_to_end(expert)
    for row in rows:
        hits = [expert for expert in row if expert in cache]
        for expert in hits:
            cache.move_to_end(expert)
        for expert in row:
            if expert not in cache:
                cache.popitem(last=False)
                cache[expert] = None
        yield len(hits), len(row) - len(hits)


def _hindsight(rows: Sequence[Row], course: LearningTrial) -> Iterator[Hit]:
    for begin in range(0, len(rows), course.n_stretch):
        stretch = rows[begin : begin + course.n_stretch]
        best = {e for e, _ in Counter(e for row in stretch for e in row).most_common(course.n_hot)}
        yield from ((sum(e in best for e in row), 0) for row in stretch)


def _stretches(hits: Sequence[Hit], n_used: int, n_stretch: int) -> HitShares:
    """Without a last one that is shorter."""
    parts = [hits[begin : begin + n_stretch] for begin in range(0, len(hits) - n_stretch + 1, n_stretch)]
    return HitShares(
        tuple(sum(hit for hit, _ in part) / (n_used * n_stretch) for part in parts),
        tuple(sum(copied for _, copied in part) / n_stretch for part in parts),
    )


def _mean(layers: Sequence[HitShares]) -> HitShares:
    def mean_of(values: Iterator[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(each) / len(layers) for each in zip(*values, strict=True))

    return HitShares(mean_of(served.coverage for served in layers), mean_of(served.copied for served in layers))


def document(
    name: str, n_layer: int, n_used: int, course: LearningTrial, served: dict[str, HitShares]
) -> dict[str, Any]:
    """As JSON. name: of the routing."""
    return {
        "routing": name, "n_layer": n_layer, "n_used": n_used, "course": asdict(course),
        "ways": {way: asdict(each) for way, each in served.items()},
    }  # fmt: skip


def table(served: dict[str, HitShares], n_parts: int) -> list[list[str]]:
    """Rows: the way, coverage of each of n_parts equal parts of the tokens, experts copied for a token and layer."""
    rows = []
    for way, each in served.items():
        n = len(each.coverage)
        cuts = [n * part // n_parts for part in range(n_parts + 1)]
        means = [sum(each.coverage[a:b]) / (b - a) for a, b in pairwise(cuts)]
        rows.append([way, *(f"{mean:.1%}" for mean in means), f"{sum(each.copied) / n:.3f}"])
    return rows
