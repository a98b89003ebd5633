"""A draft model beside a model: what it takes of the device and in time, and how many drafts pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, DecodeStep, Draft, Predicted, Workload
from oallama.core.units import format_bytes
from oallama.model.gguf_file import GgufArray
from oallama.planner.memory import vram_beside
from oallama.planner.placement import Placement, placed_as_named
from oallama.planner.price import price
from oallama.profile.acceptance import ENOUGH_STEPS, Acceptance, read_acceptance

if TYPE_CHECKING:
    from oallama.placer.placer import Placer
    from oallama.plan.plan import Plan

MOST_VOCABULARY_DIFFERENCE = 128  # tokens (llama.cpp b11549, common/speculative.cpp)
FIRST_COMPARED_TOKEN = 5  # those before may be called otherwise


class Drafter:
    """A draft model on the device of a placer, whole; on the CPU where there is no device."""

    def __init__(self, placer: Placer, path: str) -> None:
        """Raises ModelFileError, and UsageError for a model of another vocabulary."""
        options = Options(
            device=str(placer.device), threads=placer.threads, n_ctx=placer.options.n_ctx,
            n_ubatch=placer.options.n_ubatch,
        )  # fmt: skip
        self.placer = type(placer).of_file(path, options)
        check_same_vocabulary(placer.model.path, path)
        self._on_device, self._fingerprint = placer.has_device, placer.model.fingerprint
        self._problem = cache(self.placer.problem)

    @cached_property
    def acceptance(self) -> Acceptance:
        """What is known of its drafts."""
        return read_acceptance(self._fingerprint, self.placer.model.fingerprint)

    @cached_property
    def _placed(self) -> Placement:
        model, operators = self.placer.model, self.placer.operators
        names = [operator.name for operator in operators] if self._on_device else []
        return placed_as_named(model, operators, names, model.n_layer + 1 if self._on_device else 0)

    def needs(self, workload: Workload, attention: Attention) -> tuple[int, int]:
        """Bytes of the host and of the device that it takes beside the model's context. workload, attention: of
        the model. Raises what a no_alloc load raises."""
        context = Workload(1, 1, workload.n_ctx, workload.n_ubatch)
        attention = Attention(attention.flash_attn)  # llama-server keeps the draft model's KV cache in F16
        on_host, on_device = self.placer.no_alloc_loads.sides(context, self._placed, attention)
        if self._on_device:
            on_device += self._problem(attention.flash_attn).runtime_bytes(context)
        return on_host, on_device

    def draft(self, workload: Workload, attention: Attention, accepted: Sequence[float]) -> Draft:
        """As many drafts as there are acceptance rates. Raises as needs."""
        on_host, on_device = self.needs(workload, attention)
        path = self.placer.model.path
        return Draft("draft-simple", len(accepted), path, self._on_device, on_device, on_host, tuple(accepted))

    def step(self, workload: Workload, attention: Attention, accepted: Sequence[float]) -> DecodeStep:
        """The decode step that drafts of these acceptance rates make. For each step llama-server has the draft model
        make one draft after another, and then read the tokens that the model has checked; it reads prompts as well
        (b11549, common/speculative.cpp)."""
        n_draft, n_parallel = len(accepted), workload.step.n_parallel
        one_by_one, checked = (self._price(workload, attention, DecodeStep(n_parallel, n)) for n in (0, n_draft))
        return DecodeStep(
            n_parallel, n_draft, sum(accepted), n_draft * one_by_one.tpot_s + checked.tpot_s, one_by_one.ttft_s
        )

    def _price(self, workload: Workload, attention: Attention, step: DecodeStep) -> Predicted:
        return price(self._problem(attention.flash_attn), replace(workload, step=step), self._placed)


def planned_with_drafts(
    placer: Placer,
    drafter: Drafter,
    workload: Workload,
    plan: Callable[[Placer, Workload], Plan],
    accepted: Sequence[float] = (),
) -> Plan:
    """The plan with the number of drafts, 0 included, that is predicted to take the least time for the workload. plan:
    makes a plan with a placer. accepted: acceptance rates by position; (): as measured, else as published.

    The number is chosen for a plan, which is then made for it, until it stays: the number hardly depends on the plan.
    Raises DoesNotFit where the draft model leaves the device no room.
    """
    accepted = accepted or drafter.acceptance.rates
    plain = plan(placer, workload)
    attention = placer.attention_for(plain)
    beside = placer_beside(placer, drafter.needs(workload, attention)[1], plain.memory.limit)

    @cache
    def with_step(n_draft: int) -> Workload:
        return replace(workload, step=drafter.step(workload, attention, accepted[:n_draft]))

    made: dict[int, Plan] = {}
    n_draft = min(2, len(accepted))
    while n_draft not in made:
        made[n_draft] = now = plan(beside, with_step(n_draft))
        seconds = {
            n: beside.price(now, replace(with_step(n), n_ubatch=now.workload.n_ubatch)).total_s
            for n in range(1, len(accepted) + 1)
        }
        n_draft = min(seconds, key=lambda n: seconds[n])
    best = min(made, key=lambda n: _total_s(made[n]))
    if _total_s(made[best]) >= _total_s(plain):
        return replace(plain, notes=(*plain.notes, "no drafts: they are predicted to cost more than they save"))
    draft = drafter.draft(workload, attention, accepted[:best])
    side, n_steps = "on the device" if draft.on_device else "on the CPU", drafter.acceptance.n_steps
    source = f"measured in {n_steps} steps" if n_steps >= ENOUGH_STEPS else "published rates; none measured here yet"
    note = (
        f"drafts: {best} a step by {drafter.placer.model.name or 'the draft model'}, "
        f"{format_bytes(draft.device_bytes or draft.host_bytes)} {side}; {sum(draft.accepted):.2f} expected to be "
        f"accepted ({source})"
    )
    return replace(made[best], draft=draft, notes=(*made[best].notes, note))


def _total_s(plan: Plan) -> float:
    if plan.predicted is None:
        raise UsageError("drafts are planned by predicted times; use a policy that predicts some")
    return plan.predicted.total_s


def placer_beside(placer: Placer, n_bytes: int, limit: int) -> Placer:
    """A placer that keeps so many bytes of the device free for a draft model. limit: bytes that a plan may take. Raises
    DoesNotFit."""
    if not n_bytes:
        return placer
    said = "the draft model", "use a smaller one, or a shorter context (-c)"
    vram = vram_beside(limit, placer.options.vram_fill, n_bytes, str(placer.device), *said)
    options = replace(placer.options, vram=vram)
    return type(placer)(placer.model, placer.operators, placer.tensor_names, options, placer.profile())


def check_same_vocabulary(path: str, draft_path: str) -> None:
    """Raises UsageError where llama.cpp would not let one model draft for the other, ModelFileError."""
    from oallama.model.gguf_reader import read_gguf

    kinds, tokens = [], []
    for metadata in (read_gguf(each).metadata for each in (path, draft_path)):
        kinds.append(metadata.get("tokenizer.ggml.model"))
        found = metadata.get("tokenizer.ggml.tokens")
        tokens.append(list(found.raw_strings()) if isinstance(found, GgufArray) else [])
    apart = abs(len(tokens[0]) - len(tokens[1])) > MOST_VOCABULARY_DIFFERENCE
    n = min(map(len, tokens))
    alike = tokens[0][FIRST_COMPARED_TOKEN:n] == tokens[1][FIRST_COMPARED_TOKEN:n]
    if kinds[0] != kinds[1] or apart or not alike:
        raise UsageError(
            f"the draft model {draft_path} has another vocabulary than {path}; use a smaller model of the same family"
        )
