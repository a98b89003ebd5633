"""The placements of `oallama serve`: the requested one, and the model without its device, or without its server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.cli.output import log
from oallama.cli.placement_options import PlacementOptions
from oallama.cli.projector import ProjectorOptions
from oallama.cli.routing import counting
from oallama.cli.tuning import tuning_gain
from oallama.core.errors import OallamaError
from oallama.core.routing import ExpertCounts
from oallama.core.types import Workload
from oallama.device.rpc_link import lost_server
from oallama.device.spec import parse_device
from oallama.placer import Placer
from oallama.placer.engine import with_repeated_drafts
from oallama.placer.model_on_device import host_free_beside
from oallama.plan.plan import Plan
from oallama.planner.placement import unmeasured_cpu_record
from oallama.report.placement_page import Served, work_times
from oallama.report.text import policy_on
from oallama.run.plugin_report import PluginReport, runs_of
from oallama.run.program import STOCK_CACHE_MIB, ServerSettings, launch, prompt_cache_mib, served_plan

if TYPE_CHECKING:
    from oallama.run.process import Launch


@contextlib.contextmanager
def served_model(
    model: str,
    asked: PlacementOptions,
    workload_for: Callable[[Placer], Workload],
    pictures: ProjectorOptions,
    embeds: bool,
    count_experts: bool,
) -> Iterator[ServedModel]:
    """Yield the placements for the block; store counted uses of experts at its end. embeds: whether to offer embeddings
    if there is room; workload_for then reserves it. Raises UsageError for counting experts of a model without experts,
    and as reading, planning and measuring."""
    planned = asked.plan_for(model, workload_for, pictures)
    placer, plan = planned.placer, planned.plan
    if asked.plan_file is not None:
        plan.check(placer.model, placer.operators)
        plan = placer.as_asked(plan)
    reason = tuning_gain(placer, planned.workload, plan) if planned.is_untuned else _reason(placer, asked, plan)
    served = _timed(placer, plan, reason)
    placer = placer.on_devices_of(served.plan)
    if embeds:  # a measured or given plan may leave no room for them
        embedding_plan = placer.with_outputs(served.plan, 0)
        served = replace(served, plan=embedding_plan or served.plan)
        if embedding_plan is None:
            log(
                "note: no embeddings: the plan leaves too little device memory; use --no-tuned and no --plan to plan "
                "for them"
            )
    served = replace(served, plan=with_repeated_drafts(placer, served.plan))
    with counting(placer, count_experts) as count:
        yield ServedModel(placer, served, pictures, asked.plan_file is None, count)


class ServedModel:
    """wanted: the requested placement. fallback: the placement after the loss of the device or of an RPC server; None
    without a device.

    memory_kept: the plan was made now, with room for the projector. count: gets the uses of experts; None: not counted.
    """

    def __init__(
        self,
        placer: Placer,
        served: Served,
        pictures: ProjectorOptions,
        memory_kept: bool,
        count: Callable[[ExpertCounts], None] | None,
    ) -> None:
        self.placer, self._pictures, self._memory_kept, self._count = placer, pictures, memory_kept, count
        self._device = str(placer.found_device)
        self.wanted = self._completed(served, self._device)
        self.fallback = self._without_server() or self._without_device()
        if pictures.mmproj is not None:
            log(f"note: {self.wanted.plan.notes[-1]}")

    def _without_server(self) -> Served | None:
        """The model on the local devices, if the plan also uses an RPC server. Nothing is timed for it: it is only
        needed once the server is lost."""
        local = [str(member.device) for member in self.placer.local_members]
        if not local or len(local) == len(self.placer.members) or self.wanted.plan.device == "none":
            return None
        placer = self.placer.on_devices(local) if len(local) > 1 else self.placer.alone_on(local[0])
        timed = placer.known_profile is not None
        plan = placer.plan("auto" if timed else "fit", workload=self.wanted.plan.workload, measure=timed)
        served = _timed(placer, placer.as_asked(plan), "the RPC server was lost: running without it")
        return self._completed(served, str(placer.found_device))

    def _without_device(self) -> Served | None:
        """The same model without its device."""
        if not self.placer.has_device:
            return None
        wanted = self.wanted.plan
        weights = wanted.memory.weights_gpu + wanted.memory.weights_host
        record = unmeasured_cpu_record(self.placer.model, self.placer.operators, wanted.workload, weights)
        plan = replace(record, attention=wanted.attention)
        fallback = replace(self.wanted, plan=plan, reason="the device was lost: running on the CPU", times=())
        return self._completed(fallback, self._device)

    def launch(self, served: Served, folder: Path, program: Path, settings: ServerSettings) -> Launch:
        """Return the command that starts llama-server with a placement. settings: without a projector; cache_mib None:
        as much as the host has left."""
        n_beside = 0  # bytes of the host
        if (placed := self._pictures.placed(served.plan, self._memory_kept)) is not None:
            settings = replace(settings, projector=placed.path, projector_on_device=placed.on_device)
            n_beside = 0 if placed.on_device else placed.n_bytes
        if settings.cache_mib is None:
            settings = replace(settings, cache_mib=self._cache_mib(served, n_beside))
        placer = self.placer
        return launch(
            program, served.plan, placer.operators, placer.model.n_layer, placer.tensor_names, settings, folder,
            os.environ, self._count is not None,
        )  # fmt: skip

    def server_gone(self) -> str | None:
        """Return why an RPC server of the wanted placement counts as lost, else None: tries each server now."""
        return lost_server(parse_device(self._device))

    def keep(self, wanted: Sequence[PluginReport], fallback: Sequence[PluginReport]) -> None:
        """Add the times of split blocks to the model's history, for `oallama tune`, and count uses of experts. wanted,
        fallback: the plugin's reports of each start with these placements."""
        try:
            self.placer.keep_block_times(
                self.wanted.plan, runs_of(block for report in wanted for block in report.blocks)
            )
        except OallamaError as error:
            log(f"warning: this run's times were not saved: {error}")
        for report in (*wanted, *fallback):
            if self._count is not None:
                self._count(report.expert_counts(self.placer.operators, self.placer.model.n_expert))

    @property
    def embeds(self) -> bool:
        """Whether llama-server has the memory for embeddings."""
        return self.wanted.plan.workload.n_outputs == 0

    def _completed(self, served: Served, device: str) -> Served:
        """Name the device as llama-server does, `none` if the plan does not use it, choose layouts that the CPU has,
        and add a note of the projector."""
        plan, warnings = served_plan(served.plan, self.placer.operators, device, self._count is not None)
        for warning in warnings:
            log(f"warning: {warning}")
        placed = self._pictures.placed(plan, self._memory_kept)
        return replace(served, plan=plan if placed is None else placed.noted(plan))

    def _cache_mib(self, served: Served, n_beside: int) -> int | None:
        """Return the MiB of prompts that llama-server may cache, with the model and n_beside bytes in memory; None if
        the model's memory is unknown."""
        is_lost = served is self.fallback
        plan = self.wanted.plan if is_lost else served.plan
        try:
            mib = prompt_cache_mib(max(0, host_left(self.placer, plan, is_lost) - n_beside))
        except OallamaError:  # llama-server reports it better
            return None
        if mib < STOCK_CACHE_MIB and not is_lost:
            log(f"note: llama-server caches up to {mib} MiB of prompts, as host memory allows (--cache-ram)")
        return mib


def _reason(placer: Placer, options: PlacementOptions, plan: Plan) -> str:
    """The placement in use, and why, as a sentence."""
    if options.plan_file is not None:
        return f"using the plan {options.plan_file}, policy {plan.policy}"
    if options.policy.keeps_to_cpu(placer):
        found_none = options.policy.uses_device and placer.options.device in (None, "auto")
        return "no GPU found: running on the CPU" if found_none else "running on the CPU, as requested"
    if options.uses_tuning:
        return f"using {policy_on(plan.policy, plan.device)}, the fastest measured here"
    return f"using policy {plan.policy}, not compared with llama.cpp's placement"


def _timed(placer: Placer, plan: Plan, reason: str) -> Served:
    """Add predicted times if the machine was measured."""
    served = Served(placer.model, placer.operators, plan, reason)
    try:
        if placer.known_profile is None:
            return served
        simulation = placer.simulate(plan)
    except OallamaError:  # the prediction is optional
        return served
    predicted = plan.predicted or simulation.predicted
    return replace(served, plan=replace(plan, predicted=predicted), times=work_times(simulation))


def host_left(placer: Placer, plan: Plan, device_lost: bool = False) -> int:
    """Return the bytes of host memory that are left beside the model in a plan's placement; device_lost: beside the
    whole model on the CPU. Raises PlanError for a plan of another model, and as a no_alloc load."""
    placement = placer.placed(plan)
    on_host, on_device = placer.no_alloc_loads.sides(plan.workload, placement, placer.attention_for(plan))
    return host_free_beside(on_host + on_device if device_lost else on_host)
