"""A plan on several devices: by prediction the fastest of the plans on each device alone and of the plan over all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from oallama.core.errors import DoesNotFit, UsageError
from oallama.device.spec import parse_device
from oallama.placer.plans import checked
from oallama.plan.plan import Plan
from oallama.planner.decide import AUTO, plan
from oallama.planner.policies.ranges import ranges
from oallama.planner.policies.registry import Request

if TYPE_CHECKING:
    from oallama.placer.placer import Placer


def plan_over_devices(placer: Placer, request: Request, planned: Callable[[Placer], Plan]) -> Plan:
    """The plan of a request. planned: makes the plan on one device. Raises UsageError for a policy that uses one
    device, and as planning does."""
    if request.policy is not None and not request.policy.is_given:
        n = len(placer.members)
        if placer.chose_devices:
            placer.check_one_device(f"policy {request.policy.name}")
        raise UsageError(f"policy {request.policy.name} uses one device, but --device names {n}; use policy {AUTO}")
    if request.policy is not None:
        return over_all(placer, request)
    single_device_plans = [planned(member) for member in placer.local_members]
    range_plan = plan_of_ranges(placer, request)
    best = min((*single_device_plans, *([range_plan] if range_plan is not None else [])), key=_total_s)
    return replace(best, notes=(*best.notes, *_left_out(placer, best)))


def _total_s(plan: Plan) -> float:
    return plan.predicted.total_s if plan.predicted else inf


def plan_of_ranges(placer: Placer, request: Request) -> Plan | None:
    """The best plan over several devices; None if a single device is better, or if together they have less memory for
    weights than one of them, as each keeps its own buffers."""
    ranges_request = replace(request, policy=ranges)
    try:
        range_plan = over_all(placer, ranges_request)
        used_devices = [str(placer.device.each[number]) for number in placer.placed(range_plan).devices_used]
        if 1 < len(used_devices) < len(placer.members):
            range_plan = over_all(placer.on_devices(used_devices), ranges_request)
    except DoesNotFit:
        return None
    return range_plan if len(used_devices) > 1 else None


def over_all(placer: Placer, request: Request) -> Plan:
    """The plan over all devices."""
    problems = placer.problems  # measured before a process of loads is there
    with placer.no_alloc_loads.together():
        return checked(placer, plan(problems, request, str(placer.device)))


def _left_out(placer: Placer, best: Plan) -> list[str]:
    used_devices = {str(device) for device in parse_device(best.device).each}
    unused_devices = [str(device) for device in placer.device.each if str(device) not in used_devices]
    if not unused_devices:
        return []
    verb, them = ("is", "it") if len(unused_devices) == 1 else ("are", "them")
    return [f"{' and '.join(unused_devices)} {verb} not used: with {them} no plan is predicted to be faster"]
