"""Plans by a policy or from a given placement: on one device or over several, with or without a profile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from oallama.core.errors import DoesNotFit
from oallama.core.types import FlashAttention, MemoryBreakdown, StockOptions, Workload
from oallama.device.spec import parse_device
from oallama.plan.plan import Plan
from oallama.planner.decide import plan
from oallama.planner.memory import memory_breakdown, summed
from oallama.planner.placement import (
    Placement,
    VerifiedPlan,
    placed_as_named,
    placed_by_plan,
    unmeasured_cpu_record,
    unmeasured_record,
)
from oallama.planner.policies.ranges import ranges
from oallama.planner.policies.registry import Policy, Request
from oallama.planner.problem import LoadBytes, Problem
from oallama.planner.verify import verify

if TYPE_CHECKING:
    from oallama.placer.model_on_device import ModelOnDevice
    from oallama.placer.placer import Placer


@dataclass(frozen=True, slots=True)
class Given:
    """A placement given by the caller instead of a policy: priced and verified, but not changed. on_device: names of
    the operators on the device. gpu_layers: number of last layers (the output counts as one) with norms and KV there.
    name: the policy's name in the plan. stock: options of a stock configuration, with stock's attention by default;
    None: our configuration. device_layers: number of these layers on each of several devices."""

    on_device: Collection[str]
    gpu_layers: int
    name: str = "manual"
    stock: StockOptions | None = None
    device_layers: tuple[int, ...] = ()

    def placement(self, target: ModelOnDevice) -> Placement:
        """Raises UsageError for invalid values."""
        if self.gpu_layers and not self.device_layers:
            target.check_one_device("-ngl" if self.name == "layers" else "this placement")
        placement = placed_as_named(target.model, target.operators, self.on_device, self.gpu_layers)
        return replace(placement, stock=self.stock, device_layers=self.device_layers)

    def policy(self, target: ModelOnDevice) -> Policy:
        """Raises UsageError for invalid values."""
        placement = self.placement(target)

        def place(problem: Problem, request: Request) -> VerifiedPlan:
            return verify(problem, self.name, request.workload, placement)

        attention: FlashAttention | None = None if self.stock is None else "auto"  # as stock llama.cpp has it
        return Policy(
            self.name, "a placement of the caller's own", place, is_given=True, keeps_ubatch=True, attention=attention
        )


def checked(target: ModelOnDevice, plan: Plan) -> Plan:
    """A plan of the planner, for this machine. Raises DoesNotFit if the host's memory does not hold it."""
    from oallama.profile.machine import fingerprint_key

    placement = placed_by_plan(target.model.n_layer, target.operators, plan)
    target.no_alloc_loads.check_host(plan.workload, placement, target.attention_for(plan))
    return replace(
        plan, machine_fingerprint=fingerprint_key(target.profile().fingerprint), notes=with_doubt(target, plan.notes)
    )


def with_doubt(target: ModelOnDevice, notes: tuple[str, ...]) -> tuple[str, ...]:
    """The notes, with doubts about the profile's times added once."""
    from oallama.profile.busy import doubt

    return tuple(dict.fromkeys((*notes, *filter(None, [doubt(target.profile())]))))


#
# several devices: by prediction the fastest of the plans on each device alone and of the plan over all
#


def plan_over_devices(placer: Placer, request: Request, planned: Callable[[Placer], Plan]) -> Plan:
    """The plan of a request. planned: makes the plan on one device. Raises UsageError for a policy that uses one
    device, and as planning does."""
    if request.policy is not None:
        if not request.policy.is_given:
            placer.check_one_device(f"policy {request.policy.name}")
        return _over_all(placer, request)
    plans = [planned(member) for member in placer.local_members]
    if (range_plan := plan_of_ranges(placer, request)) is not None:
        plans.append(range_plan)
    best = min(plans, key=lambda each: each.predicted.total_s if each.predicted else inf)
    return replace(best, notes=(*best.notes, *_left_out(placer, best)))


def plan_of_ranges(placer: Placer, request: Request) -> Plan | None:
    """The best plan over several devices; None if a single device is better, or if together they have less memory for
    weights than one of them, as each keeps its own buffers."""
    ranges_request = replace(request, policy=ranges)
    try:
        range_plan = _over_all(placer, ranges_request)
        used_devices = [str(placer.device.each[number]) for number in placer.placed(range_plan).devices_used]
        if 1 < len(used_devices) < len(placer.members):
            range_plan = _over_all(placer.on_devices(used_devices), ranges_request)
    except DoesNotFit:
        return None
    return range_plan if len(used_devices) > 1 else None


def _over_all(placer: Placer, request: Request) -> Plan:
    """The plan over all devices."""
    problems = placer.problems  # measure before the process for no_alloc loads starts
    with placer.no_alloc_loads.together():
        return checked(placer, plan(problems, request, str(placer.device)))


def _left_out(placer: Placer, best: Plan) -> list[str]:
    used_devices = {str(device) for device in parse_device(best.device).each}
    unused_devices = [str(device) for device in placer.device.each if str(device) not in used_devices]
    if not unused_devices:
        return []
    verb, them = ("is", "it") if len(unused_devices) == 1 else ("are", "them")
    return [f"{' and '.join(unused_devices)} {verb} not used: with {them} no plan is predicted to be faster"]


#
# without a profile
#


def unmeasured_plan(
    target: ModelOnDevice,
    given: Given | None,
    workload: Workload,
    stock_attention: bool = False,
) -> Plan:
    """Make a plan without a profile, which predicts nothing; see Placer.plan. given: None: everything on the CPU.
    stock_attention: llama.cpp chooses flash attention unless the user did."""
    placement = (given or Given((), 0)).placement(target)
    is_stock = stock_attention or placement.stock is not None
    mode = target.options.flash_attn if is_stock else target.unmeasured_attention(workload)
    attention = target.attention_rule.attention(mode)
    load = target.no_alloc_loads.taken(workload, placement, attention)
    model, operators = target.model, target.operators
    if given is None:
        target.no_alloc_loads.check_host(workload, placement, attention)
        record = unmeasured_cpu_record(model, operators, workload, load.weights_host)
        return replace(record, attention=attention)
    if load.devices:
        loads = zip(target.members, load.devices, strict=True)
        memory = summed(tuple(_memory(member, of_member) for member, of_member in loads), load.weights_host)
    else:
        memory = _memory(target, load)
    record = unmeasured_record(model, operators, workload, placement, memory, given.name, str(target.device))
    return replace(record, attention=attention)


def _memory(target: ModelOnDevice, load: LoadBytes) -> MemoryBreakdown:
    """The memory breakdown of a load on one device."""
    options = target.options
    capacity = load.device_free if options.vram is None else options.vram
    return memory_breakdown(capacity, options.vram_fill, load.weights_gpu, load.weights_host, load.kv, load.compute)
