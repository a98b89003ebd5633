"""From a policy's name to a verified placement: the policies of `auto`, and the micro-batch.

A weight that is streamed, by the split back end or by llama.cpp itself, is read once a micro-batch, whatever its size
(ScheInfer computes a prompt of 1024 tokens in one pass). A larger one costs device memory: compute buffers and
activations grow with it. So a placement is searched for anew with it, but only where the one that was found would
already gain by such passes.

Pure but for the problem's probe, which answers what a placement puts on the device (a no_alloc load).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import STOCK_BATCH, Options
from oallama.core.types import CPU_DEVICE, Phase, Workload
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.policies.registry import POLICIES as POLICIES
from oallama.planner.policies.registry import Asked, Policy, Rules
from oallama.planner.policies.sliced import EXPERTS, has_hot, hot_fault
from oallama.planner.policies.stock import FIT, STOCK, most_promising
from oallama.planner.price import price
from oallama.planner.problem import Problem
from oallama.planner.slicer import slicer_of
from oallama.planner.verify import on_cpu, verify

PROMPT_STEP = 256
"""Tokens that a prompt is rounded up to: those of `oallama run` are estimated from its bytes."""


def larger_ubatches(workload: Workload, asked: Options) -> tuple[int, ...]:
    """Micro-batches above the workload's that may suit it, ascending: doubled, and the whole prompt at once, up to
    n_batch. None if the user fixed it with -ub."""
    if asked.n_ubatch is not None:
        return ()
    whole = -(-workload.n_prompt // PROMPT_STEP) * PROMPT_STEP
    most = min(whole, workload.n_ctx, asked.n_batch or STOCK_BATCH)
    sizes = []
    n_ubatch = 2 * workload.n_ubatch
    while n_ubatch < most:
        sizes.append(n_ubatch)
        n_ubatch *= 2
    return (*sizes, most) if most > workload.n_ubatch else ()


def seconds_in(problem: Problem, decision: VerifiedPlan, n_ubatch: int, phase: Phase) -> float:
    """Predicted seconds of a phase with the decision's placement as it is, in micro-batches of n_ubatch, whatever
    memory these need."""
    placement, workload = decision.placement, replace(decision.workload, n_ubatch=n_ubatch)
    if placement.token_assignment:
        placement = slicer_of(problem, workload, placement).with_n_g(placement)
    return price(problem, workload, placement).over(phase)


def with_larger_ubatch(
    problem: Problem,
    asked: Asked,
    found: Mapping[str, VerifiedPlan],
    policies: Sequence[Policy],
    n_ubatches: Sequence[int],
) -> VerifiedPlan:
    """The decision with the least seconds: the best of those found, or a faster one with a larger micro-batch.

    found: by policy. Another system's policy keeps its micro-batch; so does a placement whose memory was short already,
    and one with nothing on the device, where nothing is streamed. The others are searched for anew in the order of what
    they promise, and only where that would win.
    """
    best = first = min(found.values(), key=lambda decision: decision.placement.seconds)
    to_beat, n_layer = first.placement.seconds, problem.graph.n_layer
    grow = [
        policy for policy in policies
        if not policy.published and (proposal := found[policy.name]).workload == asked.workload
        and proposal.placement.uses_device(n_layer)
    ]  # fmt: skip
    promises = [
        (seconds_in(problem, found[one.name], n, asked.phase), n, i) for n in n_ubatches for i, one in enumerate(grow)
    ]
    for promised_s, n_ubatch, i in sorted(promises):
        if promised_s >= to_beat:
            break
        larger = replace(asked, workload=replace(asked.workload, n_ubatch=n_ubatch))
        try:
            proposal = grow[i].decide(problem, larger)
        except DoesNotFit:
            continue
        fits = proposal.workload == larger.workload and proposal.placement.uses_device(n_layer)
        if fits and proposal.placement.seconds < to_beat:
            best, to_beat = proposal, proposal.placement.seconds
    if best is first:
        return first
    gain = 1 - best.placement.seconds / first.placement.seconds
    change = f"raised from {first.workload.n_ubatch} to {best.workload.n_ubatch} tokens"
    return replace(best, notes=(f"micro-batch {change}: predicted to take {gain:.0%} less time", *best.notes))


POLICY_NAMES = ("auto", *(name for name in POLICIES if name != FIT))


def policy_named(policy: str | Policy) -> Policy:
    """Raises UsageError for an unknown policy."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}; choose from {', '.join((*POLICY_NAMES, FIT))}")
    return POLICIES[policy]


def decide(
    problem: Problem,
    policy: str | Policy,
    workload: Workload,
    phase: Phase,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    quick: bool = False,
    larger_ubatches: Sequence[int] = (),
) -> VerifiedPlan:
    """The placement of a policy for a workload; "auto" takes the one with the least predicted time. quick: look at
    less. larger_ubatches: micro-batches above the workload's that may be taken instead.

    "auto" with an affinity or a fill of the caller's choice is OATO, which they are for.

    Raises UsageError for an unknown policy, for affinity or fill with another policy than oato, or if the policy needs
    expert counts that are missing; DoesNotFit if the policy needs the device and not even KV and compute buffers of one
    layer fit.
    """
    is_auto = policy == "auto" and not rules.are_oatos
    chosen = policy_named("oato" if policy == "auto" else policy)
    if rules.are_oatos and chosen.name != "oato":
        raise UsageError(f"affinity and fill apply only to policy oato, not to {chosen.name}")
    asked = Asked(workload, phase, rules, quick, required=not is_auto)
    if problem.profile.device == CPU_DEVICE:
        return on_cpu(problem, workload, phase)
    policies = [chosen]
    if is_auto:
        most = "scheinfer" if hot_fault(problem) else EXPERTS  # that has the most choices
        names = ("cpu", most) if problem.slices_only else ("oato", "layers", "cpu", most)
        policies = [POLICIES[name] for name in names]
    found = {each.name: each.decide(problem, asked) for each in policies}
    if chosen.name == FIT:
        return found[FIT]
    if is_auto and not (quick or problem.slices_only):
        best_s = min(decision.placement.seconds for decision in found.values())
        for strongest in most_promising(problem, asked, n_ubatches=larger_ubatches, most=1, to_beat_s=best_s):
            found[STOCK] = replace(strongest, policy=STOCK)
            policies.append(POLICIES[STOCK])
    best = with_larger_ubatch(problem, asked, found, policies, larger_ubatches)
    if best.policy == EXPERTS and not has_hot(best):
        if not is_auto:
            return replace(best, notes=(*best.notes, "placing experts by use gains nothing in any layer"))
        best = replace(best, policy="scheinfer")
    if is_auto and best.policy == "scheinfer" and best.placement.is_sliced and not best.placement.streams:
        return replace(best, policy="split")
    return best


def decide_as_given(problem: Problem, placement: Placement, workload: Workload, policy: str) -> VerifiedPlan:
    """A given placement, priced for the workload and verified but not changed: `spare` may be negative."""
    return verify(problem, policy, workload, placement)
