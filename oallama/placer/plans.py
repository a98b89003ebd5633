"""Planning by a policy or from a given placement, with or without a profile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import UsageError
from oallama.core.types import FlashAttention, Phase, StockOptions, Workload
from oallama.cost.passes import Pass
from oallama.placer.model_on_device import ModelOnDevice
from oallama.plan.plan import Plan
from oallama.planner.decide import decide_as_given, policy_named
from oallama.planner.explain import physical_bound
from oallama.planner.memory import memory_breakdown
from oallama.planner.placement import (
    Placement,
    VerifiedPlan,
    placed_as_named,
    plan_record,
    unmeasured_cpu_record,
    unmeasured_record,
)
from oallama.planner.policies.registry import Policy, Rules
from oallama.planner.pure_plan import decide_with_attention


@dataclass(frozen=True, slots=True)
class Given:
    """A placement of the caller's own, in place of a policy: priced and probed, not changed. on_device: the names of
    the operators that go to the device. gpu_layers: layers, counted from the end, the output first, that have their
    norms and KV there. name: what the plan calls the policy. stock: of stock llama.cpp's own configuration, with its
    attention where the user asked for nothing; None: of ours."""

    on_device: Collection[str]
    gpu_layers: int
    name: str = "manual"
    stock: StockOptions | None = None

    def placement(self, on: ModelOnDevice) -> Placement:
        """Raises UsageError for invalid values."""
        return replace(placed_as_named(on.model, on.operators, self.on_device, self.gpu_layers), stock=self.stock)


def measured_plan(
    on: ModelOnDevice,
    policy: str | Policy | Given,
    workload: Workload,
    rules: Rules,
    attention_passes: Sequence[Pass] | None = None,
    larger_ubatches: Sequence[int] = (),
) -> Plan:
    """Make a plan with a profile; see Placer.plan."""
    if not isinstance(policy, Given):
        return plan_of(on, *decided(on, policy, workload, "mixed", rules, attention_passes, larger_ubatches))
    placement, name = policy.placement(on), policy.name

    def given(flash_attn: FlashAttention) -> VerifiedPlan:
        return decide_as_given(on.problem(flash_attn), placement, workload, name)

    if policy.stock is not None:
        return plan_of(on, given(on.options.flash_attn), on.options.flash_attn)
    return plan_of(on, *on.attention_rule.decide(given, on.profile(), workload, attention_passes))


def unmeasured_plan(
    on: ModelOnDevice,
    policy: str | Policy | Given,
    workload: Workload,
    attention_passes: Sequence[Pass] | None = None,
    stock_attention: bool = False,
) -> Plan:
    """Make a plan without a profile, which predicts nothing; see Placer.plan. stock_attention: llama.cpp decides where
    the user asked for nothing. Raises UsageError for a policy that needs times."""
    given = policy if isinstance(policy, Given) else None
    if given is None and policy != "cpu":
        raise UsageError("without measuring, only policy cpu and given placements can be planned")
    placement = (given or Given((), 0)).placement(on)
    is_stock = stock_attention or placement.stock is not None
    mode = on.options.flash_attn if is_stock else on.unmeasured_attention(workload, attention_passes)
    attention = on.attention_rule.attention(mode)
    taken = on.no_alloc_loads.taken(workload, placement, attention)
    if given is None:
        on.no_alloc_loads.check_host(workload, placement, attention)
        return replace(unmeasured_cpu_record(on.model, on.operators, workload, taken.weights_host), attention=attention)
    capacity = taken.device_free if on.options.vram is None else on.options.vram
    memory = memory_breakdown(
        capacity, on.options.vram_fill, taken.weights_gpu, taken.weights_host, taken.kv, taken.compute
    )
    plan = unmeasured_record(on.model, on.operators, workload, placement, memory, given.name, str(on.device))
    return replace(plan, attention=attention)


def decided(
    on: ModelOnDevice,
    policy: str | Policy,
    workload: Workload,
    phase: Phase,
    rules: Rules,
    attention_passes: Sequence[Pass] | None = None,
    larger_ubatches: Sequence[int] = (),
) -> tuple[VerifiedPlan, FlashAttention]:
    """The decision of a policy and its attention mode. larger_ubatches: micro-batches above the workload's that may
    be taken instead."""
    if policy != "auto":
        policy_named(policy)  # before anything is measured
    rule, profile = on.attention_rule, on.profile()
    with on.no_alloc_loads.together():
        return decide_with_attention(
            on.problem, rule, profile, policy, workload, phase, rules, attention_passes, larger_ubatches
        )


def plan_of(on: ModelOnDevice, decision: VerifiedPlan, flash_attn: FlashAttention) -> Plan:
    """The plan of a decision, with its bound. Raises DoesNotFit if the host's memory does not hold it."""
    from oallama.profile.machine import fingerprint_key

    machine = fingerprint_key(on.profile().fingerprint)
    plan = plan_record(decision, on.model, on.operators, str(on.device), machine)
    bound = physical_bound(on.problem(flash_attn), plan.workload, plan.memory)
    attention = on.attention_rule.attention(flash_attn)
    on.no_alloc_loads.check_host(plan.workload, decision.placement, attention)
    return replace(plan, attention=attention, bound=bound, notes=with_doubt(on, plan.notes))


def with_doubt(on: ModelOnDevice, notes: tuple[str, ...]) -> tuple[str, ...]:
    """The notes with what makes times of the profile doubtful, once."""
    from oallama.profile.busy import doubt

    return tuple(dict.fromkeys((*notes, *filter(None, [doubt(on.profile())]))))
