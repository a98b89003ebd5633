"""Loads an arm in its own process: stock llama.cpp's placement, or a plan (run/load.py).

Both return a llama_context to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oallama.bench.records import ArmSpec
from oallama.core.errors import BridgeError
from oallama.core.options import Options
from oallama.device.load_params import LoadSettings, load_bridge
from oallama.device.native_log import native_log
from oallama.device.opening import list_devices, open_now
from oallama.device.spec import parse_device
from oallama.model.memory import BufferBytes, check_cache, held_bytes, load_refusal, memory_of
from oallama.placer import Placer
from oallama.plan.split import device_share
from oallama.run.fit import context_params, stock_params
from oallama.run.stock import StockPlacement

PLUGIN_PREFIX = "OALLAMA"
"""Prefix of our backend's name in ggml's registry."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model to measure. It is never freed, as its process ends with it. context, model: addresses of llama.h's
    structs.

    device: ggml's name; several are joined by commas; "none": no device. params: the llama_context_params of the
    context. buffers: returns the memory held now, as the first decodes allocate some. device_share: operator of the
    split back end -> share of its weight on the device.
    """

    device: str
    context: int
    model: int
    params: Any
    buffers: Callable[[], tuple[BufferBytes, ...]]
    device_share: Mapping[str, float]
    owner: object  # of what the addresses point to, and of the device
    warnings: tuple[str, ...] = ()

    def held_bytes(self) -> tuple[int, int]:
        """Bytes on the device, and in host memory."""
        return held_bytes(self.buffers())


def load_stock(settings: LoadSettings, placement: StockPlacement) -> LoadedModel:
    """Load as llama-server would with the same options, without other back ends in the registry.

    Raises ModelFileError, DeviceError, BridgeError if a plugin is in the registry.
    """
    settings, device = placement.load(settings), open_now(parse_device(settings.device))
    try:
        if found := plugins():  # loads llama.cpp, without which llama_cpp cannot be imported
            raise BridgeError(f"the stock arm has {', '.join(found)} in ggml's registry; unset GGML_BACKEND_PATH")
        from llama_cpp import llama_cpp as api

        model_params, _owner = stock_params(settings, device.names)
        params = context_params(settings)
        with native_log() as log:
            model = api.llama_model_load_from_file(settings.path.encode(), model_params)
            context = api.llama_init_from_model(model, params) if model else None
            if not context:
                raise load_refusal(settings.path, device, log.reason())
            check_cache(settings, log.texts())
    except BaseException:
        device.close()
        raise
    return LoadedModel(
        device=device.label,
        context=context,
        model=model,
        params=params,
        buffers=lambda: memory_of(load_bridge(), context),
        device_share={},
        owner=device,
    )


def load_planned(spec: ArmSpec) -> LoadedModel:
    """Load a plan into this process, as `Placer.llama` does."""
    load = spec.setting.load
    assert spec.plan is not None
    options = Options(
        device=load.device,
        threads=load.n_threads,
        n_ctx=load.n_ctx,
        n_batch=load.n_batch,  # the micro-batch is the plan's
        **asdict(load.attention),
    )
    placer = Placer.of_file(load.path, options)
    llama = placer.llama(spec.plan)
    rows = {row.name: row for row in llama.plan.operators}
    return LoadedModel(
        device=llama.device,
        context=llama.ctx,
        model=llama.model,
        params=llama.context_params,
        buffers=lambda: llama.buffers,
        device_share={o.name: device_share(o, rows[o.name]) for o in placer.operators},
        owner=llama,
        warnings=llama.warnings,
    )


def plugins() -> tuple[str, ...]:
    """The name of our back end in ggml's registry; empty if it is not there."""
    return tuple(sorted({device.backend for device in list_devices() if device.backend.startswith(PLUGIN_PREFIX)}))
