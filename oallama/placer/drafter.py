"""Drafters (a draft model, or the model's MTP layer): their memory, their time, and the best number of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from oallama.core.errors import DraftDoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, DecodeStep, Draft, ModelInfo, Workload
from oallama.core.units import format_bytes
from oallama.model.gguf_file import GgufArray
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.mtp import mtp_model
from oallama.model.operators import operators
from oallama.planner.memory import vram_beside
from oallama.planner.placement import Placement, placed_as_named
from oallama.planner.price import price
from oallama.planner.problem import Problem, costs_of
from oallama.profile.acceptance import ENOUGH_STEPS, PUBLISHED, Acceptance, read_acceptance

if TYPE_CHECKING:
    from oallama.placer.placer import Placer
    from oallama.plan.plan import Plan

MOST_VOCABULARY_DIFFERENCE = 128  # tokens (llama.cpp b11549, common/speculative.cpp)
FIRST_COMPARED_TOKEN = 5  # those before may be called otherwise


class Drafter(ABC):
    """A source of drafts for the model of `target`. placer: of the draft model or the MTP layer."""

    flags: tuple[str, ...]  # that ask for it
    identity: str  # equal for drafters that make equal drafts
    name: str  # in notes
    least_bytes = 0  # of the device, of its weights, that plans beside it must leave free
    most_drafts = len(PUBLISHED)

    def __init__(self, target: Placer, placer: Placer) -> None:
        self.placer, self._target = placer, target
        self._problem = cache(placer.problem)

    @cached_property
    def acceptance(self) -> Acceptance:
        """Recorded acceptance of its drafts."""
        return read_acceptance(self._target.model.fingerprint, self.placer.model.fingerprint)

    def reserves(self, workload: Workload, attention: Attention) -> int:
        """Device bytes that plans must leave free for it."""
        return 0

    @abstractmethod
    def step(
        self, workload: Workload, accepted: Sequence[float], attention: Attention, block_on_device: bool
    ) -> DecodeStep:
        """The decode step with drafts of these acceptance rates. workload: without drafts; attention: the model's;
        block_on_device: whether the model's MTP layer is there."""

    @abstractmethod
    def draft(self, plan: Plan, accepted: Sequence[float]) -> Draft:
        """The Draft of a plan, with one draft per acceptance rate. Raises what a no_alloc load raises."""


class DraftModel(Drafter):
    """A draft model, whole on the device of a placer, or on the CPU without a device."""

    def __init__(self, target: Placer, path: str) -> None:
        """Raises ModelFileError, and UsageError for a model of another vocabulary."""
        options = Options(
            device=str(target.device), threads=target.threads, n_ctx=target.options.n_ctx,
            n_ubatch=target.options.n_ubatch,
        )  # fmt: skip
        super().__init__(target, type(target).of_file(path, options))
        check_same_vocabulary(target.model.path, path)
        model = self.placer.model
        self.flags, self.identity = ("-md", path), f"draft-simple {model.fingerprint}"
        self.name = model.name or "the draft model"
        self._on_device = target.has_device
        self.least_bytes = sum(operator.bytes for operator in self.placer.operators) if self._on_device else 0

    @cached_property
    def _placed(self) -> Placement:
        return _whole(self.placer, self._on_device)

    def needs(self, workload: Workload, attention: Attention) -> tuple[int, int]:
        """(host bytes, device bytes) of the draft model. workload, attention: the model's. Raises what a no_alloc load
        raises."""
        context = Workload(1, 1, workload.n_ctx, workload.n_ubatch, step=DecodeStep(n_slots=workload.step.n_slots))
        attention = Attention(attention.flash_attn)  # llama-server keeps the draft model's KV cache in F16
        on_host, on_device = self.placer.no_alloc_loads.sides(context, self._placed, attention)
        if self._on_device:
            on_device += self._problem(attention.flash_attn).runtime_bytes(context)
        return on_host, on_device

    def reserves(self, workload: Workload, attention: Attention) -> int:
        return self.needs(workload, attention)[1]

    def draft(self, plan: Plan, accepted: Sequence[float]) -> Draft:
        on_host, on_device = self.needs(plan.workload, self._target.attention_for(plan))
        path = self.placer.model.path
        return Draft("draft-simple", len(accepted), path, self._on_device, on_device, on_host, tuple(accepted))

    def step(
        self, workload: Workload, accepted: Sequence[float], attention: Attention, block_on_device: bool
    ) -> DecodeStep:
        """The decode step. In each step the draft model makes drafts one by one, then reads the tokens that the model
        has checked; it also reads prompts (b11549, common/speculative.cpp)."""
        n_draft, problem = len(accepted), self._problem(attention.flash_attn)
        one_by_one, checked = (
            price(problem, replace(workload, step=replace(workload.step, n_draft=n)), self._placed)
            for n in (0, n_draft)
        )
        return replace(
            workload.step, n_draft=n_draft, accepted=sum(accepted), draft_prompt_s=one_by_one.ttft_s,
            draft_s=n_draft * one_by_one.tpot_s + checked.tpot_s,
        )  # fmt: skip


class MtpDrafter(Drafter):
    """A model's MTP layer, whole on the device if the plan has a layer there. If it shares the output with
    the model, the output's time is priced with the model's operators (cost/whole.py), so that plans count all its uses.
    Its memory is part of every load of the model for such a step (run/no_alloc_loads.py)."""

    name, identity, flags = "the model's MTP layer", "draft-mtp", ("--spec", "mtp")

    def __init__(self, target: Placer) -> None:
        """Raises ModelFileError, and UsageError for a model without such a block, or with several."""
        gguf = read_gguf(target.model.path)
        block = mtp_model(gguf)
        model = replace(model_info(block), file_bytes=sum(tensor.n_bytes for tensor in block.tensors))
        options = Options(device=str(target.device), threads=target.threads, n_ctx=target.options.n_ctx)
        names = [tensor.name for tensor in block.tensors]
        super().__init__(target, type(target)(model, operators(block), names, options))
        self._shares_output = not any("shared_head_head" in tensor.name for tensor in gguf.tensors)

    def draft(self, plan: Plan, accepted: Sequence[float]) -> Draft:
        loads, attention = self._target.no_alloc_loads, self._target.attention_for(plan)
        placement = self._target.placed(plan)
        without_drafts = replace(plan.workload, step=replace(plan.workload.step, n_draft=0, mtp=False))
        with_block, without_block = (
            loads.sides(workload, placement, attention) for workload in (plan.workload, without_drafts)
        )
        on_host, on_device = (max(0, a - b) for a, b in zip(with_block, without_block, strict=True))
        return Draft("draft-mtp", len(accepted), "", _has_last_block(plan), on_device, on_host, tuple(accepted))

    def step(
        self, workload: Workload, accepted: Sequence[float], attention: Attention, block_on_device: bool
    ) -> DecodeStep:
        """The decode step. In each step the block makes drafts one by one, then reads the tokens that the model has
        checked, without logits; it also reads prompts (b11549, common/speculative.cpp)."""
        n_draft, problem, step = len(accepted), self._problem(attention.flash_attn), workload.step
        placement = _whole(self.placer, block_on_device)

        def seconds(n_tokens: int, logits: bool) -> float:
            """Seconds of a pass over n_tokens tokens of each request."""
            pass_workload = replace(workload, step=replace(step, n_draft=n_tokens - 1))
            whole_s = price(problem, pass_workload, placement).tpot_s
            return whole_s if logits else whole_s - self._output_s(problem, pass_workload, placement)

        batch = min(workload.n_prompt, workload.largest_batch)
        prompt_s = seconds(max(1, batch // step.n_parallel), False) * workload.n_prompt / batch
        drafted_s = n_draft * seconds(1, not self._shares_output)
        return replace(
            step, n_draft=n_draft, accepted=sum(accepted), draft_s=drafted_s + seconds(n_draft + 1, False),
            draft_prompt_s=prompt_s, mtp=True, shares_output=self._shares_output,
        )  # fmt: skip

    def _output_s(self, problem: Problem, workload: Workload, placement: Placement) -> float:
        """Seconds of the output in a decode step."""
        costs = costs_of(problem, workload, "decode", placement.llama_uses_device(problem.graph.n_layer))
        last = costs.operators[-1]
        return last.t_gpu_s if placement.on_device[-1] and last.t_gpu_s is not None else last.t_cpu_s


def _has_last_block(plan: Plan) -> bool:
    """Whether the model's MTP layer is on the device; llama.cpp counts the output as a layer behind it."""
    return plan.n_gpu_layers >= 2


def _whole(placer: Placer, on_device: bool) -> Placement:
    """All of a model on the device, or on the CPU."""
    names = [operator.name for operator in placer.operators if on_device]
    return placed_as_named(placer.model, placer.operators, names, placer.model.n_layer + 1 if on_device else 0)


def planned_with_drafts(
    placer: Placer,
    drafter: Drafter,
    workload: Workload,
    plan: Callable[[Placer, Workload], Plan],
    accepted: Sequence[float] = (),
) -> Plan:
    """The plan with the number of drafts (0 included) with the least predicted time for the workload. plan: makes a
    plan with a placer. accepted: acceptance rates by position; (): as measured, else as published.

    Alternates between choosing the number for a plan and making the plan for that number, until it no longer changes,
    as the number hardly depends on the plan. Raises DraftDoesNotFit if the draft model leaves the device no room.
    """
    accepted = (accepted or drafter.acceptance.rates)[: drafter.most_drafts]
    plain = plan(placer, workload)
    beside = placer_beside(placer, drafter.reserves(workload, placer.attention_for(plain)), plain.memory.limit)

    def with_step(n_draft: int, base: Plan) -> Workload:
        step = drafter.step(workload, accepted[:n_draft], placer.attention_for(base), _has_last_block(base))
        return replace(workload, step=step, n_ubatch=base.workload.n_ubatch)

    plans: dict[int, Plan] = {}
    current, n_draft = plain, min(2, len(accepted))
    while n_draft not in plans:
        current = plan(beside, replace(with_step(n_draft, current), n_ubatch=workload.n_ubatch))
        with_drafts = with_step(n_draft, current)  # the drafter may be elsewhere than beside the plan before
        plans[n_draft] = current = replace(current, workload=with_drafts, predicted=beside.price(current, with_drafts))
        seconds = {n: beside.price(current, with_step(n, current)).total_s for n in range(1, len(accepted) + 1)}
        n_draft = min(seconds, key=lambda n: seconds[n])
    best = min(plans, key=lambda n: _total_s(plans[n]))
    if _total_s(plans[best]) >= _total_s(plain):
        return replace(plain, notes=(*plain.notes, "no drafts: they are predicted to cost more than they save"))
    draft = drafter.draft(plans[best], accepted[:best])
    side, n_steps = "on the device" if draft.on_device else "on the CPU", drafter.acceptance.n_steps
    source = f"measured in {n_steps} steps" if n_steps >= ENOUGH_STEPS else "published rates; none measured here yet"
    note = (
        f"drafts: {best} a step by {drafter.name}, "
        f"{format_bytes(draft.device_bytes or draft.host_bytes)} {side}; {sum(draft.accepted):.2f} expected to be "
        f"accepted ({source})"
    )
    return replace(plans[best], draft=draft, notes=(*plans[best].notes, note))


def _total_s(plan: Plan) -> float:
    if plan.predicted is None:
        raise UsageError("drafts are planned by predicted times; use a policy that predicts some")
    return plan.predicted.total_s


def placer_beside(placer: Placer, n_bytes: int, limit: int) -> Placer:
    """A placer that keeps n_bytes of the device free for a draft model. limit: bytes that a plan may take. Raises
    DraftDoesNotFit."""
    if not n_bytes:
        return placer
    check_room(placer, n_bytes, limit)
    vram = vram_beside(limit, placer.options.vram_fill, n_bytes, str(placer.device), "", "")
    return placer.with_options(placer.profile(), vram=vram)


def check_room(placer: Placer, n_bytes: int, limit: int) -> None:
    """Raises DraftDoesNotFit if a draft model takes all usable memory of the device."""
    if n_bytes and n_bytes >= limit:
        advice = "the draft model", "use a smaller one, or a shorter context (-c)"
        raise DraftDoesNotFit(n_bytes, limit, str(placer.device), *advice)


def beside_drafts(
    placer: Placer, drafter: Drafter, workload: Workload, accepted: Sequence[float], limit: int
) -> tuple[Placer, int, DecodeStep]:
    """(a placer that keeps the drafter's memory free, these bytes, the decode step with drafts of these acceptance
    rates), assuming that the model is whole on the device if there is one. limit: as in placer_beside. Raises
    DraftDoesNotFit."""
    n_bytes = drafter.reserves(workload, placer.attention)
    beside = placer_beside(placer, n_bytes, limit)
    return beside, n_bytes, drafter.step(workload, accepted, placer.attention, placer.has_device)


def draft_fingerprint(model: ModelInfo, draft: Draft | None) -> str | None:
    """Fingerprint of the model that makes the drafts; None for drafts without one. Raises ModelFileError,
    UsageError."""
    if draft is None or draft.kind == "ngram-simple":
        return None
    return read_gguf(draft.model_path).fingerprint if draft.model_path else mtp_model(read_gguf(model.path)).fingerprint


def check_same_vocabulary(path: str, draft_path: str) -> None:
    """Raises UsageError if llama.cpp would refuse the pair of models, ModelFileError."""
    kinds, tokens = [], []
    for metadata in (read_gguf(model_path).metadata for model_path in (path, draft_path)):
        kinds.append(metadata.get("tokenizer.ggml.model"))
        tokens_array = metadata.get("tokenizer.ggml.tokens")
        tokens.append(list(tokens_array.raw_strings()) if isinstance(tokens_array, GgufArray) else [])
    sizes_differ = abs(len(tokens[0]) - len(tokens[1])) > MOST_VOCABULARY_DIFFERENCE
    n = min(map(len, tokens))
    alike = tokens[0][FIRST_COMPARED_TOKEN:n] == tokens[1][FIRST_COMPARED_TOKEN:n]
    if kinds[0] != kinds[1] or sizes_differ or not alike:
        raise UsageError(
            f"the draft model {draft_path} has another vocabulary than {path}; use a smaller model of the same family"
        )
