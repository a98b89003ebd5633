"""Memory of placements, by llama.cpp's no_alloc loads; each is done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from oallama.core.types import Attention, ModelInfo, Operator, Workload
from oallama.device.spec import DeviceSpec
from oallama.place.placement import Placement, n_gpu_layers, nothing_there, placements
from oallama.place.problem import LoadBytes

if TYPE_CHECKING:
    from oallama.device.load_params import LoadSettings
    from oallama.model.memory import Prober, ProbeResult
    from oallama.plan.patterns import Pattern


class DryLoads:
    """Dry loads of one model on one device."""

    def __init__(
        self,
        model: ModelInfo,
        operators: Sequence[Operator],
        tensor_names: Sequence[str],
        device: DeviceSpec,
        n_threads: Callable[[], int],
        prober: Prober | None = None,
    ) -> None:
        """n_threads: of the CPU, asked when a load is. prober: a process that makes the loads; None: one is started for
        each, or for those that are made `together`."""
        self._model, self._operators, self._tensor_names = model, tuple(operators), tuple(tensor_names)
        self._device, self._n_threads = device, n_threads
        self._prober = prober
        self._together = threading.local()
        self._results: dict[LoadSettings, ProbeResult] = {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block, loads of this thread share a process."""
        from oallama.model.memory import Prober

        with Prober(at_once=not self._results and self._prober is None) as self._together.prober:
            try:
                yield
            finally:
                self._together.prober = None

    def settings(self, load: Workload, placed: Placement, attention: Attention) -> LoadSettings:
        """The engine's load settings for a placement."""
        from oallama.device.load_params import LoadSettings
        from oallama.run.weight_places import weight_places

        uses_device = placed.uses_device(self._model.n_layer)
        patterns: tuple[Pattern, ...] = ()
        split = ""
        if uses_device or self._in_doubt:
            planned = placements(self._operators, placed)
            places = weight_places(
                self._operators,
                planned,
                self._tensor_names,
                placed.first_device_layer,
                bool(placed.token_assignment),
                placed.streaming,
                placed.residents,
            )
            patterns, split = places.patterns if uses_device else places.named, places.split_text
        return LoadSettings(
            path=self._model.path,
            device=str(self._device) if uses_device else "none",
            n_ctx=load.n_ctx,
            n_ubatch=load.n_ubatch,
            n_gpu_layers=n_gpu_layers(self._model.n_layer, placed),
            host_patterns=patterns,
            split_text=split,
            n_threads=self._n_threads(),
            attention=attention,
            stock=placed.stock,
        )

    def taken(self, load: Workload, placed: Placement, attention: Attention) -> LoadBytes:
        """Bytes of a placement, its split operators counted with the host. Raises what probe_memory raises."""
        result = self._probed(load, placed, attention)
        return LoadBytes(
            weights_gpu=result.on_device("model"),
            weights_host=result.on_host("model"),
            kv=result.on_device("context") - placed.cache_bytes,
            compute=result.on_device("compute"),
            device_free=result.device_free,
        )

    def sides(self, load: Workload, placed: Placement, attention: Attention) -> tuple[int, int]:
        """Bytes of all that a placement keeps on the host, and on the device. Raises what probe_memory raises."""
        from oallama.model.memory import PARTS

        result = self._probed(load, placed, attention)
        return sum(map(result.on_host, PARTS)), sum(map(result.on_device, PARTS))

    def check_host(self, load: Workload, placed: Placement, attention: Attention) -> None:
        """Raises DoesNotFit for a requested placement that does not fit into host memory."""
        from oallama.device.host_memory import host_memory_bytes
        from oallama.run.setup import check_host

        settings = self.settings(load, placed, attention)
        if settings in self._results:
            check_host(settings, self._results[settings], self._operators, host_memory_bytes())

    def begin_on_host(self, load: Workload, attention: Attention) -> None:
        """Start the load for on_host in the background, if there is a process for it."""
        settings = self.settings(load, self._nothing, attention)
        if self._prober is not None and settings not in self._results:
            self._prober.ask(settings)

    def on_host(self, load: Workload, attention: Attention) -> tuple[int, int, int]:
        """Bytes of weights, KV cache and compute buffers with everything on the CPU."""
        result = self._probed(load, self._nothing, attention)
        return result.on_host("model"), result.on_host("context"), result.on_host("compute")

    def has(self, load: Workload, placed: Placement, attention: Attention) -> bool:
        """True once this placement was loaded."""
        return self.settings(load, placed, attention) in self._results

    def _probed(self, load: Workload, placed: Placement, attention: Attention) -> ProbeResult:
        from oallama.model.memory import probe_memory

        settings = self.settings(load, placed, attention)
        if settings not in self._results:
            prober = self._prober or getattr(self._together, "prober", None)
            self._results[settings] = prober.answer(settings) if prober else probe_memory(settings)
        return self._results[settings]

    @cached_property
    def _in_doubt(self) -> bool:
        """Whether llama.cpp's own choice of layouts must be checked."""
        from oallama.device.layouts import any_in_doubt

        return any_in_doubt(self._operators)

    @property
    def _nothing(self) -> Placement:
        return nothing_there(len(self._operators), self._model.n_layer + 1)
