"""The model of a chat: loaded where a plan puts it, measured and loaded anew where the user asks for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oallama.cli.gate import measured
from oallama.cli.placement import keep_runs, say_warnings, tell_drift
from oallama.core.errors import UsageError
from oallama.report.expected import ENOUGH_TOKENS

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.engine import Engine
    from oallama.run.generate import Generation


class ChatModel:
    """fixed: why the placement is not to be measured, else empty. opened: loads a plan; None: as the placer does.
    plan_given: the plan is one of the user's."""

    def __init__(
        self,
        placer: Placer,
        plan: Plan,
        load: Workload,
        fixed: str = "",
        opened: Callable[[Placer, Plan], Engine] | None = None,
        plan_given: bool = False,
    ) -> None:
        self.placer, self.plan, self.load, self._opened = placer, plan, load, opened
        self._fixed, self._plan_given = fixed, plan_given
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Loaded now if it is not. Raises what loading raises."""
        if self._engine is None:
            opened = self._opened
            self._engine = opened(self.placer, self.plan) if opened else self.placer.engine(self.plan)
            say_warnings(self._engine, self.placer, self._plan_given)
        return self._engine

    def token_seconds(self, depth: int) -> float | None:
        """Predicted seconds of a token behind so many others. None where nothing is predicted."""
        if self.plan.predicted is None:
            return None
        return self.placer.token_seconds(self.plan, depth) or self.plan.predicted.tpot_s

    def tell_drift(self, answer: Generation) -> bool:
        """Warn where an answer's tokens were far from what was predicted. Whether it had enough of them to tell."""
        if answer.n_gen < ENOUGH_TOKENS:
            return False
        depth = answer.n_prompt + answer.n_gen // 2
        predicted_s = None if self.placer.device.is_emulated else self.token_seconds(depth)
        tell_drift(self.placer, answer, predicted_s)
        return True

    def close(self) -> None:
        """Free the model; it is loaded again when it is needed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                keep_runs(self.placer, engine)
            finally:
                engine.close()

    def tune(self, seconds: float) -> None:
        """Measure plans against stock llama.cpp for about so long, and place as the best of them. The model is freed
        meanwhile, as what is measured needs its memory. Raises UsageError where the placement is fixed, and what
        measuring raises; the placement stays then."""
        if self._fixed:
            raise UsageError(self._fixed)
        self.close()
        self.plan = measured(self.placer, self.load, seconds, ends="Ctrl-C ends it and keeps what is done").plan
