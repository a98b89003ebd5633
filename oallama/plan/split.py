"""Fractions of an operator as counts of elements along the axis of its cut."""

from __future__ import annotations

from oallama.core.errors import PlanError
from oallama.core.types import Operator, OperatorPlacement
from oallama.model.cut import cut_axis, cut_extent, cut_granularity

Counts = tuple[int, int, int]
"""(CC, CG, GG) in elements along the axis; the sum is the extent."""

FRACTION_TOLERANCE = 1e-9  # of gg + cg + cc, and of a fraction against a whole number of elements, of the extent


def slice_counts(operator: Operator, row: OperatorPlacement) -> Counts:
    """(CC, CG, GG) of a row. Raises PlanError for fractions that are not whole elements, do not add up, or do not
    match the granularity; the error names the nearest valid fraction."""
    extent, step, axis = cut_extent(operator), cut_granularity(operator), cut_axis(operator)
    if (cut := row.cut) is not None and sum(cut) == extent and not cut[0] % step and not (cut[0] + cut[1]) % step:
        return cut
    fractions = {"cc": row.cc, "cg": row.cg, "gg": row.gg}
    counts = {name: round(fraction * extent) for name, fraction in fractions.items()}
    inexact = [
        name
        for name, fraction in fractions.items()
        if abs(fraction * extent - counts[name]) > FRACTION_TOLERANCE * extent
    ]
    total = sum(counts.values())
    cuts = {"cc": counts["cc"], "cg": counts["cc"] + counts["cg"]}  # where CC ends, where CG ends
    misaligned = [name for name, cut in cuts.items() if cut % step and cut != extent]
    for invalid in inexact or misaligned:
        fraction = fractions[invalid]
        nearest = min(round(fraction * extent / step) * step, extent) / extent
        raise PlanError(
            f"operator {operator.name}: {invalid} = {fraction:.9g} is not a multiple of its split granularity, {step} "
            f"of {extent} {_ELEMENTS[axis]}; the nearest is {nearest:.9g}"
        )
    if total != extent or min(counts.values()) < 0:
        raise PlanError(
            f"operator {operator.name}: cc, cg and gg are {tuple(counts.values())} of {extent} {_ELEMENTS[axis]}; "
            "they must be whole and add up"
        )
    return counts["cc"], counts["cg"], counts["gg"]


def hot_bytes(operator: Operator, row: OperatorPlacement) -> int:
    """Bytes of the experts that the device holds whole."""
    return operator.bytes // operator.shape[2] * len(row.hot_experts)


def device_share(operator: Operator, row: OperatorPlacement) -> float:
    """Share of the weight on the device: GG, or whole experts."""
    return row.gg + len(row.hot_experts) / operator.shape[2]


def check_hot_experts(operator: Operator, row: OperatorPlacement) -> None:
    """Raises PlanError for hot experts of an operator without experts, unknown or unsorted ones, or a cut operator."""
    hot, n_expert = row.hot_experts, operator.shape[2]
    if not hot:
        return
    if not operator.routed:
        raise PlanError(f"operator {operator.name} has hot_experts but is not a mul-mat by experts; make a new plan")
    if row.cc != 1:
        raise PlanError(f"operator {operator.name} has hot_experts, so it stays whole on the host: cc must be 1")
    if list(hot) != sorted(set(hot)) or not 0 <= hot[0] <= hot[-1] < n_expert:
        raise PlanError(
            f"operator {operator.name}: hot_experts must be distinct numbers of its {n_expert} experts in ascending "
            "order"
        )


_ELEMENTS = {"rows": "rows", "cols": "columns", "halves": "rows of each half"}
