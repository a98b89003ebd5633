"""Checks of a plan before it is loaded: its device, its layers, the host's memory; and freeing in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from oallama.core.errors import DoesNotFit, PlanError
from oallama.core.types import PLAIN_LAYOUT, Operator, devices_with_n_g
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import LoadSettings
from oallama.device.opening import NO_DEVICE
from oallama.device.spec import DeviceSpec, device_for_plan, parse_device
from oallama.model.memory import PARTS, NoAllocResult
from oallama.plan.plan import Plan


def release(held: ExitStack) -> None:
    """Free what a load holds, in reverse order. Ctrl-C is delayed until the end: ggml aborts this process if the
    connection to an RPC server is closed before its buffers are freed."""
    with held_interrupt():
        held.close()


def device_of(plan: Plan, device: str | None) -> DeviceSpec:
    """The device to open: the plan's where `device` (--device text) is None, and none for a plan that needs none.

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


def check_host(settings: LoadSettings, taken: NoAllocResult, operators: Sequence[Operator], host_bytes: int) -> None:
    """Raises DoesNotFit for a load of which every token reads more than the host's memory holds: pages of a mapped file
    would come from disk again for each. Of a mapped file's experts only those that a token uses count."""
    mapped = 0
    if not settings.split_texts:
        mapped = sum(b.model for b in taken.buffers if b.in_host_memory and b.buft == PLAIN_LAYOUT)
    allocated = sum(taken.on_host(part) for part in PARTS) - mapped
    idle = sum(round((1 - operator.active_fraction) * operator.bytes) for operator in operators)
    needed = allocated + max(mapped - idle, 0)
    if needed > host_bytes:
        remedy = (
            "use a smaller or more quantized model, a shorter context (-c), or put more of it on a device "
            "(--device, --vram)"
        )
        raise DoesNotFit(needed, host_bytes, "the host", remedy=remedy)
