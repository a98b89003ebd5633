"""Where an operator may be cut: the axis of a slice, its extent, and what a cut must be a multiple of (DESIGN 2.1).

The second mul-mat of an FFN (down) is cut through K, so that each side goes on with the part of the hidden values that
it made itself; every other one is cut between the rows of its weight, N. A weight that holds gate and up is cut in both
halves alike. Counts are elements along that axis: CC first, then CG, GG last
(ggml_bridge/native/split/ggml-oallama.h).
"""

from __future__ import annotations

from math import lcm
from typing import Literal

from oallama.core.errors import PlanError
from oallama.core.types import Operator, OperatorPlacement
from oallama.model.gguf_types import GGML_TYPES_BY_NAME

Axis = Literal["rows", "cols", "halves"]

Counts = tuple[int, int, int]
"""(CC, CG, GG) in elements along the axis; the sum is the extent."""

ROW_GROUP = 32
"""Rows that the widest host layout takes together (AMX tiles; CPU_REPACK interleaves up to 16)."""

FRACTION_TOLERANCE = 1e-9  # of gg + cg + cc, and of a fraction against a whole number of elements, of the extent

_DOWN_ROLES = ("ffn_down", "ffn_down_exps", "ffn_down_shexp", "ffn_down_chexps")


def is_down(operator: Operator) -> bool:
    """Whether the operator is the second mul-mat of an FFN: its K are hidden values."""
    return operator.role.rpartition(".")[2] in _DOWN_ROLES


def cut_axis(operator: Operator) -> Axis:
    """cols for down, halves for a weight that holds gate and up, else rows.

    Experts with biases (gpt-oss) have an ADD_ID between their mul-mats, so these run one by one; down by rows then
    returns a part of the result from each side instead of two partial sums of all of it.
    """
    if operator.gate_up:
        return "halves"
    lone = operator.op == "MUL_MAT_ID" and operator.biased
    return "cols" if is_down(operator) and not lone else "rows"


def cut_extent(operator: Operator) -> int:
    """Elements along the axis: N, K, or half of N."""
    k, n, _ = operator.shape
    return {"rows": n, "cols": k, "halves": n // 2}[cut_axis(operator)]


def cut_granularity(operator: Operator) -> int:
    """Elements along the axis that a cut is a multiple of, unless it lies at the end: whole groups of rows, and whole
    quantisation blocks along K."""
    if cut_axis(operator) != "cols":
        return ROW_GROUP
    return lcm(GGML_TYPES_BY_NAME[operator.type].block_size, ROW_GROUP)


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
