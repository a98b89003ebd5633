"""What blocks take while a model runs: the statistics tracker of TwinPilots (section 3), which predictions begin.

One mean for each block, cut of it, class of batch sizes and class of sequence lengths. It forgets exponentially, so
that it follows a machine that other programs, heat or depth make slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MEMORY_RUNS = 8
"""Of the mean: so many runs of late weigh 1 - 1/e."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What is told apart. batch, depth: tokens at most; powers of two, half of which is less than what was run."""

    block: str  # its first weight
    cc: int  # elements
    batch: int
    depth: int


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """One run of a block on the thread that computes CC, seconds."""

    cpu_s: float  # computing CC
    wait_s: float  # for the device after that
    other_s: float  # sending, asking for copies, joining

    @property
    def total_s(self) -> float:
        return self.cpu_s + self.wait_s + self.other_s


@dataclass(frozen=True, slots=True)
class Sample:
    """What n_runs runs of one kind took on average."""

    key: BlockKey
    seconds: BlockSeconds
    n_runs: int


def total(parts: Iterable[BlockSeconds]) -> BlockSeconds:
    """Of several runs, one after the other."""
    known = tuple(parts)
    return BlockSeconds(*(sum(getattr(one, name) for one in known) for name in ("cpu_s", "wait_s", "other_s")))


def size_class(n_tokens: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, n_tokens - 1).bit_length()


def updated(mean: BlockSeconds, sample: Sample) -> BlockSeconds:
    """The mean after so many runs that each took what they took on average: each moves it by a part in MEMORY_RUNS."""
    kept = (1 - 1 / MEMORY_RUNS) ** sample.n_runs
    new = sample.seconds
    return BlockSeconds(
        kept * mean.cpu_s + (1 - kept) * new.cpu_s,
        kept * mean.wait_s + (1 - kept) * new.wait_s,
        kept * mean.other_s + (1 - kept) * new.other_s,
    )


class Tracker:
    """The means. Of what was not run yet at some sequence length, the nearest class of the same cut and batch size
    begins; where there is none, what was predicted; else the first sample."""

    def __init__(self) -> None:
        self._means: dict[BlockKey, BlockSeconds] = {}
        self._seeds: dict[tuple[str, int, int], BlockSeconds] = {}

    def seed(self, predicted: Mapping[tuple[str, int, int], BlockSeconds]) -> None:
        """Begin the means of these (block, CC, batch) anew, with what is predicted."""
        self._seeds |= predicted
        self._means = {k: mean for k, mean in self._means.items() if (k.block, k.cc, k.batch) not in predicted}

    def feed(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._means[sample.key] = updated(self.mean(sample.key) or sample.seconds, sample)

    def mean(self, key: BlockKey) -> BlockSeconds | None:
        """Of one kind of run; None: nothing is known of it."""
        if key in self._means:
            return self._means[key]
        alike = [k for k in self._means if (k.block, k.cc, k.batch) == (key.block, key.cc, key.batch)]
        if alike:
            # classes are powers of two, so bits tell how far apart they are
            return self._means[min(alike, key=lambda k: abs(k.depth.bit_length() - key.depth.bit_length()))]
        return self._seeds.get((key.block, key.cc, key.batch))

    def means(self) -> dict[BlockKey, BlockSeconds]:
        return dict(self._means)
