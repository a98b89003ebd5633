"""Measurements for the classes of workloads under one key, and the result. Pure.

For each class the most promising configurations of stock llama.cpp are measured, always with --fit; the fastest is the
rival. Our plans are compared with it one after another, in the order of tune/candidates.py. A plan wins as soon as
the whole interval of its speed ratio is above 1 (speed_interval). It loses as soon as the interval's upper end is below
WORTH, after MOST_PAIRS pairs, or if its first word is late. If no plan wins, the rival's plan is used. By default no
plan is used whose first word comes more than LATE times as late as with --fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

from oallama.core.codec import Count, Mark, Positive, Size, to_json
from oallama.core.types import Ratio
from oallama.plan.plan import Plan
from oallama.run.stock import StockPlacement
from oallama.tuned.classes import WorkloadClass

ERROR = 0.05
"""Upper bound on the probability of a false win in a class, and of an interval that misses the true ratio."""

SPREAD = 0.05
"""Inverse variance of the effect sizes in the mixture of speed_interval. A small one needs only four pairs to detect
large effects."""

MOST_TESTS = 3  # most plans compared in a class; each test has an error of ERROR / MOST_TESTS
MOST_PAIRS = 40  # most pairs of a test; if its interval then contains 1, there is no difference worth mentioning
WORTH = 1.02  # least speed ratio to the rival that is worth another plan
NEAR = 1.05  # predicted speed ratios below this are not shown
LATE = 1.25  # a first word that comes more than this many times as late as with --fit is late

Standing = Literal["won", "lost", "open"]


@dataclass(frozen=True, slots=True)
class Key:
    """Conditions of a result. Other conditions need another result."""

    model: str  # fingerprint of its header
    machine: str  # of CPU, threads, libraries, device and power
    profile: str  # digest of the profile that --profile gave; "": of this machine
    oallama: str  # version
    threads: int
    memory: int  # usable device memory as a step of CAP_STEP (tuned/store.py): log of its bytes
    gpu_weights: float | None
    n_ctx: int
    n_batch: int | None  # as asked for
    n_ubatch: int | None
    flash_attn: str
    type_k: str
    type_v: str
    late_first_word: bool  # whether a late first word may win
    draft: str = ""  # identity of the drafter; "": no drafts
    # machine and memory of each further device; those above are the first device's
    others: Annotated[tuple[tuple[str, int], ...], Mark.OMIT_DEFAULT] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of the prompt of a class and of one token after it."""

    prompt_s: float
    token_s: float

    def whole_s(self, n_gen: int) -> float:
        return self.prompt_s + n_gen * self.token_s


@dataclass(frozen=True, slots=True)
class StockTrial:
    """A configuration of stock llama.cpp, with n_draft drafts per step. speed None: not measured, e.g. as it is the
    only configuration. fault: why it cannot be used, else empty. device: the only device that it uses of several; "":
    all requested devices."""

    placement: StockPlacement
    speed: Speed | None = None
    fault: str = ""
    n_draft: int = 0
    device: str = ""

    @property
    def unmeasured(self) -> StockTrial:
        """The configuration alone."""
        return replace(self, speed=None, fault="")

    @property
    def flags(self) -> str:
        drafts = ("--spec-draft-n-max", str(self.n_draft)) if self.n_draft else ()
        alone = ("--device", self.device) if self.device else ()
        return " ".join((self.placement.flags, *alone, *drafts))


Pair = tuple[Speed, Speed]
"""(the rival's speed, the plan's speed), measured one directly after the other."""


@dataclass(frozen=True, slots=True)
class ABTest:
    """A comparison of a plan of ours with the rival. plan: its fingerprint. promised: its predicted speed ratio.
    most_late: largest allowed ratio of its prompt's seconds to the rival's; None: any. refused: why it is not compared,
    else empty."""

    policy: str
    plan: str
    n_gen: int  # length of the answer whose total time is compared
    promised: float | None = None
    most_late: Positive | None = None
    pairs: tuple[Pair, ...] = ()
    refused: str = ""

    @property
    def ratio(self) -> Ratio | None:
        """Speed over prompt and answer relative to the rival's, with its interval; None: too few pairs."""
        seconds = [(rival.whole_s(self.n_gen), ours.whole_s(self.n_gen)) for rival, ours in self.pairs]
        return speed_interval(seconds, ERROR / MOST_TESTS)

    @property
    def prompts(self) -> float:
        """Speed of its prompts relative to the rival's."""
        return _times((rival.prompt_s, ours.prompt_s) for rival, ours in self.pairs)

    @property
    def tokens(self) -> float:
        """Speed of its tokens relative to the rival's."""
        return _times((rival.token_s, ours.token_s) for rival, ours in self.pairs)

    @property
    def is_late(self) -> bool:
        return self.most_late is not None and len(self.pairs) > 1 and self.prompts * self.most_late < 1

    @property
    def standing(self) -> Standing:
        ratio = self.ratio
        if self.refused or self.is_late:
            return "lost"
        if ratio is not None and ratio.low > 1:
            return "won"
        if len(self.pairs) >= MOST_PAIRS or (ratio is not None and ratio.high < WORTH):
            return "lost"
        return "open"


@dataclass(frozen=True, slots=True)
class ClassResult:
    """The measurements of one class. tries: configurations of stock llama.cpp, --fit first; rival: index of the fastest
    that may be used; stock_plan: fingerprint of the rival's plan, "" until it is chosen. races: A/B tests against the
    rival."""

    of: WorkloadClass
    n_gen: Size
    n_measured: Size  # tokens that are generated in a turn (one sample of one arm)
    turn_s: float = 0.0  # predicted seconds of a turn
    tries: tuple[StockTrial, ...] = ()
    rival: Count = 0
    stock_plan: str = ""
    races: tuple[ABTest, ...] = ()
    measured_at: str = ""  # RFC 3339, UTC

    @property
    def won(self) -> ABTest | None:
        return next((ab_test for ab_test in self.races if ab_test.standing == "won"), None)

    @property
    def open(self) -> ABTest | None:
        """The A/B test to continue; None: a plan has won, or all tests are decided."""
        return None if self.won else next((ab_test for ab_test in self.races if ab_test.standing == "open"), None)

    @property
    def open_tries(self) -> tuple[StockTrial, ...]:
        """Configurations of stock llama.cpp that are still to be measured: none if there is only one, or once the rival
        is chosen."""
        waits = len(self.tries) > 1 and not self.stock_plan
        return tuple(tried for tried in self.tries if waits and tried.speed is None and not tried.fault)

    @property
    def settled(self) -> bool:
        return bool(self.stock_plan) and self.open is None

    @property
    def plan(self) -> str:
        """The fingerprint of the plan in use; "" until the rival is chosen."""
        return self.won.plan if self.won else self.stock_plan

    def ab_test(self, plan: str) -> ABTest:
        return next(ab_test for ab_test in self.races if ab_test.plan == plan)

    def with_test(self, ab_test: ABTest) -> ClassResult:
        """Replace the A/B test of that plan."""
        return replace(self, races=tuple(ab_test if test.plan == ab_test.plan else test for test in self.races))

    def with_try(self, tried: StockTrial) -> ClassResult:
        """Replace the results of that configuration."""
        tries = tuple(tried if trial.unmeasured == tried.unmeasured else trial for trial in self.tries)
        return replace(self, tries=tries)

    def fastest(self, late_may_win: bool) -> int:
        """Index of the fastest configuration whose prompt is not late."""
        fit = self.tries[0].speed
        if fit is None:
            return 0
        most_s = math.inf if late_may_win else LATE * fit.prompt_s
        seconds = [
            tried.speed.whole_s(self.n_gen) if tried.speed and tried.speed.prompt_s <= most_s else math.inf
            for tried in self.tries
        ]
        return seconds.index(min(seconds))

    @property
    def stock(self) -> str:
        """The rival in words."""
        return f"llama.cpp with {self.tries[self.rival].flags}" if self.rival else "llama.cpp's placement"

    @property
    def use(self) -> str:
        """The plan in use, with its three figures: `short questions: scheinfer is 2.3× as fast as llama.cpp's placement
        (1.6-3.3), prompts 0.97×, tokens 2.9×`."""
        if (won := self.won) is None:
            return f"{self.of.name}: using {self.stock}{self._gain}"
        value, interval = _texts(won)
        figures = f"prompts {_times_text(won.prompts)}, tokens {_times_text(won.tokens)}"
        return f"{self.of.name}: {_who(won)} is {value} as fast as {self.stock} ({interval}), {figures}"

    @property
    def sentence(self) -> str:
        """The plan in use, and why no other is."""
        return f"{self.use}; used from now on" if self.won else f"{self.use}{self._reason}"

    @property
    def _reason(self) -> str:
        if ab_test := self.open:
            promised = ab_test.promised or 1
            gain = f"may be {promised:.2g}× faster"
            may = "is not yet distinguishable from it" if promised < NEAR else gain
            so_far = f", {' so far ('.join(_texts(ab_test))})" if ab_test.ratio else ""
            return f"; {_who(ab_test)} {may}{so_far}"
        measured = [ab_test for ab_test in self.races if ab_test.pairs and not ab_test.refused]
        if best := max(measured, key=lambda each: each.ratio.value if each.ratio else -math.inf, default=None):
            if best.is_late and best.most_late is not None:
                late = LATE / (best.prompts * best.most_late)
                return f": the first word comes {late:.2g} times as late with {_who(best)} as with --fit"
            value, interval = _texts(best)
            if best.ratio is not None and best.ratio.high < 1:
                return f": {_who(best)} is {value} as fast ({interval})"
            return f": {_who(best)} is not measurably faster, {value} ({interval})"
        why = next((ab_test.refused for ab_test in self.races if ab_test.refused), "no plan is predicted to be faster")
        return f": {why}"

    @property
    def _gain(self) -> str:
        """The rival's gain over --fit, if it is another configuration."""
        if not self.rival:
            return ""
        fit, best = self.tries[0].speed, self.tries[self.rival].speed
        assert fit is not None and best is not None  # or it had not become the rival
        whole = fit.whole_s(self.n_gen) / best.whole_s(self.n_gen)
        if whole < WORTH:
            return ", about as fast as its own placement"
        parts = f"prompts {_times_text(fit.prompt_s / best.prompt_s)}, tokens {_times_text(fit.token_s / best.token_s)}"
        return f", {_times_text(whole)} as fast as its own placement ({parts})"

    @property
    def document(self) -> dict[str, Any]:
        """The result in JSON."""
        races = [
            {
                "policy": ab_test.policy, "plan": ab_test.plan, "promised": ab_test.promised,
                "standing": ab_test.standing, "refused": ab_test.refused, "n_pairs": len(ab_test.pairs),
                "late": ab_test.is_late, "ratio": asdict(ab_test.ratio) if ab_test.ratio else None,
                "prompts": ab_test.prompts if ab_test.pairs else None,
                "tokens": ab_test.tokens if ab_test.pairs else None,
            }
            for ab_test in self.races
        ]  # fmt: skip
        return {
            "class": asdict(self.of), "settled": self.settled, "winner": self.won.policy if self.won else None,
            "plan": self.plan, "stock": self.stock, "races": races, "measured_at": self.measured_at,
            "tries": [{**asdict(tried), "placement": tried.flags} for tried in self.tries],
            "said": self.sentence,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TuneResult:
    """All measurements under a key. plans: those of A/B tests and of rivals as JSON, by fingerprint. seconds: measuring
    time of all runs."""

    key: Key
    classes: tuple[ClassResult, ...] = ()
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def document(self) -> dict[str, Any]:
        """All results in JSON."""
        classes = [result.document for result in self.classes]
        return {"key": to_json(self.key), "classes": classes, "seconds": self.seconds}

    def plan(self, fingerprint: str) -> Plan:
        """Raises PlanError if the file was changed."""
        return Plan.from_json(dict(self.plans[fingerprint]), "a plan of the result")

    def of(self, workload_class: WorkloadClass) -> ClassResult | None:
        return next((result for result in self.classes if result.of == workload_class), None)

    def __getitem__(self, workload_class: WorkloadClass) -> ClassResult:
        """Raises KeyError for a class without results."""
        if (result := self.of(workload_class)) is None:
            raise KeyError(workload_class.name)
        return result

    def nearest(self, workload_class: WorkloadClass) -> ClassResult | None:
        """The nearest settled class, at most a step away; None if there is none."""
        near = [result for result in self.classes if result.settled and result.of.distance(workload_class) <= 1]
        return min(near, key=lambda result: result.of.distance(workload_class), default=None)

    def with_class(self, changed: ClassResult) -> TuneResult:
        """Replace the result of that class, or add it."""
        others = tuple(result for result in self.classes if result.of != changed.of)
        return replace(self, classes=(*others, changed))


def _times(pairs: Iterable[tuple[float, float]]) -> float:
    """Speed of the second of each pair relative to the first, by the geometric mean."""
    return math.exp(fmean(math.log(first / second) for first, second in pairs))


def _times_text(ratio: float) -> str:
    """`2.3×`, `1.06×`: two digits, near 1 two decimals, as 1× would say nothing."""
    return f"{ratio:.2f}×" if 0.95 <= ratio < 1.1 else f"{ratio:.2g}×"


def _who(ab_test: ABTest) -> str:
    return {"cpu": "the CPU alone"}.get(ab_test.policy, ab_test.policy)


def _texts(ab_test: ABTest) -> tuple[str, str]:
    """(ratio, its interval), with two decimals where the interval is narrow enough to mean them."""
    ratio = ab_test.ratio
    assert ratio is not None
    n = 2 if ratio.high - ratio.low < 0.5 else 1
    return f"{ratio.value:.{n}f}×", f"{ratio.low:.{n}f}-{ratio.high:.{n}f}"


def speed_interval(pairs: Sequence[tuple[float, float]], error: float) -> Ratio | None:
    """The speed ratio of the second to the first in pairs of seconds, with an interval that is valid at every number of
    pairs; None: too few pairs.

    Assumes that the logarithms of the ratios are draws from one normal distribution. The interval inverts a mixture of
    t-tests (Lai 1976; Wang and Ramdas 2024, "Anytime-valid t-tests"): the e-value of a mean m is the likelihood ratio
    of other means against m, averaged over effect sizes and standard deviations. If m is the true mean, its e-value
    ever reaches 1/error with a probability of at most `error`. So the interval holds at all numbers of pairs together,
    in one run or over several, and measuring may stop as soon as it excludes 1. (`oallama bench`, with a fixed number
    of rounds, uses bench/stats.py speed_ratio instead.)
    """
    n = len(pairs)
    if n < 2:
        return None
    logs = [math.log(first / second) for first, second in pairs]
    shrink = SPREAD / (n + SPREAD)
    growth = (1 / (error * math.sqrt(shrink))) ** (2 / n)
    if growth * shrink >= 1:
        return None
    half = stdev(logs) * math.sqrt((growth - 1) / (1 - growth * shrink) * (n - 1) / n)
    mean = fmean(logs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
