"""Where a weight may be cut: the axis of a slice, its extent, and what a cut must be a multiple of.

The second mul-mat of an FFN (down) is cut along K, so that each side continues with the hidden values that it computed
itself; every other mul-mat is cut along N, the rows of its weight. A weight that holds gate and up is cut in both
halves alike. The order along the axis is CC, CG, GG (ggml_bridge/native/split/ggml-oallama.h).
"""

from __future__ import annotations

from math import lcm
from typing import Literal

from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.types import Operator

Axis = Literal["rows", "cols", "halves"]

ROW_GROUP = 32
"""Rows that the widest host layout takes together (AMX tiles; CPU_REPACK interleaves up to 16)."""

TILE_ROWS = 128
"""Rows of a tile of CUDA's mul-mats by quantised weights in batches above 8 tokens. A slice of any other number of rows
is computed by a kernel that checks bounds, which exists in 5 tile widths instead of 11 (ggml-cuda/mmq.cuh, read
at ggml 0.25.3; not checked since)."""

LONG_ROWS = 8192
"""Rows from which on cuts between whole tiles lose less than 2 % of predicted seconds in each plan of the corpus, and
nothing in the median. From 4096 on one loses 3 %."""

_DOWN_ROLES = ("ffn_down", "ffn_down_exps", "ffn_down_shexp", "ffn_down_chexps")


def runs_alone(operator: Operator) -> bool:
    """Whether an FFN's mul-mats run one by one: experts with biases (gpt-oss) have an ADD_ID between them."""
    return operator.routed and operator.biased


def cut_axis(operator: Operator) -> Axis:
    """Return cols for down, halves for a weight that holds gate and up, else rows.

    A down that runs alone is cut by rows: each side then returns a part of the result, not a partial sum of all of it.
    """
    if operator.gate_up:
        return "halves"
    is_down = operator.role.rpartition(".")[2] in _DOWN_ROLES  # without the enc. or dec. of an encoder-decoder
    return "cols" if is_down and not runs_alone(operator) else "rows"


def cut_extent(operator: Operator) -> int:
    """Elements along the axis: N, K, or half of N."""
    k, n, _ = operator.shape
    return {"rows": n, "cols": k, "halves": n // 2}[cut_axis(operator)]


def cut_granularity(operator: Operator) -> int:
    """Return the number of elements that a cut must be a multiple of, unless it lies at the end: whole groups of rows,
    and whole quantisation blocks along K."""
    if cut_axis(operator) != "cols":
        return ROW_GROUP
    return lcm(GGML_TYPES_BY_NAME[operator.type].block_size, ROW_GROUP)


def cut_step(operator: Operator) -> int:
    """Return the number of elements that the planner's cuts are a multiple of: the granularity, and whole tiles of rows
    for a long quantised weight that divides into tiles. Plans with other cuts load as well."""
    extent, is_quantised = cut_extent(operator), GGML_TYPES_BY_NAME[operator.type].block_size > 1
    whole_tiles = cut_axis(operator) != "cols" and extent >= LONG_ROWS and extent % TILE_ROWS == 0
    return TILE_ROWS if whole_tiles and is_quantised else cut_granularity(operator)
