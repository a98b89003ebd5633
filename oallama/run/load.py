"""Loading a model for an engine: layouts checked, progress shown, refusals told in one sentence; what it then holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.core.errors import DeviceError
from oallama.core.types import PLAIN_LAYOUT, MemoryLedger, ModelInfo, Operator, OperatorPlacement, Shape
from oallama.core.units import MIB, format_bytes
from oallama.cost.blocks import takes_n_g
from oallama.device.guard import Runner
from oallama.device.load_params import LoadSettings, ModelParams, load_bridge
from oallama.device.native_log import native_log
from oallama.device.opening import NO_DEVICE, OpenDevice, device_pointer
from oallama.model.cut import cut_axis
from oallama.model.gguf_file import check_unchanged
from oallama.model.memory import BufferBytes, load_refusal
from oallama.plan.patterns import is_split
from oallama.plan.split import slice_counts
from oallama.run.setup import Held
from oallama.run.split import LoadedSplit

if TYPE_CHECKING:
    from ggml_bridge import Bridge
    from ggml_bridge.routing import RoutingRecorder
    from oallama.run.placed_llama import PlacedLlama

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.01, MIB  # planned and actual bytes may differ by the larger of the two


def usable_layouts(
    operators: Sequence[Operator],
    placements: Sequence[OperatorPlacement],
    bridge: Bridge,
    streams_tokens: bool,
    kept_twice: bool,
) -> tuple[tuple[OperatorPlacement, ...], tuple[str, ...]]:
    """A plan's placements with layouts that this CPU has and can multiply with, and a warning for each layout dropped.
    streams_tokens: whether CC is streamed for n_g, kept_twice: from a second copy.

    Where the plan insists on plain memory for some operator, llama.cpp must be kept from repacking (load_params.py);
    then the operators left to its choice get the layout it would have chosen by name. So do the split ones, whose
    layout is not for llama.cpp to choose; those that are streamed for n_g and kept once stay plain, which is all that
    a device can read.
    """
    by_name = {operator.name: operator for operator in operators}
    layouts = bridge.cpu_layouts()
    split = {p.name for p in placements if is_split(by_name[p.name], p, streams_tokens)}
    plain_wanted = any(placement.layout == PLAIN_LAYOUT and placement.name not in split for placement in placements)
    read_by_device = streams_tokens and not kept_twice
    checked: list[OperatorPlacement] = []
    dropped: dict[str, list[str]] = {}  # layout -> operators
    for placement in placements:
        operator, layout = by_name[placement.name], placement.layout
        shape = host_shape(operator, placement)
        if layout is not None and not (layout in layouts and _supports(bridge, layout, operator, shape)):
            dropped.setdefault(layout, []).append(operator.name)
            layout = None
        if layout is None and operator.name in split and takes_n_g(operator) and read_by_device:
            layout = PLAIN_LAYOUT
        elif layout is None and (plain_wanted or operator.name in split):
            layout = next((name for name in layouts if _supports(bridge, name, operator, shape)), PLAIN_LAYOUT)
        checked.append(replace(placement, layout=layout))
    warnings = (
        f"this CPU cannot keep {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} in layout {layout}; "
        "another one is chosen"
        for layout, names in dropped.items()
    )
    return tuple(checked), tuple(warnings)


def host_shape(operator: Operator, placement: OperatorPlacement) -> Shape:
    """[K, N, E] of what the CPU multiplies by: the whole weight, or the CC slice of a split one."""
    if not 0 < placement.cc < 1:
        return operator.shape
    k, n, e = operator.shape
    cc, axis = slice_counts(operator, placement)[0], cut_axis(operator)
    return (cc, n, e) if axis == "cols" else (k, cc if axis == "rows" else 2 * cc, e)


def _supports(bridge: Bridge, layout: str, operator: Operator, shape: Shape) -> bool:
    import ggml_bridge

    k, n, e = shape
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    try:
        return bridge.layout_supports(layout, operator.type, k, n, e, used)
    except (ggml_bridge.Unsupported, ValueError):
        return False


class LoadProgress:
    """llama.cpp's progress callback: a bar on stderr where that is a terminal, and the way to stop a load.

    `callback` goes into llama_model_params. After a load that an error of the bar stopped `raise_error` raises that.
    """

    def __init__(self, name: str, n_bytes: int, show: bool) -> None:
        from llama_cpp import llama_cpp as api

        self._cancelled = False
        self._error: Exception | None = None
        self._bar: Any = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=n_bytes, desc=f"load {name}", unit="B", unit_scale=True, leave=False, delay=0.3)
        self.callback = api.llama_progress_callback(self._on_progress)

    def cancel(self) -> None:
        """Ask the load to stop at its next step."""
        self._cancelled = True

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _on_progress(self, share: float, user_data: Any) -> bool:
        try:
            if self._bar is not None:
                self._bar.update(int(share * self._bar.total) - self._bar.n)
            return not self._cancelled
        except Exception as error:  # it cannot cross the C caller
            self._error = error
            return False


def load_llama(
    model: ModelInfo,
    settings: LoadSettings,
    device: OpenDevice,
    runner: Runner,
    split: LoadedSplit | None,
    show_progress: bool,
    loaded: list[Held],
    recorder: RoutingRecorder | None = None,
) -> PlacedLlama:
    """Load as the settings say, on the runner; split: where the split operators go. loaded: gets the model as soon as
    it is there, so that the caller frees it where this is interrupted. recorder: of its routers.

    Raises ModelFileError where a file changed since it was checked, ModelFileError, DeviceError where llama.cpp or the
    split backend refuses, BridgeError, KeyboardInterrupt.
    """
    from oallama.run.placed_llama import PlacedLlama

    check_unchanged(model.files)
    bridge = load_bridge()
    shows = contextlib.closing(LoadProgress(Path(model.path).name, model.file_bytes, show_progress))
    with native_log(hold_interrupt=False) as log, shows as shown:

        def load() -> PlacedLlama:
            placement = ModelParams(settings, device_pointer(device.name), bridge, split.buft if split else 0)
            llama = PlacedLlama.load(settings, placement, settings.n_threads, shown.callback, recorder)
            loaded.append(llama)
            return llama

        try:
            llama = runner.call(load, shown.cancel)
        except ValueError as error:
            shown.raise_error()
            if split is not None and (failure := split.failure()):
                raise DeviceError(f"the model cannot be loaded as planned: {failure}") from None
            raise load_refusal(settings.path, device, log.reason() or str(error)) from None
    if device.spec.is_remote:
        llama.guard(runner)
    return llama


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes. Host memory that maps the model file counts with the mapped range."""

    buffers: tuple[BufferBytes, ...]
    device_bytes: int
    host_bytes: int
    planned_device_bytes: int
    warning: str  # "" where device_bytes is as planned


def compare_memory(buffers: tuple[BufferBytes, ...], device: str, ledger: MemoryLedger) -> EngineMemory:
    """The live buffers against the plan's ledger, on the device (on the host, mapped files count differently). The
    staging of plans that were made before it was counted exactly is an upper bound, so there may be less of it."""
    device_bytes = sum(b.model + b.context + b.compute for b in buffers if not b.in_host_memory)
    host_bytes = sum(b.model + b.context + b.compute for b in buffers if b.in_host_memory)
    planned = 0 if device == NO_DEVICE else ledger.weights_gpu + ledger.kv + ledger.compute + ledger.staging
    warning = ""
    tolerance = max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    if not planned - ledger.staging - tolerance <= device_bytes <= planned + tolerance:
        warning = (
            f"{device} holds {format_bytes(device_bytes)} but the plan says {format_bytes(planned)}; "
            "plan again with the options of this run"
        )
    return EngineMemory(buffers, device_bytes, host_bytes, planned, warning)


def spill_warning(device_bytes: int, device: OpenDevice) -> str:
    """A sentence where a card holds more than it had free before the load; else empty. The load has succeeded, so the
    driver keeps the rest in host memory without saying so. Less than that, which other programs' memory may cause
    later, does not show from here. Devices whose memory is the host's anyway have nothing to spill."""
    info = device.info
    if info is None or info.type != "GPU" or device.spec.is_remote or device.spec.is_emulated:
        return ""
    over = device_bytes - info.memory_free
    if info.memory_free <= 0 or over <= max(TOLERANCE_SHARE * device_bytes, TOLERANCE_BYTES):
        return ""
    return (
        f"{device.name} was given {format_bytes(device_bytes)} but had {format_bytes(info.memory_free)} free: its "
        f"driver keeps {format_bytes(over)} in host memory, which is many times slower; lower --vram, -ngl or -c"
    )
