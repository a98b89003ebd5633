"""The split back end: a ggml backend in libggml-oallama that computes a mul-mat, or a whole FFN, on the CPU and on
another device at the same time. A plan says which slice of which weight lies where (native/split/ggml-oallama.h).

The library is loaded when it is first asked for and registers itself with ggml: every llama_context made later in this
process knows it, and gives it the operators whose weights are in its buffer type. There is no way to unload it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import Native, declared, decode, encode, record

Axis = Literal["rows", "cols", "halves"]

_AXES: tuple[Axis, ...] = ("rows", "cols", "halves")  # in the order of enum oallama_axis
_TEXT_BYTES = 1 << 20

_ffi: Any = declared("split/ggml-oallama.h")


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """One weight of a plan: elements along its axis, as loaded where `loaded`, else as planned; bytes as loaded."""

    name: str
    axis: Axis
    loaded: bool
    cc: int
    cg: int
    gg: int
    host_bytes: int
    device_bytes: int
    layout: str  # host buffer type of CC
    n_hot: int = 0  # experts that the device has whole as well


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """Bytes, tensors and prepared sub-graphs that all models and contexts of the process hold now."""

    host_weights: int
    device_weights: int
    host_compute: int
    device_compute: int
    n_weights: int
    n_programs: int


@dataclass(frozen=True, slots=True)
class SplitStats:
    """Counts of all contexts of the process since the backend was loaded or reset. Seconds and bytes."""

    n_graphs: int = 0  # sub-graphs that llama.cpp gave it
    n_segments: int = 0  # launch, compute, join: one for an FFN, more where a result is needed in between
    n_built: int = 0  # prepared anew rather than found
    launch_s: float = 0.0  # sending inputs and starting the device
    host_s: float = 0.0  # computing CC
    wait_s: float = 0.0  # waiting for the device after CC was done
    join_s: float = 0.0  # adding and interleaving results
    total_s: float = 0.0  # inside the backend
    bytes_in: int = 0  # copied to the device
    bytes_out: int = 0  # copied back
    bytes_streamed: int = 0  # of CG
    n_uses: int = 0  # of experts of which some are hot, by tokens
    n_hits: int = 0  # of these, by experts that were on the device when the batch began
    n_fetched: int = 0  # missed experts that the device was sent for the batch that needs them
    n_exchanged: int = 0  # that it was sent while the link had nothing else to do
    bytes_exchanged: int = 0  # of both

    def __sub__(self, before: SplitStats) -> SplitStats:
        """Return the counts since `before`."""
        return SplitStats(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(SplitStats)})


@dataclass(frozen=True, slots=True)
class MeasuredBlockTimes:
    """Times of all runs of one sub-graph with batches of one class: seconds of the caller's thread."""

    name: str  # its first weight
    batch: int  # tokens at most: a power of two, and half of it is less than any run had
    n_runs: int
    n_tokens: int  # of all runs together
    launch_s: float  # sending inputs and starting the device
    host_s: float  # computing CC
    wait_s: float  # for the device after CC was done
    join_s: float  # adding and interleaving results


class SplitBackend:
    """The split back end of this process. Get it from `Bridge.split`."""

    def __init__(self, path: Path) -> None:
        """Loads libggml-oallama and registers its devices with ggml, whose symbols must be global already.

        Raises VersionMismatch if the loaded ggml is not the one it was written for, BridgeError.
        """
        self.path = path
        self._native = Native(path, _ffi, "oallama")
        self._native.call("oallama_check")
        self._native.call("oallama_register")

    def plan(self, text: str) -> SplitPlan:
        """Read a plan from its text. Raises ValueError naming the line that is wrong, or the device that is not there;
        Unsupported for what this version cannot do."""
        return SplitPlan(self._native, text)

    def memory(self) -> SplitMemory:
        """Return what is held now."""
        return record(SplitMemory, self._native.value("oallama_memory", "oallama_get_memory"))

    def device_compute(self, device: str) -> int:
        """Return what of `device_compute` is on one device, by ggml's name. Raises ValueError for one that is not
        there."""
        return int(self._native.value("int64_t", "oallama_get_device_compute", encode(device)))

    def stats(self) -> SplitStats:
        """Return counts since the last reset. Two threads that compute at once are counted together."""
        return record(SplitStats, self._native.value("oallama_stats", "oallama_get_stats"))

    def reset_stats(self) -> None:
        self._native.call("oallama_reset_stats")


class SplitPlan:
    """A plan in use: a buffer type for the weights it names. Keep it open until the model is loaded; what a model needs
    of it stays with the model."""

    def __init__(self, native: Native, text: str) -> None:
        self._native = native
        self._handle = native.value("oallama_plan *", "oallama_plan_new", encode(text))

    def __enter__(self) -> SplitPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the plan; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.lib.oallama_plan_free(handle)

    @property
    def buft(self) -> int:
        """The plan's ggml_backend_buffer_type_t, for tensor_buft_overrides."""
        return self._native.pointer("oallama_plan_buft", self._open())

    def slices(self) -> list[SliceInfo]:
        """The weights in the order of the plan's text; where a model is loaded, as they came to lie."""
        plan, value = self._open(), self._native.value
        slices = [
            value("oallama_slice", "oallama_plan_slice", plan, i)
            for i in range(value("int64_t", "oallama_plan_count", plan))
        ]
        return [replace(record(SliceInfo, slice), axis=_AXES[slice.axis]) for slice in slices]

    def problems(self) -> tuple[bool, list[str]]:
        """(whether what was loaded can compute, sentences on what did not come to lie as planned)."""
        usable, text = _ffi.new("int32_t *"), _ffi.new("char[]", _TEXT_BYTES)
        self._native.call("oallama_plan_problems", self._open(), usable, text, _TEXT_BYTES)
        return bool(usable[0]), [line for line in decode(text).split("\n") if line]

    def _open(self) -> Any:
        if self._handle is None:
            raise BridgeError("this plan is closed")
        return self._handle
