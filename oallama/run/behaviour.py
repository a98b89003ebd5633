"""Options of an engine beside model, plan and placement: progress, recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oallama.profile.routing import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Keywords of Engine and of Placer.engine.

    progress: a bar on stderr where that is a terminal. on_traffic: gets which experts each generate and stream used, at
    its end: the prompt, and one of every record_every tokens decoded behind it; None: nothing is recorded, and
    computing is not held up for it.
    """

    progress: bool = True
    on_traffic: Callable[[Traffic], None] | None = None
    record_every: int = 1
