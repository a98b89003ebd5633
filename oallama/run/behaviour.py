"""Options of an engine beside model, plan and placement: progress, stall time-out, recording, re-planning, learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oallama.device.guard import STALL_S
from oallama.place.kept_cuts import Replan

if TYPE_CHECKING:
    from oallama.profile.routing import Traffic
    from oallama.run.learned_experts import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Keywords of Engine and of Placer.engine.

    progress: a bar on stderr where that is a terminal. stall_s: a remote device that makes no progress for so long is
    given up. on_traffic: gets which experts each generate and stream used, at its end: the prompt, and one of every
    record_every tokens decoded behind it; None: nothing is recorded, and computing is not held up for it. replan: cuts
    that are kept beside the plan's, between which the engine changes while it generates (place/replan.py); the plan's
    ledger says what they take. learn: hot experts follow what is used: they begin with what is known, each generate and
    stream adds to that, and behind it experts are exchanged in the background (run/learned_experts.py), which a next
    call ends within a piece of one matrix.
    """

    progress: bool = True
    stall_s: float = STALL_S
    on_traffic: Callable[[Traffic], None] | None = None
    record_every: int = 1
    replan: Replan | None = None
    learn: Known | None = None
