"""From a request to a plan: every attention mode, the policies of `auto`, and larger micro-batches.

A streamed weight is read once per micro-batch, whether the split back end or llama.cpp streams it (ScheInfer computes a
prompt of 1024 tokens in one pass). A larger micro-batch takes more device memory for compute buffers and activations,
so it needs a new placement. That is searched for only if the placement found for the default micro-batch would already
be faster with the larger one.

Pure, except for the problem's no_alloc load, which tells what a placement takes on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
    attention mode; the mode with the least predicted time is taken, the first of equal ones.

    Raises UsageError if the policy cannot place the model, DoesNotFit if it needs the device and not even KV and
    compute buffers of one layer fit, in any mode.
    """
    verified_plans: list[VerifiedPlan] = []
    refused: list[DoesNotFit] = []
    for problem in problems:
        candidates: list[PolicyPlan] = []
        try:
            for policy, policy_request in _tries(problem, request, candidates):
                candidates.append((policy, policy.place(problem, policy_request)))
        except DoesNotFit as error:
            refused.append(error)
            continue
        policy, verified = min(candidates, key=_seconds)
        if policy.caveat:
            verified = replace(verified, notes=(*verified.notes, policy.caveat))
        verified_plans.append(policy.finish(verified, request.policy is None))
    if not verified_plans:
        raise refused[0]
    return min(verified_plans, key=lambda verified: verified.predicted.total_s)


PolicyPlan = tuple[Policy, VerifiedPlan]


def _tries(problem: Problem, request: Request, candidates: list[PolicyPlan]) -> Iterator[tuple[Policy, Request]]:
    """Yield (policy, request) pairs to place next in one attention mode: the requested policy, or those of `auto`; then
    larger micro-batches. The caller appends what it places to `candidates`."""
    policy = request.policy
    if problem.profile.device == CPU_DEVICE and (policy is None or not policy.is_given):
        yield cpu_policy, request
        return
    n_ubatches = [n for n in request.n_ubatches if problem.allows(replace(request.workload, n_ubatch=n))]
    request = replace(request, required=policy is not None, n_ubatches=n_ubatches)
    for tried_policy in policies_of_auto(problem) if policy is None else (policy,):
        yield tried_policy, request
    if policy is None and not request.quick:
        to_beat_s = min(map(_seconds, candidates))
        configurations = most_promising(problem, request, n_ubatches=n_ubatches, most=1, to_beat_s=to_beat_s)
        candidates += [(stock, replace(verified, policy=stock.name)) for verified in configurations]
    yield from _with_larger_ubatches(problem, replace(request, required=False), candidates)


def _with_larger_ubatches(
    problem: Problem, request: Request, candidates: list[PolicyPlan]
) -> Iterator[tuple[Policy, Request]]:
    """Yield policies again with larger micro-batches, the most promising first, while one is predicted to win. Skips
    policies that keep their micro-batch, placements whose micro-batch had to be lowered, and placements without a
    device, which stream nothing."""
    n_layer, (_, first) = problem.graph.n_layer, min(candidates, key=_seconds)
    grow = [
        (policy, verified) for policy, verified in candidates
        if not policy.keeps_ubatch and verified.workload == request.workload
        and verified.placement.uses_device(n_layer)
    ]  # fmt: skip
    promises = [
        (seconds_in(problem, verified, n, request.phase), n, i)
        for n in request.n_ubatches for i, (_, verified) in enumerate(grow)
    ]  # fmt: skip
    for promised_s, n_ubatch, i in sorted(promises):
        if promised_s >= min(map(_seconds, candidates)):
            return
        larger = replace(request, workload=replace(request.workload, n_ubatch=n_ubatch))
        yield grow[i][0], larger
        policy, verified = candidates.pop()
        if verified.workload == larger.workload and verified.placement.uses_device(n_layer):
            gain = 1 - verified.placement.seconds / first.placement.seconds
            note = f"raised from {first.workload.n_ubatch} to {n_ubatch} tokens: predicted to take {gain:.0%} less time"
            candidates.append((policy, replace(verified, notes=(f"micro-batch {note}", *verified.notes))))


def _seconds(candidate: PolicyPlan) -> float:
    return candidate[1].placement.seconds


def policies_of_auto(problem: Problem) -> tuple[Policy, ...]:
    """The policies among which `auto` takes the fastest, besides stock llama.cpp's own options (_tries): whole
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
