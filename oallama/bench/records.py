"""The records of a comparison: its tests, how each arm is loaded, its read-back, and its samples.

Frozen; bytes are int, times are float seconds. What goes to or comes from an arm's process is JSON (core/codec.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oallama.core.types import Draft, Operator
from oallama.device.emulated_link import Punctuality
from oallama.device.load_params import LoadSettings
from oallama.plan.plan import Plan
from oallama.run.stock import Cap, StockPlacement


@dataclass(frozen=True, slots=True)
class BenchTest:
    """A test as in llama-bench: n_prompt tokens at once, then n_gen one by one, behind n_depth tokens in the cache."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def label(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128`, `tg128 @ d4096`, as llama-bench writes it."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Number of timed tokens."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a test: seconds of the prompt (0 without one) and of all generated tokens; for a test that is too
    short, medians of n_runs runs in that turn.

    late_share, n_overruns: how well an emulated device kept time meanwhile; None for other devices.
    """

    prompt_s: float
    gen_s: float
    n_runs: int = 1
    late_share: float | None = None  # of the time that passed
    n_overruns: int | None = None  # copies and graphs that really took longer than the device's time for them
    fault: str = ""  # why this is not a valid time of the emulated device
    accepted_share: float | None = None  # of the drafts; None: there were none

    @property
    def seconds(self) -> float:
        return self.prompt_s + self.gen_s

    def beside(self, kept: Punctuality | None) -> Sample:
        """The sample with the record of how an emulated device kept time."""
        if kept is None:
            return self
        return replace(self, late_share=kept.late_share, n_overruns=kept.stats["n_overruns"], fault=kept.fault)


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all arms share. load: without a placement; flash attention "auto" is chosen by each arm (stock:
    by llama.cpp; ours: by the plan)."""

    load: LoadSettings
    cap: Cap = Cap()  # noqa: RUF009 - frozen
    of_text: bool = False  # tokens of a text, if the model has a vocabulary; else random

    def changed(self, **changes: Any) -> Setting:
        """Replace fields of LoadSettings: device, batch, KV cache, …."""
        return replace(self, load=replace(self.load, **changes))


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm: options of stock llama.cpp (`stock`) or a plan of ours (`plan`). For the reader: search: how it was
    found, in steps {flag, value, seconds or note}; tuning: the result behind it, as JSON."""

    name: str
    setting: Setting
    stock: StockPlacement | None = None
    plan: Plan | None = None
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the plan, by a test's label
    search: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    tuning: Mapping[str, Any] | None = None
    draft: Draft | None = None  # how drafts are made; of a plan, its own


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The read-back of an arm's process after the load. Bytes are those that llama.cpp holds.

    shares: operator -> share of its weight on the device, as seen in a real decode. buffers: bytes of weights, KV and
    compute in each kind of memory, to tell configurations apart.
    """

    device: str  # ggml's name, of several between commas, "none" without one
    device_bytes: int
    host_bytes: int
    shares: Mapping[str, float]
    layouts: Mapping[str, str]  # operator that is not whole on the device -> buffer type that holds it
    buffers: Mapping[str, tuple[int, int, int]]
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool  # whether attention really runs as FLASH_ATTN_EXT
    plugins: tuple[str, ...]  # backends in ggml's registry that stock llama.cpp does not have
    facts: Mapping[str, Any]  # llama-bench's fields that only the process knows
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """One palindrome A B C C B A of a test: for every arm its two samples, in time order.

    drift: how much the machine's speed changed meanwhile (stats.round_drift). replaced: for every arm the samples with
    a fault that were measured again.
    """

    samples: tuple[tuple[Sample, ...], ...]
    drift: float
    replaced: tuple[tuple[Sample, ...], ...] = ()

    @property
    def fault(self) -> str:
        """Why its samples must not be compared; "" if they are valid."""
        return next((sample.fault for pair in self.samples for sample in pair if sample.fault), "")


@dataclass(frozen=True, slots=True)
class Series:
    """All rounds of one test; `kept` are compared, `discarded` are not."""

    test: BenchTest
    kept: tuple[Round, ...] = ()
    discarded: tuple[Round, ...] = ()

    def samples(self, arm: int) -> list[Sample]:
        """The kept samples of an arm, in time order; those at one position of all arms belong together."""
        return [sample for round_ in self.kept for sample in round_.samples[arm]]

    def unused(self, arm: int) -> list[Sample]:
        """All others of an arm: of discarded rounds, and those with a fault that were replaced."""
        rounds = (*self.discarded, *self.kept)
        discarded = [sample for round_ in self.discarded for sample in round_.samples[arm]]
        return discarded + [sample for round_ in rounds if round_.replaced for sample in round_.replaced[arm]]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm after the measurement. problems: how it differs from its specification; empty if valid."""

    spec: ArmSpec
    report: LoadReport
    problems: tuple[str, ...] = ()
    same_as: str | None = None  # an earlier arm that turned out to be the same configuration
    idle_cpu_share: float = 0.0  # CPUs' worth of time that it used while others were measured


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole comparison. `warnings` are sentences; `interrupted`: by Ctrl-C, after these complete rounds."""

    operators: tuple[Operator, ...]
    arms: tuple[ArmResult, ...]
    series: tuple[Series, ...]
    started: str  # RFC 3339, UTC
    resident: bool  # every arm stayed loaded; False: models were loaded anew for each turn
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
