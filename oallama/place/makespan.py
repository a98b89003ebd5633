"""Operations on two sides that work at the same time, so that the slower side is done as early as possible: the load
balancing problem of TwinPilots (Yu and Jiang, SYSTOR 2024), with memory on the device that saves loading.

The least max(S_cpu, S_gpu) is NP-complete to find, but layers repeat: what counts is how many operations of each kind
lie where. The search is a branch and bound over these counts. Its bound is the Lagrangian one, with a price on each
side's time and on memory; at the best prices that is the linear relaxation's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

MOST_NODES = 1_000
"""Of each search. Where they are not enough, the best placement that was found comes with a bound."""

SLACKS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1, inf)
"""Of the bound. Placements within the first one are looked for, then, while there is none, within the next."""

PRICE_ROUNDS = 80
LEAST_S = 1e-300  # that is divided by
ROUNDING = 1e-9  # of the bound: what sums of seconds may differ by

CPU, STREAMED, RESIDENT = range(3)
"""Where an operation is: on the CPU; on the device, loaded for each pass; on the device, where its weights stay."""

Counts = tuple[int, int, int]
"""Operations of a kind by where they are."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What runs whole on one side. None: it cannot be there."""

    bytes: int  # of the device, where it is resident
    cpu_s: float
    streamed_s: float | None  # loading and computing
    resident_s: float | None

    @property
    def without_waste(self) -> Operation:
        """The same, not resident where that saves nothing."""
        if self.streamed_s is None or self.resident_s is None or self.resident_s < self.streamed_s:
            return self
        return replace(self, resident_s=None)

    @property
    def sort_key(self) -> tuple[float, ...]:
        return (self.cpu_s, _or_inf(self.streamed_s), _or_inf(self.resident_s), self.bytes)


@dataclass(frozen=True, slots=True)
class Makespan:
    """Where each operation is, and when both sides are done if neither waits for the other."""

    sides: tuple[int, ...]
    cpu_s: float
    device_s: float
    bound_s: float  # of no placement the makespan is less

    @property
    def seconds(self) -> float:
        return max(self.cpu_s, self.device_s)

    @property
    def is_least(self) -> bool:
        """Whether it is known that there is no better one."""
        return self.seconds <= self.bound_s * (1 + ROUNDING)


def least_makespan(operations: Sequence[Operation], room: int, most_nodes: int = MOST_NODES) -> Makespan:
    """The placement with the least makespan of which no more than `room` bytes are resident.

    Each kind's operations on one side lie evenly among the others, so that either side has something to do all along.
    """
    kinds: dict[Operation, list[int]] = {}
    for i, operation in enumerate(operations):
        kinds.setdefault(operation.without_waste, []).append(i)
    listed = sorted(kinds, key=lambda operation: operation.sort_key)
    counts, bound_s = _Search(listed, [len(kinds[kind]) for kind in listed], max(0, room), most_nodes).run()
    sides = [CPU] * len(operations)
    for kind, count in zip(listed, counts, strict=True):
        for i, side in zip(kinds[kind], _spread(count), strict=True):
            sides[i] = side
    cpu_s = sum(operation.cpu_s for operation, side in zip(operations, sides, strict=True) if side == CPU)
    device_s = sum(
        _or_inf(operation.streamed_s if side == STREAMED else operation.resident_s)
        for operation, side in zip(operations, sides, strict=True)
        if side != CPU
    )
    return Makespan(tuple(sides), cpu_s, device_s, min(bound_s, max(cpu_s, device_s)))


def _spread(counts: Counts) -> Iterator[int]:
    """Sides in the order of the graph, each as evenly as its count allows."""
    left, owed, n = list(counts), [0.0, 0.0, 0.0], sum(counts)
    for _ in range(n):
        owed = [due + count / n for due, count in zip(owed, counts, strict=True)]
        side = max((side for side in range(3) if left[side]), key=lambda side: owed[side])
        owed[side] -= 1
        left[side] -= 1
        yield side


@dataclass(frozen=True, slots=True)
class _Part:
    """Some operations on each side, and what that costs."""

    reduced_s: float  # above their part of the bound
    counts: Counts  # of the kind
    cpu_s: float
    device_s: float
    bytes: int

    def beside(self, other: _Part) -> _Part:
        """Both together; counts are the other's."""
        return _Part(
            self.reduced_s + other.reduced_s, other.counts, self.cpu_s + other.cpu_s, self.device_s + other.device_s,
            self.bytes + other.bytes,
        )  # fmt: skip


NOTHING = _Part(0.0, (0, 0, 0), 0.0, 0.0, 0)


class _Search:
    """Counts of each kind, for the least makespan within `room` bytes."""

    def __init__(self, kinds: Sequence[Operation], counts: Sequence[int], room: int, most_nodes: int) -> None:
        self._kinds, self._counts, self._room, self._most_nodes = kinds, counts, room, most_nodes
        self._cpu_share, self._byte_s, self._bound_s = self._prices()
        # kinds whose sides differ the most first: what is left to the end closes the gap between both sides
        reduced = [sorted(self._reduced(kind)) for kind in kinds]
        self._order = sorted(range(len(kinds)), key=lambda k: (-reduced[k][1], k))
        self._best: list[Counts] | None = None
        self._best_s = inf

    def run(self) -> tuple[list[Counts], float]:
        """(counts of each kind, bound): the bound is their makespan where the search came to its end."""
        bound_s = self._bound_s
        for slack in SLACKS:
            limit = bound_s * (1 + slack) + ROUNDING * bound_s if slack < inf else inf
            complete = self._look(limit)
            if self._best is not None:
                if complete:
                    bound_s = self._best_s
                break
        counts: list[Counts] = [(n, 0, 0) for n in self._counts]
        for k, found in zip(self._order, self._best or (), strict=False):
            counts[k] = found
        return counts, bound_s

    #
    # prices
    #

    def _prices(self) -> tuple[float, float, float]:
        """(share of the makespan that the CPU's second counts for, seconds a byte, bound) with the highest bound. It is
        a concave function of the share, and at each share the best price of a byte is known."""

        def bound(share: float) -> float:
            return self._at_share(share)[0]

        low, high = 0.0, 1.0
        for _ in range(PRICE_ROUNDS):
            first, second = low + (high - low) / 3, high - (high - low) / 3
            if bound(first) < bound(second):
                low = first
            else:
                high = second
        share = max((low, (low + high) / 2, high, 0.0, 1.0), key=bound)
        found, byte_s = self._at_share(share)
        return share, byte_s, found

    def _at_share(self, share: float) -> tuple[float, float]:
        """(bound, seconds a byte): a fractional knapsack of what residence saves."""
        total, saves = 0.0, []
        for kind, count in zip(self._kinds, self._counts, strict=True):
            else_s = min(share * kind.cpu_s, (1 - share) * kind.streamed_s if kind.streamed_s is not None else inf)
            total += count * else_s
            if kind.resident_s is not None and else_s > (1 - share) * kind.resident_s:
                saves.append((else_s - (1 - share) * kind.resident_s, kind.bytes, count))
        saves.sort(key=lambda one: (-one[0] / max(1, one[1]), one))
        left = self._room
        for saved_s, n_bytes, count in saves:
            if count * n_bytes > left:
                return total - left * saved_s / n_bytes, saved_s / n_bytes
            left -= count * n_bytes
            total -= count * saved_s
        return total, 0.0

    def _reduced(self, kind: Operation) -> tuple[float, float, float]:
        """Of each side: what one operation of the kind costs there above the cheapest side."""
        share, device_share = self._cpu_share, 1 - self._cpu_share
        costs = (
            share * kind.cpu_s,
            inf if kind.streamed_s is None else device_share * kind.streamed_s,
            inf if kind.resident_s is None else device_share * kind.resident_s + self._byte_s * kind.bytes,
        )
        cheapest = min(costs)
        return costs[0] - cheapest, costs[1] - cheapest, costs[2] - cheapest

    #
    # branch and bound
    #

    def _parts(self, k: int, within_s: float) -> list[_Part]:
        """Counts of a kind whose reduced cost is no more than within_s, the cheapest first."""
        kind, n, reduced = self._kinds[k], self._counts[k], self._reduced(self._kinds[k])
        cheapest, second, third = sorted(range(3), key=lambda side: (reduced[side], side))
        made = []
        for n_third in range(_most(reduced[third], within_s, n) + 1):
            left_s = within_s - (n_third * reduced[third] if n_third else 0.0)
            for n_second in range(_most(reduced[second], left_s, n - n_third) + 1):
                counts = [0, 0, 0]
                counts[cheapest] = n - n_third - n_second
                counts[second], counts[third] = n_second, n_third
                of_side = zip(counts, reduced, strict=True)
                made.append(
                    _Part(
                        sum(count * each for count, each in of_side if count),
                        (counts[CPU], counts[STREAMED], counts[RESIDENT]),
                        counts[CPU] * kind.cpu_s,
                        (counts[STREAMED] * (kind.streamed_s or 0.0)) + counts[RESIDENT] * (kind.resident_s or 0.0),
                        counts[RESIDENT] * kind.bytes,
                    )
                )
        return sorted(made, key=lambda part: (part.reduced_s, part.counts))

    def _look(self, limit_s: float) -> bool:
        """Look for the best placement below limit_s. False: nodes ran out."""
        base, limit = self._bound_s, min(limit_s, self._best_s)
        *before, last = self._order
        pair = self._parts(before.pop(), limit_s - base) if before else [NOTHING]
        ends = _Ends(pair, self._kinds[last], self._counts[last])
        parts = [self._parts(k, limit_s - base) for k in before]
        least_cpu = _behind(min(part.cpu_s for part in of) for of in parts)
        least_device = _behind(min(part.device_s for part in of) for of in parts)

        def end(so_far: _Part, counts: Sequence[Counts]) -> float:
            """The limit, once the counts of the last two kinds are chosen as well."""
            found, seconds = ends.best(so_far, limit - base, self._room)
            if seconds < limit:
                self._best, self._best_s = [*counts, *found][-len(self._order) :], seconds
            return min(limit, seconds)

        if not parts:
            end(NOTHING, ())
            return True
        open_nodes: list[tuple[_Part, tuple[Counts, ...], Iterator[_Part]]] = [(NOTHING, (), iter(parts[0]))]
        nodes_left = self._most_nodes
        while open_nodes:
            so_far, counts, children = open_nodes[-1]
            part = next(children, None)
            if part is None or base + so_far.reduced_s + part.reduced_s >= limit:
                open_nodes.pop()
                continue
            nodes_left -= 1
            if nodes_left < 0:
                return False
            after, depth = so_far.beside(part), len(open_nodes)
            least_s = max(after.cpu_s + least_cpu[depth], after.device_s + least_device[depth])
            if after.bytes > self._room or least_s >= limit:
                continue
            if depth == len(parts):
                limit = end(after, (*counts, part.counts))
            else:
                open_nodes.append((after, (*counts, part.counts), iter(parts[depth])))
        return True


class _Ends:
    """The parts of one kind, the cheapest first, each with the best counts of the last kind."""

    def __init__(self, parts: Sequence[_Part], last: Operation, n: int) -> None:
        import numpy as np

        self._parts, self._last, self._n = parts, last, n
        self._reduced_s, self._cpu_s, self._device_s, self._bytes = (
            np.array([getattr(part, name) for part in parts], dtype=float)
            for name in ("reduced_s", "cpu_s", "device_s", "bytes")
        )

    def best(self, so_far: _Part, within_s: float, room: int) -> tuple[tuple[Counts, ...], float]:
        """(counts, makespan) beside so_far, of parts whose reduced cost is less than within_s. Where some of the last
        kind are streamed, as many of it are resident as fit, as these take less; else it has two sides, too."""
        import numpy as np

        kind, n = self._last, self._n
        there = slice(0, int(np.searchsorted(self._reduced_s, within_s - so_far.reduced_s)))
        cpu_s, device_s = so_far.cpu_s + self._cpu_s[there], so_far.device_s + self._device_s[there]
        left = room - so_far.bytes - self._bytes[there]
        fit = np.full(len(left), 0 if kind.resident_s is None else n)
        if kind.bytes:
            fit = np.minimum(fit, np.maximum(left, 0) // kind.bytes)
        best_s, best = inf, (NOTHING.counts, (n, 0, 0))
        for side, resident in ((STREAMED, fit), (RESIDENT, 0 * fit)):
            each_s = kind.streamed_s if side == STREAMED else kind.resident_s or 0.0
            if each_s is None:
                continue
            before_s = device_s + resident * (kind.resident_s or 0.0)
            most = n - resident if side == STREAMED else fit
            ahead_s = cpu_s + (n - resident) * kind.cpu_s - before_s
            meet = ahead_s // max(kind.cpu_s + each_s, LEAST_S)  # as many moved, both sides take as long
            for moved in (np.clip(meet, 0, most), np.clip(meet + 1, 0, most)):
                seconds = np.maximum(cpu_s + (n - resident - moved) * kind.cpu_s, before_s + moved * each_s)
                seconds[left < 0] = inf
                if len(seconds) and seconds.min() < best_s:
                    at = int(seconds.argmin())
                    counts = [n - int(resident[at]) - int(moved[at]), 0, int(resident[at])]
                    counts[side] += int(moved[at])
                    best_s, best = float(seconds[at]), (self._parts[at].counts, (counts[0], counts[1], counts[2]))
        return best, best_s


def _most(each_s: float, within_s: float, n: int) -> int:
    """Of n, how many at so many seconds each are within a sum."""
    if each_s == inf:
        return 0
    return n if n * each_s <= within_s else int(within_s / each_s)


def _behind(seconds: Iterator[float]) -> list[float]:
    """The sum of all but the first i."""
    sums = list(accumulate(reversed(list(seconds)), initial=0.0))
    return sums[::-1]


def _or_inf(seconds: float | None) -> float:
    return inf if seconds is None else seconds
