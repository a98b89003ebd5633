"""CPU layouts of weights: which layout stock llama.cpp chooses, and which layouts multiply correctly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from oallama.core.errors import BridgeError
from oallama.core.types import PLAIN_LAYOUT, Operator, Shape
from oallama.device.load_params import load_bridge

if TYPE_CHECKING:
    from ggml_bridge import Bridge


def supports(bridge: Bridge, layout: str, operator: Operator, shape: Shape) -> bool:
    """Whether a part of this shape of an operator's weight may use the layout: llama.cpp supports it, and the product
    is right, also for several sequences at once."""
    if not _is_right(bridge, layout, operator, shape):
        return False
    k, n, _ = shape
    several = (layout, operator.type, k, n, 2)  # several inputs fail as several matrices do
    return not operator.by_sequence or bridge.layout_supports(*several) or not bridge.layout_takes(*several)


def _is_right(bridge: Bridge, layout: str, operator: Operator, shape: Shape) -> bool:
    """Whether the layout supports a weight of this shape and multiplies it correctly with one sequence."""
    import ggml_bridge

    try:
        return bridge.layout_supports(layout, operator.type, *shape, operator.mul_mat.n_routed)
    except (ggml_bridge.Unsupported, ValueError):
        return False


def best_layout(bridge: Bridge, operator: Operator, shape: Shape) -> str:
    """Return the first of the CPU's layouts, in order of preference, that supports the weight."""
    return next((name for name in bridge.cpu_layouts() if supports(bridge, name, operator, shape)), PLAIN_LAYOUT)


def stock_layout(bridge: Bridge, operator: Operator) -> str:
    """Return the layout that stock llama.cpp gives a whole weight in host memory without a device, right or wrong."""
    import ggml_bridge

    def takes(layout: str) -> bool:
        try:
            return bridge.layout_takes(layout, operator.type, *operator.shape, operator.mul_mat.n_routed)
        except (ggml_bridge.Unsupported, ValueError):
            return False

    return next((name for name in bridge.cpu_layouts() if takes(name)), PLAIN_LAYOUT)


def in_doubt(bridge: Bridge, operator: Operator) -> bool:
    """Whether stock llama.cpp may give the operator a wrong layout: its weight has several matrices and is not routed,
    or its input has several sequences, or a layout of this build has a fault."""
    return _is_three_dimensional(operator) or bool(bridge.layout_faults)


def any_in_doubt(operators: Iterable[Operator]) -> bool:
    """Whether one of the operators is in_doubt, without native code. Raises BridgeError if llama.cpp is missing."""
    import ggml_bridge
    from ggml_bridge.layouts import layout_faults
    from ggml_bridge.library import library_folder

    if any(map(_is_three_dimensional, operators)):
        return True
    try:
        return bool(layout_faults(library_folder()))
    except ggml_bridge.BridgeError as error:
        raise BridgeError(str(error)) from None


def needs_no_repack(operators: Sequence[Operator]) -> bool:
    """Whether stock llama.cpp gives one of the operators a layout on this CPU that multiplies wrongly, or writes out of
    bounds, for a single sequence. --no-repack, which leaves all weights plain, avoids it. Raises BridgeError."""
    if not any_in_doubt(operators):
        return False
    bridge = load_bridge()
    return any(
        not _is_right(bridge, stock_layout(bridge, operator), operator, operator.shape) for operator in operators
    )


def _is_three_dimensional(operator: Operator) -> bool:
    return operator.op == "MUL_MAT" and (operator.shape[2] > 1 or operator.by_sequence)
