"""Loads a model into this process as a plan places it; refusals are one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oallama.core.errors import DeviceError
from oallama.core.options import STOCK_ATTENTION, STOCK_BATCH, Options
from oallama.core.types import SPLIT_LAYOUT, ModelInfo, Operator
from oallama.device.cpu import default_threads
from oallama.device.host_memory import host_memory_bytes
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import LoadSettings, ModelParams, load_bridge
from oallama.device.native_abort import exit_at_abort
from oallama.device.native_log import native_log
from oallama.device.opening import OpenDevice, device_pointers, open_now
from oallama.model.gguf_file import check_unchanged
from oallama.model.memory import check_cache, held_bytes, load_refusal, memory_of, no_alloc_memory
from oallama.plan.plan import Plan
from oallama.run.held import compare_memory
from oallama.run.load_checks import check_device, check_host, check_layers, device_of, release
from oallama.run.split import LoadedSplit, open_split
from oallama.run.weight_places import weight_places

if TYPE_CHECKING:
    from oallama.run.placed_llama import PlacedLlama


def load_placed(
    model: ModelInfo,
    plan: Plan,
    options: Options,
    *,
    operators: Sequence[Operator],
    tensor_names: Sequence[str],
    memory_known: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> PlacedLlama:
    """Load a model as a plan says. options: device, threads, context, KV cache and attention; the plan's where they ask
    for nothing. memory_known: whether no_alloc_memory was asked of this load; else it is asked here, since native code
    must not see a file first in this process. arguments: others of llama_cpp.Llama.

    Raises PlanError (another model's plan, or one the split back end cannot do), ModelFileError, DoesNotFit (the host's
    memory), DeviceError, UsageError, BridgeError.
    """
    plan = plan.without_own_drafts
    plan.check(model, operators)
    check_layers(plan, model.n_layer, operators)
    spec = device_of(plan, options.device)
    places = weight_places(
        operators, plan.operators, tensor_names, model.n_layer + 1 - plan.n_gpu_layers, plan.split_settings
    )
    settings = replace(
        _settings(model, plan, options, operators),
        device=str(spec),
        host_patterns=places.named if spec.is_none else places.patterns,
        split_texts=places.split_texts,
        n_outputs=0 if _wants_all(arguments or {}) else plan.workload.n_outputs_max,
    )
    if not memory_known:
        check_host(settings, no_alloc_memory(settings), operators, host_memory_bytes())
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
                held.callback(split.close)
        llama = _load_llama(model, settings, device, split, held, arguments or {})
        llama.plan, shrunk = (plan, ()) if split is None else split.corrected(plan, operators)
        _compare(llama, split, device, (*places.warnings, *shrunk))
    except BaseException:
        release(held)
        raise
    return llama


def _settings(model: ModelInfo, plan: Plan, options: Options, operators: Sequence[Operator]) -> LoadSettings:
    """The load settings of a plan and options, without the device and the placement of weights."""
    return LoadSettings(
        path=model.path,
        n_ctx=options.n_ctx or plan.workload.n_ctx or model.n_ctx_train,
        n_batch=options.n_batch or STOCK_BATCH,
        n_ubatch=options.n_ubatch or plan.workload.n_ubatch,
        n_gpu_layers=plan.n_gpu_layers,
        attention=options.attention(plan.attention or STOCK_ATTENTION),
        n_threads=options.threads or default_threads(),
        stock=plan.stock,
        device_layers=plan.device_layers(operators, model.n_layer),
    )


def _wants_all(arguments: Mapping[str, Any]) -> bool:
    """Whether a Llama of these arguments computes the logits, or embeddings, of all tokens."""
    return any(bool(arguments.get(name)) for name in ("logits_all", "embedding", "draft_model"))


def _load_llama(
    model: ModelInfo,
    settings: LoadSettings,
    device: OpenDevice,
    split: LoadedSplit | None,
    held: contextlib.ExitStack,
    arguments: Mapping[str, Any],
) -> PlacedLlama:
    """split: where the split operators go; held: what is freed with the model, after it, also if interrupted.

    Raises ModelFileError if a file changed since it was checked, ModelFileError, DeviceError if llama.cpp or the
    split back end refuses, BridgeError, KeyboardInterrupt.
    """
    from llama_cpp import llama_cpp as api

    from oallama.run.placed_llama import PlacedLlama

    check_unchanged(model.files)
    bridge, interrupts = load_bridge(), list[bool]()
    on_progress = api.llama_progress_callback(lambda _share, _data: not interrupts)  # False stops the load
    with native_log(hold_interrupt=False) as log:
        placement = ModelParams(settings, device_pointers(device.names), bridge, split.buft if split else 0)
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
    """Note what it holds, and where that is not as its plan says. warnings: what is known before."""
    with held_interrupt():
        buffers = memory_of(load_bridge(), llama.ctx)
    if split is not None:
        buffers = (*(b for b in buffers if b.buft != SPLIT_LAYOUT), *split.buffers())
    on_device, on_host = held_bytes(buffers)
    llama.device, llama.buffers = device.label, buffers
    memory = compare_memory(on_device, on_host, device.label, llama.plan.memory, device.own_free)
    llama.memory = memory
    llama.warnings = (*warnings, *filter(None, (memory.warning, memory.spill)))
