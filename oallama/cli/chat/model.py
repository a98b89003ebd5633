"""The model of a chat: loaded where a plan puts it, measured and loaded anew where the user asks for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oallama.cli.chat.idle import IdleTune
from oallama.cli.gate import at_once, measured, tune_after
from oallama.cli.output import talk
from oallama.cli.placement import say_warnings
from oallama.core.errors import OallamaError, UsageError

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.engine import Engine


class ChatModel:
    """to_tune: whether to measure when leaving, after answers. fixed: why the placement is not to be measured, else
    empty. opened: loads a plan; None: as the placer does."""

    def __init__(
        self,
        placer: Placer,
        plan: Plan,
        load: Workload,
        to_tune: bool,
        fixed: str = "",
        opened: Callable[[Placer, Plan], Engine] | None = None,
    ) -> None:
        self.placer, self.plan, self.load, self._opened = placer, plan, load, opened
        self._to_tune, self._fixed = to_tune, fixed
        self._engine: Engine | None = None
        self._idle: IdleTune | None = None

    def tune_when_idle(self, command: Sequence[str], seconds: float) -> IdleTune:
        """Let this command measure while nobody types; the model is freed meanwhile, and then placed as what won."""
        self._idle = IdleTune(command, seconds, self.close)
        return self._idle

    @property
    def engine(self) -> Engine:
        """Loaded now if it is not. Raises what loading raises."""
        if self._engine is None:
            if self._idle is not None and self._idle.end():
                self._place_as_measured()
            opened = self._opened
            self._engine = opened(self.placer, self.plan) if opened else self.placer.engine(self.plan)
            say_warnings(self._engine, self.placer)
        return self._engine

    def token_seconds(self, depth: int) -> float | None:
        """Predicted seconds of a token behind so many others. None where nothing is predicted."""
        if self.plan.predicted is None:
            return None
        return self.placer.token_seconds(self.plan, depth) or self.plan.predicted.tpot_s

    def close(self) -> None:
        """Free the model; it is loaded again when it is needed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def tune(self, seconds: float) -> None:
        """Measure plans against stock llama.cpp for about so long, and place as the best of them. The model is freed
        meanwhile, as what is measured needs its memory. Raises UsageError where the placement is fixed, and what
        measuring raises; the placement stays then."""
        if self._fixed:
            raise UsageError(self._fixed)
        if self._idle is not None:
            self._idle.end()
        self.close()
        self.plan = measured(
            self.placer, self.load, seconds, accept_near=False, aside="Ctrl-C ends it and keeps what is done"
        ).plan
        self._to_tune = False
        if self._idle is not None:
            self._idle.wanted = False

    def _place_as_measured(self) -> None:
        try:
            self.plan, unknown = at_once(self.placer, self.load)
            if unknown and self._idle is not None:
                talk("nothing has won yet, as what was measured does not settle it; the next pause measures on")
                self._idle.go_on()
        except OallamaError as error:
            talk(f"the placement stays as it was: {error}")

    def leave(self, answered: bool) -> None:
        """Free the model; where its answers came from an unmeasured placement, measure for the next time."""
        if self._idle is not None:
            self._idle.end()
        self.close()
        if self._to_tune and answered:
            tune_after(self.placer, self.load)
