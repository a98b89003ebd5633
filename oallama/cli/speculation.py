"""--spec, --model-draft and --expect-parallel: how many tokens a decode step computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Group
from oallama.cli.model_file import model_file
from oallama.cli.output import log
from oallama.cli.records import as_record, count, declared_options, option_field
from oallama.core.errors import UsageError
from oallama.core.types import NGRAM, DecodeStep, Workload

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.placer.drafter import Drafter
    from oallama.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class StepOptions:
    """spec: how drafts are made; None: by the draft model, if given. expected: requests in flight to plan for; None:
    the command's default. slots: the server's number of parallel requests. Raises UsageError for options that exclude
    each other."""

    spec: str | None = option_field("--spec", type=click.Choice(["none", "mtp", "ngram", "auto"]),
        metavar="none|mtp|ngram|auto", group=Group.PLACEMENT, advanced=True,
        show_default="auto with a draft model, else none",
        help="Speculative decoding.\f auto: use the draft model, with the number of drafts that is predicted to be "
        "fastest (may be 0); mtp: use the model's MTP layer, in the same way; ngram: draft text that "
        "repeats.")  # fmt: skip
    draft_model: str | None = option_field("-md", "--model-draft", type=click.Path(), metavar="MODEL",
        group=Group.MODEL, help="Draft model: a smaller model of the family.\f For speculative decoding.")  # fmt: skip
    expected: int | None = option_field("--expect-parallel", type=count(1, 256), metavar="N", group=Group.WORKLOAD,
        advanced=True, show_default="1; serve: half of --parallel",
        help="Requests in flight to plan for.\f Plans for more than one are not compared with llama.cpp's placement: "
        "tuning measures one request.")  # fmt: skip
    slots: int = 1

    def __post_init__(self) -> None:
        if self.draft_model is not None and self.spec in ("ngram", "mtp"):
            raise UsageError(f"--spec {self.spec} cannot be combined with --model-draft")

    @property
    def drafts(self) -> bool:
        return self._model is not None or self.spec in ("ngram", "mtp")

    @property
    def repeats(self) -> bool:
        """Whether drafts are of repeated text (n-grams), for one request. Such plans are not tuned."""
        return self.spec == "ngram" and self._is_of_one

    @property
    def _is_of_one(self) -> bool:
        """Whether one request at a time is expected."""
        return (self.expected or 1) == self.slots == 1

    @property
    def _model(self) -> str | None:
        return None if self.spec == "none" else self.draft_model

    def workload(self, workload: Workload) -> Workload:
        """Return the workload with the expected requests in flight."""
        if self.expected is None:
            return workload
        return replace(workload, step=DecodeStep(self.expected, n_slots=max(self.slots, self.expected)))

    def drafter(self, placer: Placer) -> Drafter | None:
        """Return the requested drafter; None without drafts, and for drafts of repeated text. Raises ModelFileError,
        UsageError."""
        from oallama.placer.drafter import DraftModel, MtpDrafter

        if self._model is not None or self.spec == "mtp":
            placer.check_one_device("a drafter")
        if self._model is not None:
            return DraftModel(placer, model_file(self._model))
        return MtpDrafter(placer) if self.spec == "mtp" else None

    def is_tuned(self, placer: Placer) -> bool:
        """Whether tuning measures plans with these drafts: a model's drafts, for one request."""
        return placer.drafter is not None and placer.has_device and self._is_of_one

    def tell_waiting(self, placer: Placer, plan: Plan) -> None:
        """Print that drafts start once tuning has found them faster. plan: the plan in use until then. Raises
        DraftDoesNotFit."""
        from oallama.placer.drafter import check_room

        if (drafter := placer.drafter) is not None:
            check_room(placer, drafter.least_bytes, plan.memory.limit)  # more of it is known once the card is timed
            log(
                "note: drafts start once `oallama tune` has measured that they are faster here; --no-tuned uses them "
                "now"
            )

    def plan(self, placer: Placer, workload: Workload, plan: Callable[[Placer, Workload], Plan]) -> Plan:
        """Return the plan with the requested drafts. Raises as planned_with_drafts."""
        from oallama.placer.drafter import planned_with_drafts

        if (drafter := placer.drafter or self.drafter(placer)) is not None:
            return planned_with_drafts(placer, drafter, workload, plan)
        if self.spec != "ngram":
            return plan(placer, workload)
        n_outputs = workload.n_outputs and NGRAM.n_draft + 1
        return replace(plan(placer, replace(workload, n_outputs=n_outputs)), draft=NGRAM)


(parallel_option,) = declared_options(StepOptions, "expected")
draft_options = as_record("step", StepOptions, *declared_options(StepOptions, "spec", "draft_model"))
step_options = as_record("step", StepOptions)
"""The command gets `step`, a StepOptions."""
