"""Fractions of an operator as counts of elements along the axis of its cut."""

from __future__ import annotations

from oallama.core.errors import PlanError
from oallama.core.types import Operator, OperatorPlacement
from oallama.model.cut import cut_axis, cut_extent, cut_granularity

Counts = tuple[int, int, int]
"""(CC, CG, GG) in elements along the axis; the sum is the extent."""

FRACTION_TOLERANCE = 1e-9  # of gg + cg + cc, and of a fraction against a whole number of elements, of the extent


def slice_counts(operator: Operator, placement: OperatorPlacement) -> Counts:
    """(CC, CG, GG) of a placement. Raises PlanError for fractions that are no whole numbers of elements, that do not
    add up, or that cut off the granularity; the error names the nearest that could be."""
    extent, step, axis = cut_extent(operator), cut_granularity(operator), cut_axis(operator)
    fractions = {"cc": placement.cc, "cg": placement.cg, "gg": placement.gg}
    counts = {name: round(fraction * extent) for name, fraction in fractions.items()}
    inexact = [
        name
        for name, fraction in fractions.items()
        if abs(fraction * extent - counts[name]) > FRACTION_TOLERANCE * extent
    ]
    total = sum(counts.values())
    cuts = {"cc": counts["cc"], "cg": counts["cc"] + counts["cg"]}  # where CC ends, where CG ends
    off = [name for name, cut in cuts.items() if cut % step and cut != extent]
    for wrong in inexact or off:
        fraction = fractions[wrong]
        nearest = min(round(fraction * extent / step) * step, extent) / extent
        raise PlanError(
            f"operator {operator.name}: {wrong} = {fraction:.9g} is no multiple of its split granularity, {step} of "
            f"{extent} {_ELEMENTS[axis]}; the nearest is {nearest:.9g}"
        )
    if total != extent or min(counts.values()) < 0:
        raise PlanError(
            f"operator {operator.name}: cc, cg and gg are {tuple(counts.values())} of {extent} {_ELEMENTS[axis]}; "
            "they must be whole and add up"
        )
    return counts["cc"], counts["cg"], counts["gg"]


_ELEMENTS = {"rows": "rows", "cols": "columns", "halves": "rows of each half"}
