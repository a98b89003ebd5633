"""--policy, --affinity, --fill, --prefetch and -ngl: the choice of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from oallama.cli.help import Group
from oallama.cli.output import log
from oallama.cli.records import as_record, count, declared_options, option_field
from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, Workload

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.planner.policies.registry import Policy, Rules


class PolicyName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """The name of a policy. The registry is loaded only to check or complete a name."""

    name = "policy"

    def _choice(self) -> click.Choice[str]:
        from oallama.planner.decide import POLICY_NAMES

        return click.Choice(POLICY_NAMES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._choice().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return self._choice().shell_complete(ctx, param, incomplete)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Values of --policy, -ngl and their rules; None if not given."""

    policy: str | None = option_field("--policy", type=PolicyName(), metavar="POLICY", group=Group.PLACEMENT,
        help="auto (default), oato, split, scheinfer, experts, layers, cpu, stock, fit.\f auto: the plan that tuning "
        "found; where nothing is tuned, see --tune; in plan, simulate and what-if the fastest by prediction; oato: "
        "whole operators, by GPU affinity; split: also operators split between CPU and device; scheinfer: also weights "
        "streamed to the device; experts: also the most used experts on the device; layers: whole layers, as "
        "llama.cpp's -ngl; cpu: only the CPU; stock: the fastest options of llama.cpp; fit: llama.cpp's own --fit. For "
        "comparison: other systems' (docs/policies.md).")  # fmt: skip
    n_gpu_layers: int | None = option_field("-ngl", "--gpu-layers", "--n-gpu-layers", type=count(0), metavar="N",
        group=Group.PLACEMENT, advanced=True,
        help="Put N layers on the device, counting the output as one; ignored without a device.")  # fmt: skip
    affinity: Any = option_field("--affinity", type=click.Choice(["default", "paper"]), default="default",
        group=Group.PLACEMENT, advanced=True,
        help="default: T' is the marginal cost of the edges; paper: Algorithm 1 as published. Without --policy, either "
        "this or --fill implies oato.")  # fmt: skip
    fill: Any = option_field("--fill", type=click.Choice(["continue", "full", "paper"]), default="continue",
        group=Group.PLACEMENT, advanced=True,
        help="continue: skip operators that do not fit or gain nothing; full: fill the device even without gain; "
        "paper: stop at the first operator that does not fit.")  # fmt: skip
    prefetch: Any = option_field("--prefetch", type=click.Choice(["ahead", "layer"]), group=Group.PLACEMENT,
        advanced=True, show_default="ahead",
        help="When to copy streamed weights. ahead: as soon as the device has room, across layers and tokens; layer: "
        "when their layer begins, as in ScheInfer.")  # fmt: skip

    def __post_init__(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        if self.n_gpu_layers is not None:
            if self.policy is not None and not (self.chosen and self.chosen.takes_ngl):
                raise UsageError(f"-ngl places whole layers, so it cannot be combined with --policy {self.policy}")
            if self.has_rules:
                raise UsageError("-ngl places whole layers and cannot be combined with --affinity, --fill, --prefetch")
        elif self.rules.need_oato and self.policy is not None and not (self.chosen and self.chosen.has_rules):
            raise UsageError(f"--affinity and --fill apply only to policy oato, not to --policy {self.policy}")
        elif self.prefetch is not None and self.chosen is not None and not self.chosen.streams:
            raise UsageError(f"--prefetch applies only to streamed weights; --policy {self.policy} streams none")

    @property
    def chosen(self) -> Policy | None:
        """Return the policy; None: the fastest by prediction."""
        from oallama.planner.policies.registry import find_policy

        return None if self.policy is None else find_policy(self.policy)

    @property
    def rules(self) -> Rules:
        from oallama.planner.policies.registry import Rules

        return Rules(self.affinity, self.fill, self.prefetch or "ahead")

    @property
    def has_rules(self) -> bool:
        """Whether --affinity, --fill or --prefetch is given."""
        return self.rules.need_oato or self.prefetch is not None

    @property
    def uses_device(self) -> bool:
        return self.chosen is None or self.chosen.uses_device

    @property
    def is_auto(self) -> bool:
        """Whether any policy may be used."""
        return self.chosen is None and self.n_gpu_layers is None and not self.has_rules

    def keeps_to_cpu(self, placer: Placer) -> bool:
        """Whether no weight can go to a device, so that measuring and planning are unnecessary."""
        return not (self.uses_device and placer.has_device)

    def plan(self, placer: Placer, workload: Workload) -> Plan:
        """Return the requested placement, by default `auto`; without a device -ngl is ignored, as in llama.cpp. Raises
        UsageError, DoesNotFit, and the placer's errors."""
        if self.n_gpu_layers is None:
            return placer.plan(self.policy or "auto", workload=workload, **asdict(self.rules))
        if not (placer.has_device or _profiles_device(placer)):
            return placer.plan("cpu", workload=workload)
        return whole_layers(placer, self.n_gpu_layers, workload)


def _profiles_device(placer: Placer) -> bool:
    """Whether a given profile is of a device, which need not be in this machine to plan for it."""
    profile = placer.known_profile
    return profile is not None and profile.device != CPU_DEVICE


def note_unused(placer: Placer, policy: PolicyOptions | None = None) -> None:
    """Note the options that have no effect without a device."""
    unused = _memory_limits(placer.options)
    if policy is not None and policy.n_gpu_layers:
        unused.append("-ngl")
    if policy is not None and policy.chosen is not None and policy.uses_device:
        unused.append(f"--policy {policy.policy}")
    if unused and not placer.has_device:
        _note_no_effect(unused, "without a device; choose one with --device")


def note_planned(options: Options) -> None:
    """Note that limits of the device's memory do not change a given plan."""
    limits = [*_memory_limits(options), *(["--vram-fill"] if options.vram_fill != Options().vram_fill else [])]
    if limits:
        _note_no_effect(limits, "with --plan, which sets the placement")


def _note_no_effect(options: Sequence[str], why: str) -> None:
    log(f"note: {' and '.join(options)} {'has' if len(options) == 1 else 'have'} no effect {why}")


def _memory_limits(options: Options) -> list[str]:
    asked = {"--vram": options.vram, "--gpu-weights": options.gpu_weights}
    return [option for option, value in asked.items() if value is not None]


def whole_layers(placer: Placer, n_gpu_layers: int, workload: Workload) -> Plan:
    """Return the plan of llama.cpp's -ngl: the last layers whole; the output counts as a layer, the last.

    Raises DoesNotFit.
    """
    from oallama.placer import Given

    n_layer = placer.model.n_layer
    n = min(n_gpu_layers, n_layer + 1)
    names = [o.name for o in placer.operators if o.layer_in(n_layer) > n_layer - n]
    plan = placer.plan(Given(names, n, "layers"), workload=workload)
    memory = plan.memory
    if memory.spare < 0:
        needed = memory.limit - memory.spare
        raise DoesNotFit(needed, memory.limit, placer.profile().device, f"-ngl {n_gpu_layers}", "lower -ngl")
    return plan


rules_options = as_record("policy", PolicyOptions, *declared_options(PolicyOptions, "affinity", "fill"))
"""The command gets `policy`, a PolicyOptions; its own --policy, where it has one, is part of that."""

policy_options = as_record("policy", PolicyOptions)
"""The command gets `policy`, a PolicyOptions."""
