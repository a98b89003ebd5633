"""From a policy's name to a verified placement: what `auto` chooses among, and with which micro-batch.

Pure but for the problem's probe, which answers what a placement puts on the device (a no_alloc load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oallama.core.errors import UsageError
from oallama.core.types import CPU_DEVICE, Phase, Workload
from oallama.place.microbatch import with_larger_ubatch
from oallama.place.placed import Placed
from oallama.place.policies.registry import POLICIES as REGISTERED
from oallama.place.policies.registry import Asked, Policy, Rules
from oallama.place.policies.sliced import EXPERTS, has_hot, hot_fault
from oallama.place.policies.stock import FIT
from oallama.place.problem import Decision, Problem, costs_of
from oallama.place.verify import Proposal, on_cpu, verified

POLICIES = ("auto", *(name for name in REGISTERED if name != FIT))


def policy_named(policy: str | Policy) -> Policy:
    """Raises UsageError for a policy that there is not."""
    if isinstance(policy, Policy):
        return policy
    if policy not in REGISTERED:
        raise UsageError(f"there is no policy {policy!r}; choose one of {', '.join((*POLICIES, FIT))}")
    return REGISTERED[policy]


def decide(
    problem: Problem,
    policy: str | Policy,
    load: Workload,
    phase: Phase,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    quick: bool = False,
    larger_ubatches: Sequence[int] = (),
) -> Decision:
    """The placement of a policy for a workload; "auto" takes the one with the least predicted time. quick: look at
    less. larger_ubatches: micro-batches above the workload's that may be taken instead.

    "auto" with an affinity or a fill of the caller's choice is OATO, which they are for.

    Raises UsageError for a policy that there is not, that knows no affinity and fill where these are chosen, or that
    needs to know which experts are used where that is not known; DoesNotFit where the policy needs the device and not
    even KV and compute buffers of one layer fit.
    """
    is_auto = policy == "auto" and not rules.are_oatos
    chosen = policy_named("oato" if policy == "auto" else policy)
    if rules.are_oatos and chosen.name != "oato":
        raise UsageError(f"affinity and fill say how oato places; policy {chosen.name} does not use them")
    asked = Asked(load, phase, rules, quick, required=not is_auto)
    if problem.profile.device == CPU_DEVICE:
        return on_cpu(problem, load, phase)
    policies = [chosen]
    if is_auto:
        most = "scheinfer" if hot_fault(problem.operators, problem.routing) else EXPERTS  # that has the most choices
        names = ("cpu", most) if problem.slices_only else ("oato", "layers", "cpu", most)
        policies = [REGISTERED[name] for name in names]
    found = {one.name: one.decide(problem, asked) for one in policies}
    if chosen.name == FIT:
        return found[FIT]
    best = with_larger_ubatch(problem, asked, found, policies, larger_ubatches)
    slices = best.placed.slices
    if best.policy == EXPERTS and not has_hot(best):
        if not is_auto:
            return replace(best, notes=(*best.notes, "no layer's experts are worth placing by use"))
        best = replace(best, policy="scheinfer")
    if is_auto and best.policy == "scheinfer" and slices is not None and not slices.streams:
        return replace(best, policy="split")
    return best


def decide_as_given(problem: Problem, placed: Placed, load: Workload, policy: str) -> Decision:
    """A placement of the caller's own, priced for the workload and probed but not changed: `spare` may be negative."""
    return verified(problem, policy, Proposal(load, costs_of(problem, load, "mixed"), placed))
