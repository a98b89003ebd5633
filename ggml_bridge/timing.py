"""Timers over native loops. A timer owns native memory: use it as a context manager, or close it.

Every `run(n)` returns n raw samples in seconds; what one sample means is said at each method of `Bridge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ggml_bridge.ffi import TEXT_BYTES, Native, decode, encode, ffi

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TimerType = TypeVar("TimerType", bound="Timer")

WORKING_SET_BYTES = 256 << 20
"""Default set of weights a timer rotates through: beyond the last-level cache of common machines."""
WHOLE = 1 << 31  # bytes of the largest piece of a copy

_TILE, _SRC1, _IDS, _DST = 0, 1, 2, 3  # gb_mul_mat_part


class Timer:
    """Something that can be timed again and again. Not for several threads at once."""

    def __init__(self, native: Native, constructor: str, *arguments: Any) -> None:
        """Calls the gb_…_new function of that name. Raises ValueError, Unsupported, OutOfMemory or BridgeError."""
        self._native = native
        self._handle: Any = ffi.gc(native.value("gb_timer *", constructor, *arguments), native.lib.gb_timer_free)

    def run(self, n: int = 1) -> list[float]:
        """n samples in seconds."""
        samples = ffi.new("double[]", max(n, 1))
        self._native.call("gb_timer_run", self.handle, n, samples)
        return list(ffi.unpack(samples, n)) if n else []

    def close(self) -> None:
        """Frees everything native; may be called twice."""
        if self._handle is not None:
            ffi.release(self._handle)
            self._handle = None

    @property
    def handle(self) -> Any:
        """The native `gb_timer *`; raises ValueError after close."""
        if self._handle is None:
            raise ValueError("this timer is closed")
        return self._handle

    def __enter__(self: TimerType) -> TimerType:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transfer(Timer):
    """Copies between host memory and a device; the two halves of a copy can be called by themselves."""

    def begin(self) -> float:
        """Queue a copy; seconds until the call has returned."""
        return float(self._native.value("double", "gb_transfer_begin", self.handle))

    def finish(self) -> float:
        """Wait for what was begun; seconds."""
        return float(self._native.value("double", "gb_transfer_finish", self.handle))


class BoundaryTimer(Timer):
    """A graph that a scheduler runs over [device, CPU]; one sample: seconds of the whole graph.

    n_splits: parts the scheduler cut it into: 1 + 2 * n_excursions, or 1 where all is on the CPU.
    """

    def __init__(
        self, native: Native, device: str, n_bytes: int, n_excursions: int, on_cpu: bool, n_threads: int
    ) -> None:
        n_splits = ffi.new("int64_t *")
        case = (encode(device), n_bytes, n_excursions, int(on_cpu), n_threads)
        super().__init__(native, "gb_boundary_new", *case, n_splits)
        self.n_splits: int = n_splits[0]


class LayerRestTimer(Timer):
    """A Llama block without its weight mul-mats; one sample: seconds per layer.

    ops: names of the graph's operations in order, all layers, views left out.
    """

    def __init__(self, native: Native, device: str, **fields: int) -> None:
        """`fields` are those of gb_layer_rest_params but the device."""
        name = ffi.new("char[]", encode(device))
        params = ffi.new("gb_layer_rest_params *", {"device": name, **fields})
        ops = ffi.new("char[]", TEXT_BYTES)
        super().__init__(native, "gb_layer_rest_new", params, ops, TEXT_BYTES)
        self.ops = decode(ops).split("\n")


@dataclass(frozen=True, slots=True)
class ConcurrentRates:
    """Bytes per second of two kinds of work, weights multiplied or bytes copied, each alone and both at once."""

    first_alone: float
    second_alone: float
    first_with_second: float
    second_with_first: float


@dataclass(frozen=True, slots=True)
class MulMatCase:
    """A mul-mat to time, as `Bridge.mul_mat` takes it."""

    device: str
    layout: str | None
    type: str
    K: int
    N: int
    E: int = 1
    n_expert_used: int = 0
    n_tokens: int = 1
    working_set_bytes: int = WORKING_SET_BYTES
    n_threads: int = 1
    input_f32: bool = False

    def params(self, type_number: int) -> tuple[Any, list[Any]]:
        """`gb_mul_mat_params *`, and the strings that it points to, which must live as long. type_number: ggml_type."""
        device = ffi.new("char[]", encode(self.device))
        layout = ffi.NULL if self.layout is None else ffi.new("char[]", encode(self.layout))
        shape = (self.K, self.N, self.E, self.n_expert_used, self.n_tokens)
        values = (device, layout, type_number, *shape, self.working_set_bytes, self.n_threads, int(self.input_f32))
        return ffi.new("gb_mul_mat_params *", values), [device, layout]


class MulMatTimer(Timer):
    """A mul-mat of weight [K, N, E] over a rotating set of weights; one sample: seconds of a single mul-mat.

    info: gb_mul_mat_info.
    """

    def __init__(self, native: Native, case: MulMatCase, type_number: int) -> None:
        params, _strings = case.params(type_number)
        self.case, self.info = case, ffi.new("gb_mul_mat_info *")
        super().__init__(native, "gb_mul_mat_new", params, self.info)

    def check(self) -> float:
        """Normalised mean squared error of the kernel's result against the product computed by numpy in F32 from the
        dequantised weight (error of quantising the activations included)."""
        import numpy as np

        self.run(1)
        k, n, e, n_tokens = self.case.K, self.case.N, self.case.E, self.case.n_tokens
        used = self.case.n_expert_used if e > 1 else 0
        tile = self._read(_TILE, (self.info.tile_rows, k), "float32")
        # row r of the weight [K, N * E] is row r % tile_rows of the tile
        rows = np.arange(n * e).reshape(e, n) % self.info.tile_rows
        if used:
            src1 = self._read(_SRC1, (n_tokens, used, k), "float32")
            ids = self._read(_IDS, (n_tokens, used), "int32")
            result = self._read(_DST, (n_tokens, used, n), "float32")
            products = src1.astype(np.float64) @ tile.T.astype(np.float64)
            expected = np.take_along_axis(products, rows[ids], axis=2)
        else:
            src1 = self._read(_SRC1, (e, n_tokens, k), "float32")
            result = self._read(_DST, (e, n_tokens, n), "float32")
            products = src1.astype(np.float64) @ tile.T.astype(np.float64)
            expected = np.stack([products[i][:, rows[i]] for i in range(e)])
        return float(np.sum((result - expected) ** 2) / np.sum(expected**2))

    def _read(self, part: int, shape: tuple[int, ...], dtype: str) -> npt.NDArray[np.float32 | np.int32]:
        import numpy as np

        array: npt.NDArray[Any] = np.empty(shape, dtype)
        data = ffi.from_buffer(array, require_writable=True)
        self._native.call("gb_mul_mat_read", self.handle, part, data, array.nbytes)
        return array
