"""Planning by a policy or from a given placement, with or without a profile."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from oallama.core.errors import UsageError
from oallama.core.types import FlashAttention, MemoryBreakdown, StockOptions, Workload
from oallama.placer.model_on_device import ModelOnDevice
from oallama.plan.plan import Plan
from oallama.planner.decide import policy_named
from oallama.planner.memory import memory_breakdown, summed
from oallama.planner.placement import (
    Placement,
    VerifiedPlan,
    placed_as_named,
    placed_by_plan,
    unmeasured_cpu_record,
    unmeasured_record,
)
from oallama.planner.policies.registry import Policy, Request
from oallama.planner.problem import LoadBytes, Problem
from oallama.planner.verify import verify


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
        if not self.device_layers:
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


def unmeasured_plan(
    target: ModelOnDevice,
    policy: str | Policy | Given,
    workload: Workload,
    stock_attention: bool = False,
) -> Plan:
    """Make a plan without a profile, which predicts nothing; see Placer.plan. stock_attention: llama.cpp chooses flash
    attention unless the user did. Raises UsageError for a policy that needs times."""
    given = policy if isinstance(policy, Given) else None
    named_policy = None if isinstance(policy, Given) else policy_named(policy)
    if given is None and (named_policy is None or named_policy.uses_device):
        raise UsageError("without measuring, only policy cpu and given placements can be planned")
    placement = (given or Given((), 0)).placement(target)
    is_stock = stock_attention or placement.stock is not None
    mode = target.options.flash_attn if is_stock else target.unmeasured_attention(workload)
    attention = target.attention_rule.attention(mode)
    load = target.no_alloc_loads.taken(workload, placement, attention)
    if given is None:
        target.no_alloc_loads.check_host(workload, placement, attention)
        record = unmeasured_cpu_record(target.model, target.operators, workload, load.weights_host)
        return replace(record, attention=attention)
    if load.devices:
        loads = zip(target.members, load.devices, strict=True)
        memory = summed(tuple(unmeasured_memory(member, of_member) for member, of_member in loads), load.weights_host)
    else:
        memory = unmeasured_memory(target, load)
    model, operators = target.model, target.operators
    plan = unmeasured_record(model, operators, workload, placement, memory, given.name, str(target.device))
    return replace(plan, attention=attention)


def unmeasured_memory(target: ModelOnDevice, load: LoadBytes) -> MemoryBreakdown:
    """The memory breakdown of a load on one device."""
    capacity = load.device_free if target.options.vram is None else target.options.vram
    return memory_breakdown(
        capacity, target.options.vram_fill, load.weights_gpu, load.weights_host, load.kv, load.compute
    )


def checked(target: ModelOnDevice, plan: Plan) -> Plan:
    """A plan of the planner, for this machine. Raises DoesNotFit if the host's memory does not hold it."""
    from oallama.profile.machine import fingerprint_key

    placement = placed_by_plan(target.model.n_layer, target.operators, plan)
    target.no_alloc_loads.check_host(plan.workload, placement, target.attention_for(plan))
    return replace(
        plan, machine_fingerprint=fingerprint_key(target.profile().fingerprint), notes=with_doubt(target, plan.notes),
        device=str(target.device) if placement.uses_device(target.model.n_layer) else "none",
    )  # fmt: skip


def with_doubt(target: ModelOnDevice, notes: tuple[str, ...]) -> tuple[str, ...]:
    """The notes, with doubts about the profile's times added once."""
    from oallama.profile.busy import doubt

    return tuple(dict.fromkeys((*notes, *filter(None, [doubt(target.profile())]))))
