"""The model of a chat, loaded where a plan puts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oallama.cli.placement import keep_runs, say_warnings, tell_drift
from oallama.report.expected import ENOUGH_TOKENS

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.engine import Engine
    from oallama.run.generate import Generation


class ChatModel:
    """plan_given: the plan is one of the user's. keywords: of Placer.engine."""

    def __init__(self, placer: Placer, plan: Plan, plan_given: bool = False, **keywords: Any) -> None:
        self.placer, self.plan, self._plan_given, self._keywords = placer, plan, plan_given, keywords
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Loaded now if it is not. Raises what loading raises."""
        if self._engine is None:
            self._engine = self.placer.engine(self.plan, **self._keywords)
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
