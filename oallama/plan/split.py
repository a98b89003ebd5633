"""Where an operator may be cut: the axis of a slice and the unit its width is a multiple of (DESIGN 2.1).

Columns of the output are cut anywhere; a cut through K must not part a quantisation block.
"""

from __future__ import annotations

from oallama.core.types import Operator
from oallama.model.gguf_types import GGML_TYPES_BY_NAME

_CUT_ALONG_K = ("ffn_down", "attn_output", "attn_out", "ssm_out")
"""Second mul-mats of a pair: the first gives them only a part of their input, so they are cut along K."""


def split_units(operator: Operator) -> int:
    """How many equal units the operator may be cut into; a fraction of a plan is a multiple of 1 / this. >= 1."""
    k, n, _ = operator.shape
    if not operator.role.startswith(_CUT_ALONG_K):
        return n
    return max(k // GGML_TYPES_BY_NAME[operator.type].block_size, 1)
