"""Starts engines for a Placer: chooses llama-server's settings for a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.core.errors import UsageError
from oallama.core.routing import ExpertCounts
from oallama.core.types import NGRAM
from oallama.plan.plan import Plan
from oallama.run.engine import Engine
from oallama.run.load_checks import check_device, check_layers, device_of
from oallama.run.program import PROGRAM_VARIABLE, ServerSettings, find_program, launch, served_plan
from oallama.run.server_options import checked_options

if TYPE_CHECKING:
    from oallama.placer.placer import Placer
    from oallama.run.address import Address
    from oallama.run.process import Launch

POOLING = "mean"  # of embeddings, as `oallama serve` has it


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine's llama-server is started. chats: use the model's chat template if it has one. server_options:
    further options of llama-server. mmproj: a vision projector, for messages with pictures; mmproj_offload: on the
    device, where no plan counts its memory. interactive: a person may stop an answer; no embeddings. once: only one
    prompt is answered; no embeddings, and no prompt shares a prefix with an earlier one."""

    chats: bool = True
    server_options: Sequence[str] = ()
    mmproj: str | None = None
    mmproj_offload: bool = False
    interactive: bool = False
    once: bool = False


def with_repeated_drafts(placer: Placer, plan: Plan) -> Plan:
    """The plan with memory for the logits of its drafts of repeated text. Raises UsageError if it leaves the device no
    room for them, and as a no_alloc load."""
    if plan.draft is None or plan.draft.kind != NGRAM.kind:
        return plan
    plan_with_drafts = placer.with_outputs(plan, max(plan.workload.n_outputs, plan.draft.n_draft + 1))
    if plan_with_drafts is None:
        raise UsageError(f"the plan leaves {plan.device} no room for the logits of {plan.draft.n_draft} drafts")
    return plan_with_drafts


def open_engine(
    placer: Placer, plan: Plan, options: EngineOptions, on_expert_counts: Callable[[ExpertCounts], None] | None = None
) -> Engine:
    """Start llama-server with a plan, under the placer's options. on_expert_counts: as in Engine. Raises as
    Placer.engine."""
    server_options = checked_options(options.server_options)
    model, operators = placer.model, placer.operators
    placer.placed(plan)  # raises for another model's plan
    plan = placer.as_asked(plan)
    check_layers(plan, model.n_layer, operators)
    spec = device_of(plan, str(placer.device))
    counts = on_expert_counts is not None
    if not model.has_vocabulary:  # llama-server would abort
        raise UsageError("the model has no vocabulary to decode its tokens; use a file with a vocabulary")
    chats = options.chats and model.chat_template is not None  # else llama-server would use a default template
    program = find_program(os.environ.get(PROGRAM_VARIABLE) or None)
    embedding = None if options.interactive or options.once else placer.with_outputs(plan, 0)
    plan = embedding or with_repeated_drafts(placer, plan)
    needs = placer.load_needs(plan)
    named, warnings = served_plan(plan, operators, "none" if spec.is_none else str(placer.found_device), counts)
    check_device(plan, named.device, spec)

    def launch_server(address: Address, folder: Path) -> Launch:
        n_batch = placer.options.n_batch or (None if options.interactive else plan.workload.n_ubatch)
        settings = ServerSettings(
            address, 1, placer.threads, n_batch, Path(model.path).name, POOLING if embedding else None,
            cache_mib=0, chats=chats, shown=False, reuses_prefix=not options.once, more=server_options,
            projector=options.mmproj, projector_on_device=options.mmproj_offload,
        )  # fmt: skip
        names = placer.tensor_names
        return launch(program, named, operators, model.n_layer, names, settings, folder, os.environ, counts)

    return Engine(model, named, operators, launch_server, needs, warnings, on_expert_counts, chats)
