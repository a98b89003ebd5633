"""Classes of workloads that share a result. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oallama.core.types import Workload

Length = Literal["question", "page", "document"]

LENGTHS: dict[Length, tuple[int, int]] = {"question": (64, 128), "page": (512, 1024), "document": (2048, 1 << 31)}
"""(tokens of the representative prompt, tokens of the longest prompt) of each length class."""

N_GEN = 128  # tokens of the representative answer
LEAST_HISTORY = 1024  # tokens; a context that holds less history than this has no classes with history


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    """Prompts of one length class, in an empty context or after a history that fills half of it."""

    length: Length
    history: bool

    @property
    def name(self) -> str:
        """Its name in sentences."""
        what = {"question": "short questions", "page": "pages", "document": "long documents"}[self.length]
        return f"{what} with history" if self.history else what

    def distance(self, other: WorkloadClass) -> int:
        """Number of steps between two classes: a step changes to the next length, or the history."""
        lengths = list(LENGTHS)
        return abs(lengths.index(self.length) - lengths.index(other.length)) + (self.history != other.history)

    def workload(self, n_ctx: int, n_ubatch: int) -> Workload:
        """Its representative prompt and answer in a context of n_ctx tokens, which may shorten them."""
        n_gen = max(1, min(N_GEN, n_ctx // 4))
        n_prompt = max(1, min(LENGTHS[self.length][0], n_ctx - n_gen))
        n_past = min(n_ctx // 2, n_ctx - n_gen - n_prompt) if self.history else 0
        return Workload(n_prompt, n_gen, n_ctx, n_ubatch, n_past)

    def longer(self, n_ctx: int, n_ubatch: int) -> Workload:
        """A long prompt of the class: twice the representative one, if the context holds it."""
        usual = self.workload(n_ctx, n_ubatch)
        return replace(usual, n_prompt=min(2 * usual.n_prompt, n_ctx - usual.n_past - usual.n_gen))


def class_of(workload: Workload) -> WorkloadClass:
    length = next(name for name, (_, longest) in LENGTHS.items() if workload.n_prompt <= longest)
    return WorkloadClass(length, workload.n_past > 0)


def classes_in(n_ctx: int) -> tuple[WorkloadClass, ...]:
    """The classes that a context holds, the most frequent first: without history, then with it."""
    classes = [WorkloadClass(length, history) for history in (False, True) for length in LENGTHS]
    fitting = [
        workload_class
        for workload_class in classes
        if class_of(workload_class.workload(n_ctx, 1)).length == workload_class.length
    ]
    return tuple(
        workload_class
        for workload_class in fitting
        if not workload_class.history or workload_class.workload(n_ctx, 1).n_past >= LEAST_HISTORY
    )
