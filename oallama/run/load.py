"""Loads a model into this process as a plan places it; refusals are one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oallama.core.errors import DeviceError
from oallama.core.types import SPLIT_LAYOUT, ModelInfo, Operator
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import LoadSettings, ModelParams, load_bridge
from oallama.device.native_abort import exit_at_abort
from oallama.device.native_log import native_log
from oallama.device.opening import OpenDevice, device_pointers, open_now
from oallama.model.gguf_file import check_unchanged
from oallama.model.memory import check_cache, held_bytes, load_refusal, memory_of
from oallama.plan.plan import Plan
from oallama.run.held import compare_memory
from oallama.run.load_checks import check_device, check_layers, device_of, release
from oallama.run.split import LoadedSplit, open_split
from oallama.run.weight_places import weight_places

if TYPE_CHECKING:
    from oallama.run.placed_llama import PlacedLlama


def load_placed(
    model: ModelInfo,
    plan: Plan,
    settings: LoadSettings,
    *,
    operators: Sequence[Operator],
    tensor_names: Sequence[str],
    arguments: Mapping[str, Any],
) -> PlacedLlama:
    """Load a model as a plan says. plan: of this model, without its own drafts. settings: those of a no_alloc load,
    which was made before, since native code must not see a file first in this process; their weights are placed here.
    arguments: others of llama_cpp.Llama.

    Raises PlanError for a plan that the split back end cannot do, ModelFileError, DeviceError, UsageError, BridgeError.
    """
    check_layers(plan, model.n_layer, operators)
    spec = device_of(plan, settings.device)
    places = weight_places(
        operators, plan.operators, tensor_names, model.n_layer + 1 - plan.n_gpu_layers, plan.split_settings
    )
    settings = replace(
        settings,
        device=str(spec),
        host_patterns=places.named if spec.is_none else places.patterns,
        split_texts=places.split_texts,
    )
    exit_at_abort()
    held = contextlib.ExitStack()
    try:
        with held_interrupt():  # until closing the device is registered
            device = open_now(spec)
            held.callback(device.close)
        check_device(plan, device.name, device.spec)
        with held_interrupt():
            split = open_split(plan, places.rows, operators, model.n_layer, device)
            if split is not None:
                held.callback(split.plan.close)
        llama = _load_llama(model, settings, device, split, held, arguments)
        llama.plan, shrunk = (plan, ()) if split is None else split.corrected(plan, operators)
        _compare(llama, split, device, (*places.warnings, *shrunk))
    except BaseException:
        release(held)
        raise
    return llama


def _load_llama(
    model: ModelInfo,
    settings: LoadSettings,
    device: OpenDevice,
    split: LoadedSplit | None,
    held: contextlib.ExitStack,
    arguments: Mapping[str, Any],
) -> PlacedLlama:
    """split: where the split operators go; held: resources to free after the model, even after Ctrl-C.

    Raises ModelFileError if a file changed since it was checked, ModelFileError, DeviceError if llama.cpp or the
    split back end refuses, BridgeError, KeyboardInterrupt.
    """
    from llama_cpp import llama_cpp as api

    from oallama.run.placed_llama import PlacedLlama

    check_unchanged(model.files)
    bridge, interrupts = load_bridge(), list[bool]()
    on_progress = api.llama_progress_callback(lambda _share, _data: not interrupts)  # False stops the load
    with native_log(hold_interrupt=False) as log:
        placement = ModelParams(settings, device_pointers(device.names), bridge, split.plan.buft if split else 0)
        try:
            with held_interrupt(lambda: interrupts.append(True)):
                llama = PlacedLlama.load(settings, placement, on_progress, arguments)
                llama.own(held, split)
            check_cache(settings, log.texts())
        except ValueError as error:
            if split is not None and (failure := split.failure()):
                raise DeviceError(f"the model cannot be loaded as planned: {failure}") from None
            raise load_refusal(settings.path, device, log.reason() or str(error)) from None
    return llama


def _compare(llama: PlacedLlama, split: LoadedSplit | None, device: OpenDevice, warnings: Sequence[str]) -> None:
    """Record the memory that the model holds, with warnings where it differs from the plan. warnings: those known
    before."""
    with held_interrupt():
        buffers = memory_of(load_bridge(), llama.ctx)
    if split is not None:
        buffers = (*(b for b in buffers if b.buft != SPLIT_LAYOUT), *split.buffers())
    on_device, on_host = held_bytes(buffers)
    llama.device, llama.buffers = device.label, buffers
    memory = compare_memory(on_device, on_host, device.label, llama.plan.memory, device.own_free)
    llama.memory = memory
    llama.warnings = (*warnings, *filter(None, (memory.warning, memory.spill)))
