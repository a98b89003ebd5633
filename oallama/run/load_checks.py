"""Checks of a plan before it is loaded: its device and its layers; and freeing in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from oallama.core.errors import PlanError
from oallama.core.types import Operator, devices_with_n_g
from oallama.device.interrupt import held_interrupt
from oallama.device.opening import NO_DEVICE
from oallama.device.spec import DeviceSpec, device_for_plan, parse_device
from oallama.plan.plan import Plan


def release(held: ExitStack) -> None:
    """Free what a load holds, in reverse order. Ctrl-C is delayed until the end: ggml aborts this process if the
    connection to an RPC server is closed before its buffers are freed."""
    with held_interrupt():
        held.close()


def device_of(plan: Plan, device: str) -> DeviceSpec:
    """The device to open: of `device` (--device text) as many as the plan uses, and none for a plan that needs none.

    Raises UsageError.
    """
    if plan.device == NO_DEVICE:
        return DeviceSpec("none")
    return parse_device(device_for_plan(device, plan.device))


def computes_on_device(plan: Plan) -> bool:
    """True where an operator is stored or streamed there, for any batch."""
    stored = any(row.cc < 1 or row.hot_experts for row in plan.operators)
    return stored or bool(devices_with_n_g(plan.split_settings))


def check_device(plan: Plan, name: str, spec: DeviceSpec) -> None:
    """Raises PlanError for a plan that puts something on a device where none was found. name: of the device that was
    found for `spec`."""
    if name == NO_DEVICE and computes_on_device(plan):
        raise PlanError(f"the plan needs device {plan.device}, but --device {spec} is none; plan again")


def check_layers(plan: Plan, n_layer: int, operators: Sequence[Operator]) -> None:
    """Raises PlanError for an operator that is whole on the device in a layer that n_gpu_layers leaves on the host:
    llama.cpp would leave it there too."""
    first = n_layer + 1 - plan.n_gpu_layers
    whole = {row.name for row in plan.operators if row.gg == 1}
    for operator in operators:
        if operator.name in whole and operator.layer_in(n_layer) < first:
            raise PlanError(
                f"the plan puts {operator.name} on {plan.device}, but n_gpu_layers = {plan.n_gpu_layers} leaves its "
                "layer on the host; raise n_gpu_layers or make a new plan"
            )
