"""Memory of placements, by llama.cpp's no_alloc loads; each is done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from oallama.core.errors import DoesNotFit
from oallama.core.types import PLAIN_LAYOUT, Attention, ModelInfo, Operator, Workload
from oallama.device.host_memory import host_memory_bytes
from oallama.device.layouts import any_in_doubt
from oallama.device.load_params import LoadSettings
from oallama.device.spec import DeviceSpec
from oallama.model.memory import PARTS, NoAllocLoader, NoAllocResult, no_alloc_memory
from oallama.plan.patterns import Pattern
from oallama.planner.placement import Placement, n_gpu_layers, operator_rows, operators_on_cpu
from oallama.planner.problem import LoadBytes
from oallama.run.weight_places import weight_places


class _OfThread(threading.local):
    """A process gives its answers in order, so two threads cannot share it."""

    no_alloc_loader: NoAllocLoader | None = None


class NoAllocLoads:
    """no_alloc loads of one model on one device. Threads may share it."""

    def __init__(
        self,
        model: ModelInfo,
        operators: Sequence[Operator],
        tensor_names: Sequence[str],
        device: DeviceSpec,
        n_threads: Callable[[], int],
        no_alloc_loader: NoAllocLoader | None = None,
    ) -> None:
        """n_threads: called when a load needs it. no_alloc_loader: a process that makes this thread's loads; None: a
        new process for each, or for those made `together`."""
        self._model, self._operators, self._tensor_names = model, tuple(operators), tuple(tensor_names)
        self._device, self._n_threads = device, n_threads
        self._of_thread = _OfThread()
        self._of_thread.no_alloc_loader = no_alloc_loader
        self._results: dict[LoadSettings, NoAllocResult] = {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block, this thread's loads share a process."""
        if self._of_thread.no_alloc_loader is not None:
            yield
            return
        with NoAllocLoader(at_once=not self._results) as self._of_thread.no_alloc_loader:
            try:
                yield
            finally:
                self._of_thread.no_alloc_loader = None

    def settings(self, workload: Workload, placement: Placement, attention: Attention) -> LoadSettings:
        """Load settings of a placement."""
        uses_device = placement.uses_device(self._model.n_layer)
        patterns: tuple[Pattern, ...] = ()
        split: tuple[str, ...] = ()
        if uses_device or self._in_doubt:
            rows, first = operator_rows(self._operators, placement), placement.first_device_layer
            places = weight_places(self._operators, rows, self._tensor_names, first, placement.split_settings)
            patterns, split = places.patterns if uses_device else places.named, places.split_texts
        return LoadSettings(
            path=self._model.path,
            device=str(self._device) if uses_device else "none",
            n_ctx=workload.n_ctx,
            n_ubatch=workload.n_ubatch,
            n_gpu_layers=n_gpu_layers(self._model.n_layer, placement),
            host_patterns=patterns,
            split_texts=split,
            n_threads=self._n_threads(),
            attention=attention,
            stock=placement.stock,
            device_layers=placement.device_layers,
        ).of(workload)

    def taken(self, workload: Workload, placement: Placement, attention: Attention) -> LoadBytes:
        """Bytes of a placement, its split operators counted with the host. Raises what no_alloc_memory raises."""
        result = self._loaded(workload, placement, attention)
        return LoadBytes(
            weights_gpu=result.on_device("model"),
            weights_host=result.on_host("model"),
            kv=result.on_device("context") - placement.cache_bytes,
            compute=result.on_device("compute"),
            device_free=result.device_free,
            devices=tuple(
                LoadBytes(result.on_device("model", name), 0, result.on_device("context", name),
                          result.on_device("compute", name), free)
                for name, free in result.free_of.items()
            ),
        )  # fmt: skip

    def sides(self, workload: Workload, placement: Placement, attention: Attention) -> tuple[int, int]:
        """Bytes of all that a placement keeps on the host, and on the device. Raises what no_alloc_memory raises."""
        result = self._loaded(workload, placement, attention)
        return sum(map(result.on_host, PARTS)), sum(map(result.on_device, PARTS))

    def check_host(self, workload: Workload, placement: Placement, attention: Attention) -> None:
        """Raises DoesNotFit if each token would read more weights than host memory holds, so that a mapped file's pages
        come from disk every time. Of mapped experts only those that a token uses count. Does nothing before the load
        was made."""
        settings = self.settings(workload, placement, attention)
        taken = self._results.get(settings)
        if taken is None:
            return
        mapped = 0
        if not settings.split_texts:
            mapped = sum(b.model for b in taken.buffers if b.in_host_memory and b.buft == PLAIN_LAYOUT)
        allocated = sum(map(taken.on_host, PARTS)) - mapped
        idle = sum(round((1 - operator.active_fraction) * operator.bytes) for operator in self._operators)
        needed, host_bytes = allocated + max(mapped - idle, 0), host_memory_bytes()
        if needed > host_bytes:
            remedy = (
                "use a smaller or more quantized model, a shorter context (-c), or put more of it on a device "
                "(--device, --vram)"
            )
            raise DoesNotFit(needed, host_bytes, "the host", remedy=remedy)

    def begin_on_host(self, workload: Workload, attention: Attention) -> None:
        """Start the load for on_host in the background, if there is a process for it."""
        settings = self.settings(workload, self._nothing, attention)
        no_alloc_loader = self._of_thread.no_alloc_loader
        if no_alloc_loader is not None and settings not in self._results:
            no_alloc_loader.ask(settings)

    def on_host(self, workload: Workload, attention: Attention) -> tuple[int, int, int]:
        """Bytes of weights, KV cache and compute buffers with everything on the CPU."""
        result = self._loaded(workload, self._nothing, attention)
        return result.on_host("model"), result.on_host("context"), result.on_host("compute")

    def _loaded(self, workload: Workload, placement: Placement, attention: Attention) -> NoAllocResult:
        settings = self.settings(workload, placement, attention)
        if settings not in self._results:
            no_alloc_loader = self._of_thread.no_alloc_loader
            load = no_alloc_memory if no_alloc_loader is None else no_alloc_loader.answer
            self._results[settings] = load(settings)
        return self._results[settings]

    @cached_property
    def _in_doubt(self) -> bool:
        """Whether llama.cpp's own choice of layouts must be checked."""
        return any_in_doubt(self._operators)

    @property
    def _nothing(self) -> Placement:
        return operators_on_cpu(len(self._operators), self._model.n_layer + 1)
