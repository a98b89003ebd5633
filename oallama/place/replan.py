"""Re-planning while a model runs (TwinPilots, section 3: its scheduler plans anew from what the tracker has seen).

Where a token takes another time than was predicted, the rates of both sides follow from what was seen, and of the cuts
that were kept (kept_cuts.py) the best at these rates are taken, and kept if they turn out to be faster: a program that
takes turns with the thread that computes CC stops the device's work and copies as well, which rates do not say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from oallama.cost.streams import BlockTimes
from oallama.cost.timeline import cycle_seconds
from oallama.cost.tracker import BlockSeconds, total
from oallama.place.kept_cuts import Rates, Replan, scaled

DRIFT = 0.2
"""Share by which a token, or the CPU for it, takes longer or shorter than predicted before anything is done."""

GAIN = 0.05
"""Share of a token that other cuts must promise to save."""

WAITED = 0.05
"""Share of a token from which on waiting for the device says how fast that is."""

FASTEST, SLOWEST = 1 / 16, 64.0  # rates that are believed


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of its cuts each block has, and the rates for which they were chosen.

    seen: what a token took when it was found that these cuts should stay; None: what the rates say is expected.
    before: the choice that was moved away from, until it is known which of the two is faster.
    """

    cuts: tuple[int, ...]
    rates: Rates = Rates()  # noqa: RUF009 - frozen
    seen: BlockSeconds | None = None
    before: Choice | None = None


@dataclass(slots=True)
class Replanner:
    """The rule for the blocks of one model. Remembers what it has priced."""

    replan: Replan
    _numbers: dict[BlockTimes, int] = field(default_factory=dict, init=False, repr=False)  # of times that are the same
    _times: tuple[tuple[int, ...], ...] = field(init=False, repr=False)  # by block and cut
    _known: dict[tuple[int, Rates], BlockSeconds] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._times = tuple(
            tuple(self._numbers.setdefault(times, len(self._numbers)) for times in kept.times)
            for kept in self.replan.blocks
        )

    def start(self) -> Choice:
        """The plan's cuts, at the rates that it was made with."""
        return Choice((0,) * len(self.replan.blocks))

    def predicted(self, block: int, cut: int, rates: Rates) -> BlockSeconds:
        """Of one run of a block on the thread that computes CC, among others like it."""
        key = (self._times[block][cut], rates)
        if key not in self._known:
            times = scaled(self.replan.blocks[block].times[cut], rates)
            round_s = cycle_seconds([times], self.replan.streaming)
            copied = (
                min(1.0, times.copy_s / round_s) if round_s else 0.0
            )  # share of the round in which the link is busy
            cpu_s = times.cpu_s * (1 + copied * (1 / times.interference.cpu_with_link - 1))
            other_s = times.send_s + times.issue_s + times.join_s
            self._known[key] = BlockSeconds(cpu_s, max(0.0, round_s - times.gap_s - cpu_s - other_s), other_s)
        return self._known[key]

    def expected(self, choice: Choice, rates: Rates | None = None) -> BlockSeconds:
        """Of all blocks for one token. rates: others than the choice's."""
        at = rates or choice.rates
        return total(self.predicted(block, cut, at) for block, cut in enumerate(choice.cuts))

    def drift(self, choice: Choice, observed: BlockSeconds) -> float:
        """Of what was seen from what was to be expected."""
        return drift(observed, choice.seen or self.expected(choice))

    def revised(self, choice: Choice, observed: BlockSeconds) -> Choice:
        """Cuts that were moved stay where they save half of GAIN, and go back otherwise. The same choice where a token,
        and the CPU for it, takes what was expected, within DRIFT; else one for the rates that were seen. The cuts
        change only where that promises GAIN of the blocks' time. observed: of all blocks for one token."""
        if choice.before is not None and choice.before.seen is not None:
            pays = observed.total_s < (1 - GAIN / 2) * choice.before.seen.total_s
            return replace(choice, before=None) if pays else choice.before
        if abs(self.drift(choice, observed)) <= DRIFT:
            return choice
        rates = self._rates(choice, observed)
        same = Choice(choice.cuts, rates, observed)
        best = Choice(tuple(self._best(block, rates) for block in range(len(self.replan.blocks))), rates, before=same)
        return best if self.expected(best).total_s < (1 - GAIN) * self.expected(same).total_s else same

    def _best(self, block: int, rates: Rates) -> int:
        n_cuts = len(self._times[block])
        return min(range(n_cuts), key=lambda cut: self.predicted(block, cut, rates).total_s)

    def _rates(self, choice: Choice, observed: BlockSeconds) -> Rates:
        """The thread's by what it took for each; the device's such that a token takes what it took, where it was waited
        for or would have been."""
        plain, before = self.expected(choice, Rates()), choice.rates
        cpu = _times_as_long(observed.cpu_s, plain.cpu_s, before.cpu)
        other = _times_as_long(observed.other_s, plain.other_s, before.other)
        wanted_s, waited = observed.total_s, observed.wait_s > WAITED * observed.total_s
        now_s = self.expected(choice, Rates(cpu, before.device, other)).total_s
        if abs(now_s - wanted_s) <= WAITED * wanted_s or (now_s < wanted_s and not waited):
            return Rates(cpu, before.device, other)
        if not waited:
            wanted_s *= 1 + WAITED
        low, high = FASTEST, SLOWEST
        for _ in range(16):
            middle = (low * high) ** 0.5
            slower = self.expected(choice, Rates(cpu, middle, other)).total_s > wanted_s
            low, high = (low, middle) if slower else (middle, high)
            self._forget(Rates(cpu, middle, other))
        return Rates(cpu, low, other)

    def _forget(self, rates: Rates) -> None:
        """Prices at rates that were only tried."""
        self._known = {key: price for key, price in self._known.items() if key[1] != rates}


def _times_as_long(observed_s: float, predicted_s: float, otherwise: float) -> float:
    return min(SLOWEST, max(FASTEST, observed_s / predicted_s)) if predicted_s > 0 else otherwise


def drift(observed: BlockSeconds, expected: BlockSeconds) -> float:
    """By which share what was seen is longer than expected; negative where it is shorter, by which share longer was
    expected. Of the whole or of the CPU's part, whichever is further off: behind a slow link a CPU that has become
    faster does not show in the whole."""
    return max(_off(observed.total_s, expected.total_s), _off(observed.cpu_s, expected.cpu_s), key=abs)


def _off(observed_s: float, expected_s: float) -> float:
    if not observed_s or not expected_s:
        return 0.0
    return observed_s / expected_s - 1 if observed_s >= expected_s else 1 - expected_s / observed_s
