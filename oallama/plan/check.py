"""What every plan must satisfy, whatever model it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oallama.core.errors import PlanError
from oallama.core.types import PlanRecord
from oallama.plan.split import FRACTION_TOLERANCE

MAX_SLOTS = 64  # that the split backend takes


def check_record(record: PlanRecord) -> None:
    """Raises PlanError for fractions outside 0..1 or of another sum than 1, operators placed twice, a ring that cannot
    be, or a token assignment that does not ascend."""
    _check_tokens(record.token_assignment)
    if record.streaming is not None and not 1 <= record.streaming.n_slots <= MAX_SLOTS:
        raise PlanError(f"the plan has a ring of {record.streaming.n_slots} slots; 1 to {MAX_SLOTS} are possible")
    seen: set[str] = set()
    for placement in record.operators:
        if placement.name in seen:
            raise PlanError(f"operator {placement.name} is placed twice; keep one of the two")
        seen.add(placement.name)
        fractions = (placement.gg, placement.cg, placement.cc)
        if not all(math.isfinite(fraction) and 0 <= fraction <= 1 for fraction in fractions):
            raise PlanError(f"operator {placement.name} has a fraction outside 0..1: gg, cg, cc = {fractions}")
        if abs(math.fsum(fractions) - 1) > FRACTION_TOLERANCE:
            raise PlanError(
                f"operator {placement.name}: gg + cg + cc is {math.fsum(fractions):.9g} but must be 1 "
                f"(gg, cg, cc = {fractions})"
            )


def _check_tokens(table: Sequence[tuple[int, int]]) -> None:
    """n_tokens strictly ascending, and no more tokens on the device than there are."""
    last = 0
    for n_tokens, n_g in table:
        if n_tokens <= last or not 0 <= n_g <= n_tokens:
            raise PlanError(f"token_assignment: n_g is {n_g} at {n_tokens} tokens; n_tokens must rise, n_g be no more")
        last = n_tokens
