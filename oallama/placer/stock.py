"""Stock llama.cpp on a real device: its --fit, its other options, and any of them as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from oallama.core.options import DEFAULT_BATCH
from oallama.core.types import FlashAttention, Predicted, Workload
from oallama.device.layouts import needs_no_repack
from oallama.device.load_params import LoadSettings
from oallama.model.memory import no_alloc_memory
from oallama.placer.model_on_device import ModelOnDevice
from oallama.placer.plans import Given, unmeasured_plan
from oallama.plan.plan import Plan
from oallama.planner.placement import VerifiedPlan
from oallama.planner.policies.registry import Request
from oallama.planner.policies.stock import FIT, STOCK_MODES, most_promising
from oallama.run.fit import FitCall, fit_under
from oallama.run.stock import Cap, StockPlacement, expected_on_device

if TYPE_CHECKING:
    from oallama.placer.placer import Placer


def fit_plan(placer: Placer, workload: Workload, measure: bool = True) -> Plan:
    """The plan of llama.cpp's --fit under the placer's memory cap. Without a device everything is on the CPU. measure:
    as in Placer.plan.

    Raises what fit_under raises, and what planning raises.
    """
    if not placer.has_device:
        return unmeasured_plan(placer, None, workload, stock_attention=True)
    settings = stock_load(placer, workload.n_ctx, workload.n_ubatch).of(workload)
    placement, steps = fit_under(memory_cap(placer, settings), placer.operators, settings)
    record = stock_plan(placer, workload, placement.by_layers, measure)
    return replace(record, notes=(*record.notes, fit_sentence(placement, steps)))


def fit_sentence(placement: StockPlacement, steps: Sequence[FitCall]) -> str:
    """A sentence on --fit's choice and the number of attempts."""
    calls = f", found in {len(steps)} attempts under --gpu-weights" if len(steps) > 1 else ""
    return f"--fit chooses {placement.flags}{calls}"


def stock_plan(
    placer: Placer, workload: Workload, placement: StockPlacement, measure: bool = True, name: str = FIT
) -> Plan:
    """Stock llama.cpp's placement, attention and choice of host memory as a Plan: the configuration of the stock arm.
    measure: as in Placer.plan. name: of the policy."""
    n_layer = placer.model.n_layer
    places = expected_on_device(placer.operators, n_layer, placement)
    on_device = tuple(name for name, is_on_device in places.items() if is_on_device)
    gpu_layers = n_layer + 1 if placement.n_gpu_layers < 0 else min(placement.n_gpu_layers, n_layer + 1)
    given = Given(on_device, gpu_layers, name, placement.options, placement.device_layers)
    workload = replace(workload, n_ubatch=placement.n_ubatch or workload.n_ubatch)
    return placer.plan(given, workload=workload, measure=measure)


def promising_stock(
    target: ModelOnDevice,
    workload: Workload,
    modes: Iterable[str] = STOCK_MODES,
    n_ubatches: Sequence[int] = (),
    latest_s: float = inf,
) -> list[tuple[StockPlacement, Predicted]]:
    """The most promising configurations of stock llama.cpp with their predicted times (planner/policies/stock.py).
    latest_s: largest predicted seconds of the prompt. Raises as planning does."""
    with target.no_alloc_loads.together():
        problem = target.problem(stock_attention(target)).of_step(workload.step)
        candidates = most_promising(problem, Request(workload), modes, n_ubatches, latest_s=latest_s)

    def placement_of(candidate: VerifiedPlan) -> StockPlacement:
        n_ubatch = candidate.workload.n_ubatch
        larger = n_ubatch if n_ubatch != workload.n_ubatch else 0
        return StockPlacement.of(target.model.n_layer, candidate.placement, larger)

    return [(placement_of(candidate), candidate.predicted) for candidate in candidates]


def stock_attention(target: ModelOnDevice) -> FlashAttention:
    """Stock llama.cpp's attention mode: the requested one, else flash attention if a device supports it."""
    return "on" if target.options.flash_attn == "auto" else target.options.flash_attn


def stock_load(target: ModelOnDevice, n_ctx: int, n_ubatch: int, n_batch: int = DEFAULT_BATCH) -> LoadSettings:
    """The placer's device, threads and attention, for a load of stock llama.cpp; with --no-repack where it would choose
    a wrong layout for a weight. Raises BridgeError."""
    return LoadSettings(
        path=target.model.path,
        device=str(target.device.timed) if target.has_device else "none",
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        attention=target.attention,
        n_threads=target.threads,
        no_repack=needs_no_repack(target.operators),
    )


def memory_cap(target: ModelOnDevice, load: LoadSettings) -> Cap:
    """The placer's memory cap (--vram or the free memory, --vram-fill, --gpu-weights). load: a load without layers on
    the device. Raises what a no_alloc load raises."""
    if not target.has_device:
        return Cap()
    if target.members:
        member_bytes = [
            memory_cap(member, replace(load, device=str(member.device.timed))).device_bytes for member in target.members
        ]
        return Cap(sum(n or 0 for n in member_bytes), of_each=tuple(n or 0 for n in member_bytes))
    options, total = target.options, sum(operator.bytes for operator in target.operators)
    capacity = no_alloc_memory(load).device_free if options.vram is None else options.vram
    share = options.gpu_weights
    return Cap(int(options.vram_fill * capacity), None if share is None else int(share * total))
