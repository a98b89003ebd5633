"""Reports of the plugin in a stock program: a JSON file that it replaces atomically (native/split/report.h)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ggml_bridge.emulated import EmulatedStats
from ggml_bridge.split import MeasuredBlockTimes, SliceInfo, SplitMemory, SplitStats
from oallama.core.codec import Count, Size, from_json, parse_json
from oallama.core.history import BlockRuns
from oallama.core.routing import ExpertCounts, LayerCounts
from oallama.core.types import Operator
from oallama.device.emulated_link import Punctuality

REPORT_FILES = "report-%p.json"
"""File name of the reports; %p is the process id, as several processes may have the same variables."""

POLL_S = 0.002  # between looks at a file that is about to be written

Counted = TypeVar("Counted", MeasuredBlockTimes, "TensorExpertCounts")


@dataclass(frozen=True, slots=True)
class TensorExpertCounts:
    """Expert uses of a tensor, in batches of one token or of several: by expert; by rank, the expert with the highest
    recent (decayed) count first; and by reuse distance in tokens."""

    name: str
    batches: Literal["single", "several"]
    n_tokens: Size
    uses: tuple[Count, ...]
    ranks: tuple[Count, ...]
    gaps: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A report: counts since the program loaded the plugin, and memory held at the time of the report.

    request: number of the last answered request for a report. usable: whether the loaded weights can compute; problems:
    in sentences, deviations from the plan. single: stats of batches of one token. emulated: None without an emulated
    device.
    """

    pid: int
    request: int
    usable: bool
    problems: tuple[str, ...]
    slices: tuple[SliceInfo, ...]
    memory: SplitMemory
    stats: SplitStats
    single: SplitStats
    blocks: tuple[MeasuredBlockTimes, ...]
    experts: tuple[TensorExpertCounts, ...]
    emulated: EmulatedStats | None

    def expert_counts(self, operators: Sequence[Operator], n_expert: int) -> ExpertCounts:
        """Expert counts by layer, from the layer's first counted operator."""
        counted = {uses.name for uses in self.experts}
        first: dict[int, str] = {}
        for operator in operators:
            if operator.layer is not None and operator.name in counted:
                first.setdefault(operator.layer, operator.name)
        layers = {name: layer for layer, name in first.items()}
        counts_by_layer: dict[str, dict[int, LayerCounts]] = {"single": {}, "several": {}}
        for uses in self.experts:
            if uses.name in layers and len(uses.uses) == n_expert:
                layer_counts = LayerCounts(uses.n_tokens, uses.uses, uses.ranks, uses.gaps)
                counts_by_layer[uses.batches][layers[uses.name]] = layer_counts
        return ExpertCounts(counts_by_layer["single"], counts_by_layer["several"])

    def since(self, earlier: PluginReport) -> PluginReport:
        """The report with counts since `earlier`, a report of the same process; the emulated device's counts stay."""
        blocks = {(block.name, block.batch): block for block in earlier.blocks}
        experts = {(uses.name, uses.batches): uses for uses in earlier.experts}
        later_blocks = (_since(block, blocks.get((block.name, block.batch))) for block in self.blocks)
        later_experts = (_since(uses, experts.get((uses.name, uses.batches))) for uses in self.experts)
        return replace(
            self,
            stats=self.stats - earlier.stats,
            single=self.single - earlier.single,
            blocks=tuple(block for block in later_blocks if block.n_runs),
            experts=tuple(uses for uses in later_experts if uses.n_tokens),
        )


def _since(later: Counted, earlier: Counted | None) -> Counted:
    """Counts since an earlier record of the same block, or of the same tensor and kind of batches."""
    if earlier is None:
        return later
    counts = {field.name for field in fields(later)} - {"name", "batch", "batches"}
    return replace(later, **{name: _difference(getattr(later, name), getattr(earlier, name)) for name in counts})


def _difference(later: Any, earlier: Any) -> Any:
    """Return `later` minus `earlier`: two numbers, or tuples of them."""
    if isinstance(later, tuple):
        return tuple(n - m for n, m in zip(later, earlier, strict=True))
    return later - earlier


def read_report(path: Path) -> PluginReport | None:
    """Read a report. Returns None while it is missing or unreadable."""
    try:
        document = parse_json(path.read_text(encoding="utf-8", errors="replace"))
        if document.get("oallama_report") != 1:
            return None
        return from_json(PluginReport, document, path.name)
    except (OSError, ValueError, AttributeError):
        return None


def reports_in(folder: Path) -> Iterator[PluginReport]:
    """Yield the reports of all processes that had REPORT_FILES in this folder."""
    for path in sorted(folder.glob(REPORT_FILES.replace("%p", "*"))):
        if (report := read_report(path)) is not None:
            yield report


def ask_report(folder: Path, pid: int, timeout_s: float) -> PluginReport | None:
    """Make a process write its report now; None if it does not in time, or has no plugin."""
    path = folder / REPORT_FILES.replace("%p", str(pid))
    number = time.monotonic_ns()
    try:
        pipe = os.open(f"{path}.ask", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody listens
        return None
    try:
        os.write(pipe, f"{number}\n".encode())
    except OSError:
        return None
    finally:
        os.close(pipe)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        report = read_report(path)
        if report is not None and report.request >= number:
            return report
        time.sleep(POLL_S)
    return None


def runs_of(blocks: Iterable[MeasuredBlockTimes]) -> list[BlockRuns]:
    """Times of split blocks, added up over processes."""
    runs: dict[tuple[str, int], BlockRuns] = {}
    for block in blocks:
        total = runs.get((block.name, block.batch), BlockRuns(block.name, block.batch, 0, 0, 0.0, 0.0, 0.0))
        runs[block.name, block.batch] = BlockRuns(
            block.name,
            block.batch,
            total.n_runs + block.n_runs,
            total.n_tokens + block.n_tokens,
            total.cpu_s + block.host_s,
            total.wait_s + block.wait_s,
            total.other_s + block.launch_s + block.join_s,
        )
    return list(runs.values())


def punctuality(earlier: PluginReport, later: PluginReport, elapsed_s: float) -> Punctuality | None:
    """How well the emulated device kept time between two reports; None without one."""
    if earlier.emulated is None or later.emulated is None:
        return None
    passed = {
        field.name: getattr(later.emulated, field.name) - getattr(earlier.emulated, field.name)
        for field in fields(EmulatedStats)
    }
    return Punctuality(elapsed_s, passed)
