"""The records of measured times of the split back end, and of the predicted times. Frozen; times are float seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from oallama.core.codec import Line, Mark, NotNegative, Positive, Size


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Runs of one block at one class of batch sizes; total times of all runs, on the thread that computes CC."""

    block: str  # its first weight
    batch: int  # tokens at most: a power of two, half of which is less than any run had
    n_runs: int
    n_tokens: int
    cpu_s: float  # computing CC
    wait_s: float  # for the device after that
    other_s: float  # sending, asking for copies, joining


@dataclass(frozen=True, slots=True)
class SeenPasses:
    """Passes through the blocks of a model at one class of batch sizes: measured mean and predicted times of a pass."""

    batch: Size
    n_passes: Size  # that the means weigh
    cpu_s: NotNegative
    wait_s: NotNegative
    other_s: NotNegative
    predicted_cpu_s: NotNegative
    predicted_device_s: NotNegative  # of the pass where the CPU computes nothing, with what lies between blocks
    predicted_between_s: NotNegative  # of these, what lies between blocks
    copies_last: bool  # predicted: weights are copied for longer than the device computes

    @property
    def total_s(self) -> float:
        return self.cpu_s + self.wait_s + self.other_s


@dataclass(frozen=True, slots=True)
class Rates:
    """Factors on measured times."""

    cpu: Positive = 1.0
    device: Positive = 1.0


@dataclass(frozen=True, slots=True)
class History:
    """Statistics of a model's runs on a machine. The rates correct the measured profile; `seen` are passes since the
    correction, with predictions by the corrected profile."""

    version: int
    model_fingerprint: Line
    profile: Line  # digest of what was measured
    decode: Rates = Rates()
    prompt: Rates = Rates()
    link: Positive = 1.0
    seen: Annotated[tuple[SeenPasses, ...], Mark.REQUIRED] = ()  # by batch, ascending

    @property
    def changes_nothing(self) -> bool:
        """Whether a profile needs no correction."""
        return self.decode == self.prompt == Rates() and self.link == 1.0
