"""The `fit` policy: what llama.cpp's own --fit does, and any other stock placement, as a plan of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from oallama.bench.fit import FitStep, fit_under
from oallama.bench.stock import expected_places
from oallama.core.errors import UsageError
from oallama.place.policies.stock import FIT
from oallama.placer import Given
from oallama.plan.plan import Plan

if TYPE_CHECKING:
    from oallama.bench.records import Setting, StockPlacement
    from oallama.core.types import Workload
    from oallama.placer import Placer


def fit_plan(placer: Placer, load: Workload, setting: Setting) -> Plan:
    """llama.cpp's --fit under the setting's cap, priced and probed. Without a device everything is on the CPU.

    Raises UsageError for a second CPU, what fit_under raises, and what planning raises.
    """
    if placer.device.is_pair:
        raise UsageError("policy fit cannot be on cpu-pair: llama.cpp has no second CPU; use split or scheinfer")
    if not placer.has_device:
        return placer.plan("cpu", workload=load, stock_attention=True, measure=False)
    placement, steps = fit_under(setting.cap, placer.operators, setting.load)
    plan = stock_plan(placer, load, placement)
    return replace(plan, notes=(*plan.notes, fit_sentence(placement, steps)))


def fit_sentence(placement: StockPlacement, steps: Sequence[FitStep]) -> str:
    """A sentence on what --fit chose, and how often it was asked."""
    taken = f"-ngl {placement.n_gpu_layers}" if placement.n_gpu_layers >= 0 else "all layers"
    if placement.overrides:
        taken += f" and {len(placement.overrides)} overrides"
    calls = f", asked {len(steps)} times to keep to --gpu-weights" if len(steps) > 1 else ""
    return f"--fit chooses {taken}{calls}"


def stock_plan(placer: Placer, load: Workload, placement: StockPlacement, priced: bool = True) -> Plan:
    """Stock llama.cpp's placement, attention and choice of host memory as a plan of ours, for the engine to load: the
    very configuration that the stock arm has, which is why the device stays open even with nothing on it (llama.cpp
    computes large batches there). priced False: without a profile; such a plan predicts nothing."""
    if placer.device.is_pair:  # stock llama.cpp has no such device
        return placer.plan("cpu", workload=load, stock_attention=True, measure=False)
    n_layer = placer.model.n_layer
    places = expected_places(placer.operators, n_layer, placement)
    on_device = [name for name, place in places.items() if place == "device"]
    gpu_layers = n_layer + 1 if placement.n_gpu_layers < 0 else min(placement.n_gpu_layers, n_layer + 1)
    plan = placer.plan(Given(on_device, gpu_layers, FIT), workload=load, stock_attention=True, measure=priced)
    operators = tuple(replace(operator, layout=None) for operator in plan.operators)
    return replace(plan, device=str(placer.device), operators=operators)
