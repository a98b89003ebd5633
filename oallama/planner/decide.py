"""From a request to a plan: every attention mode, the policies of `auto`, and larger micro-batches.

A streamed weight is read once per micro-batch, whether the split back end or llama.cpp streams it (ScheInfer computes a
prompt of 1024 tokens in one pass). A larger micro-batch takes more device memory for compute buffers and activations,
so it needs a new placement. That is searched for only if the placement found for the default micro-batch would already
be faster with the larger one.

Pure, except for the problem's no_alloc load, which tells what a placement takes on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import DEFAULT_BATCH, Options
from oallama.core.types import CPU_DEVICE, Phase, Workload
from oallama.plan.plan import Plan
from oallama.planner.attention import Problems
from oallama.planner.explain import physical_bound
from oallama.planner.parts import sliced_parts
from oallama.planner.placement import VerifiedPlan, plan_record
from oallama.planner.policies.oato import oato
from oallama.planner.policies.registry import Policy, Request, Rules, find_policy, policy_names
from oallama.planner.policies.sliced import experts, hot_fault, scheinfer
from oallama.planner.policies.stock import FIT, cpu_policy, most_promising, stock, whole_layers
from oallama.planner.price import price
from oallama.planner.problem import Problem
from oallama.planner.slicer import slicer_of

AUTO = "auto"
"""Name of the policy that takes the fastest plan of several policies."""

POLICY_NAMES = (AUTO, *(name for name in policy_names() if name != FIT), FIT)

PROMPT_STEP = 256
"""Tokens that a prompt is rounded up to: those of `oallama run` are estimated from its bytes."""


def plan(problems: Problems, request: Request, device: str = "") -> Plan:
    """The plan of a request. device: its name in the plan; "": as the profile has it. Raises as decide."""
    verified = decide(problems.worth_planning(request), request)
    problem, rule = problems.of(verified.flash_attn), problems.rule
    record = plan_record(verified, rule.model, problem.operators, device or problem.profile.device)
    bound = None if problem.devices else physical_bound(problem, record.workload, record.memory)  # it is of one device
    return replace(record, attention=rule.attention(verified.flash_attn), bound=bound)


def decide(problems: Sequence[Problem], request: Request) -> VerifiedPlan:
    """The placement of the requested policy, or the fastest of `auto`'s policies by prediction. problems: one for each
    attention mode; the mode with the least predicted time of the phase is taken, the first of equal ones.

    Raises UsageError if the policy cannot place the model, DoesNotFit if it needs the device and not even KV and
    compute buffers of one layer fit, in any mode.
    """
    is_auto = request.policy is None
    verified_plans: list[VerifiedPlan] = []
    refused: list[DoesNotFit] = []
    for problem in problems:
        n_ubatches = [n for n in request.n_ubatches if problem.allows(replace(request.workload, n_ubatch=n))]
        mode_request = replace(request, required=not is_auto, n_ubatches=n_ubatches)
        candidates: list[PolicyPlan] = []
        try:
            for policy in _policies(problem, request.policy):
                candidates.append((policy, policy.place(problem, mode_request)))
        except DoesNotFit as error:
            refused.append(error)
            continue
        if is_auto and not request.quick and problem.profile.device != CPU_DEVICE:
            candidates += _stock_options(problem, mode_request, min(map(_seconds, candidates)))
        _, first = min(candidates, key=_seconds)
        for promised_s, policy, larger in _larger_ubatches(problem, mode_request, candidates):
            if promised_s >= min(map(_seconds, candidates)):
                break
            verified = policy.place(problem, larger)
            if verified.workload == larger.workload and verified.placement.uses_device(problem.graph.n_layer):
                candidates.append((policy, verified))
        policy, verified = min(candidates, key=_seconds)
        notes = (*_raised_note(first, verified), *verified.notes, *filter(None, (policy.caveat,)))
        verified_plans.append(policy.finish(replace(verified, notes=notes), is_auto))
    if not verified_plans:
        raise refused[0]
    return min(verified_plans, key=lambda verified: verified.predicted.over(request.phase))


PolicyPlan = tuple[Policy, VerifiedPlan]


def _seconds(candidate: PolicyPlan) -> float:
    return candidate[1].placement.seconds


def _policies(problem: Problem, policy: Policy | None) -> tuple[Policy, ...]:
    """The policies to place with: the requested one, or those of `auto`; without a device `cpu`, unless the placement
    is given."""
    if problem.profile.device == CPU_DEVICE and (policy is None or not policy.is_given):
        return (cpu_policy,)
    return policies_of_auto(problem) if policy is None else (policy,)


def _stock_options(problem: Problem, request: Request, to_beat_s: float) -> list[PolicyPlan]:
    """The most promising options of stock llama.cpp, if they are predicted to take less than to_beat_s."""
    configurations = most_promising(problem, request, n_ubatches=request.n_ubatches, most=1, to_beat_s=to_beat_s)
    return [(stock, replace(verified, policy=stock.name)) for verified in configurations]


def _larger_ubatches(
    problem: Problem, request: Request, candidates: Sequence[PolicyPlan]
) -> list[tuple[float, Policy, Request]]:
    """(seconds of its placement as it is, policy, request) to place again with larger micro-batches, the fastest first.
    Leaves out policies that keep their micro-batch, placements whose micro-batch had to be lowered, and placements
    without a device, which stream nothing."""
    growing = [
        (policy, verified) for policy, verified in candidates
        if not policy.keeps_ubatch and verified.workload == request.workload
        and verified.placement.uses_device(problem.graph.n_layer)
    ]  # fmt: skip
    promises = [
        (seconds_in(problem, verified, n, request.phase), policy,
         replace(request, workload=replace(request.workload, n_ubatch=n), required=False))
        for n in request.n_ubatches for policy, verified in growing
    ]  # fmt: skip
    return sorted(promises, key=itemgetter(0))


def _raised_note(first: VerifiedPlan, best: VerifiedPlan) -> tuple[str, ...]:
    """A note if a larger micro-batch was taken. first: the fastest plan with the requested one."""
    if best is first:
        return ()
    gain = 1 - best.placement.seconds / first.placement.seconds
    change = f"raised from {first.workload.n_ubatch} to {best.workload.n_ubatch} tokens"
    return (f"micro-batch {change}: predicted to take {gain:.0%} less time",)


def policies_of_auto(problem: Problem) -> tuple[Policy, ...]:
    """The policies among which `auto` takes the fastest, besides stock llama.cpp's own options (_stock_options): whole
    operators, whole layers, the CPU, and slices (with hot experts if the model can have them)."""
    with_slices = scheinfer if hot_fault(problem) else experts
    return oato, whole_layers, cpu_policy, with_slices


def policy_named(policy: str | Policy, rules: Rules = Rules()) -> Policy | None:  # noqa: B008 - frozen
    """The policy; None for "auto". With a non-default affinity or fill, "auto" means OATO.

    Raises UsageError for an unknown policy, and for affinity or fill with a policy other than OATO."""
    chosen = find_policy(policy) if isinstance(policy, str) else policy
    if chosen is None and policy != AUTO:
        raise UsageError(f"unknown policy {policy!r}; choose from {', '.join(POLICY_NAMES)}")
    if not rules.need_oato:
        return chosen
    if chosen is not None and not chosen.has_rules:
        raise UsageError(f"affinity and fill apply only to policy {oato.name}, not to {chosen.name}")
    return chosen or oato


def larger_ubatches(workload: Workload, options: Options) -> tuple[int, ...]:
    """Larger micro-batches to try, ascending: doubled sizes, and the whole prompt at once, up to n_batch. Empty if the
    user set one with -ub."""
    if options.n_ubatch is not None:
        return ()
    whole = -(-workload.n_prompt // PROMPT_STEP) * PROMPT_STEP
    most = min(whole, workload.n_ctx, options.n_batch or DEFAULT_BATCH)
    sizes = []
    n_ubatch = 2 * workload.n_ubatch
    while n_ubatch < most:
        sizes.append(n_ubatch)
        n_ubatch *= 2
    return (*sizes, most) if most > workload.n_ubatch else ()


def seconds_in(problem: Problem, verified: VerifiedPlan, n_ubatch: int, phase: Phase) -> float:
    """Predicted seconds of a phase with the plan's placement unchanged and micro-batches of n_ubatch, ignoring the
    memory that these need."""
    placement, workload = verified.placement, replace(verified.workload, n_ubatch=n_ubatch)
    slices = list(placement.device_slices)
    for device, (part, part_placement) in sliced_parts(problem, placement).items():
        if part_placement.first_slices.settings.token_assignment:
            slices[device] = slicer_of(part, workload, part_placement).with_n_g(part_placement).first_slices
    return price(problem, workload, replace(placement, slices=tuple(slices))).over(phase)
