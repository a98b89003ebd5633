"""Buffer types of the weights of a plan: layouts that this CPU has, override patterns, text for the split back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oallama.core.types import (
    FORCED_PLAIN_LAYOUT,
    PLAIN_LAYOUT,
    Operator,
    OperatorPlacement,
    Shape,
    SplitSettings,
    StreamSettings,
    devices_with_n_g,
)
from oallama.cost.blocks import takes_n_g
from oallama.device.layouts import any_in_doubt, best_layout, in_doubt, stock_layout, supports
from oallama.device.load_params import load_bridge
from oallama.model.cut import cut_axis
from oallama.plan.patterns import Pattern, host_patterns, needs_split, split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import split_texts
from oallama.plan.split import slice_counts

if TYPE_CHECKING:
    from ggml_bridge import Bridge


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """placements: with layouts that this CPU has; warnings: of layouts that were asked for and that it has not.
    patterns, split_texts: as in LoadSettings."""

    placements: tuple[OperatorPlacement, ...]
    patterns: tuple[Pattern, ...]
    split_texts: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def named(self) -> tuple[Pattern, ...]:
        """The patterns that name a layout: all that a load without a device needs."""
        return tuple(pattern for pattern in self.patterns if pattern[1] is not None)


def weight_places(
    operators: Sequence[Operator],
    placements: Sequence[OperatorPlacement],
    tensor_names: Sequence[str],
    first_device_layer: int,
    settings: Sequence[SplitSettings],
) -> WeightPlaces:
    """first_device_layer: whose norms and KV cache are on a device, as are those of the layers behind it. settings: of
    each device. Raises BridgeError."""
    usable, warnings = usable_layouts(operators, placements, load_bridge(), settings)
    patterns = host_patterns(operators, usable, tensor_names, devices_with_n_g(settings))
    texts = split_texts(operators, usable, first_device_layer, settings)
    return WeightPlaces(usable, patterns, texts, warnings)


def usable_plan(plan: Plan, operators: Sequence[Operator], counts: bool = False) -> tuple[Plan, tuple[str, ...]]:
    """The plan with layouts that this CPU has, for a program of its own (plan/export.py), and a sentence for each one
    that was asked for and that it has not. counts: as in needs_split. Raises BridgeError."""
    named = any(placement.layout for placement in plan.operators)
    if not (named or split_names(plan, operators, counts) or any_in_doubt(operators)):
        return plan, ()  # llama.cpp chooses
    usable, warnings = usable_layouts(operators, plan.operators, load_bridge(), plan.split_settings, counts)
    return replace(plan, operators=usable), warnings


def usable_layouts(
    operators: Sequence[Operator],
    placements: Sequence[OperatorPlacement],
    bridge: Bridge,
    settings: Sequence[SplitSettings],
    counts: bool = False,
) -> tuple[tuple[OperatorPlacement, ...], tuple[str, ...]]:
    """A plan's placements with layouts that this CPU has and can multiply with, and a warning for each layout dropped.
    settings: of each device. counts: as in needs_split.

    Where the plan insists on plain memory for some operator, llama.cpp must be kept from repacking (load_params.py);
    then the operators left to its choice get the layout it would have chosen by name. So do the split ones, whose
    layout is not for llama.cpp to choose; those that are streamed for n_g and kept once stay plain, which is all that
    a device can read. An operator that llama.cpp would choose a wrong layout for gets the best of the others.
    """
    by_name = {operator.name: operator for operator in operators}
    layouts, with_n_g = bridge.cpu_layouts(), devices_with_n_g(settings)
    split = {p.name for p in placements if needs_split(by_name[p.name], p, with_n_g, counts)}
    plain_wanted = any(placement.layout == PLAIN_LAYOUT and placement.name not in split for placement in placements)
    read_by = {device for device in with_n_g if not (settings[device].streaming or StreamSettings()).kept_twice}
    checked: list[OperatorPlacement] = []
    dropped: dict[str, list[str]] = {}  # layout -> operators
    for placement in placements:
        operator, layout = by_name[placement.name], placement.layout
        shape = host_shape(operator, placement)
        if layout is not None and not (layout in layouts and supports(bridge, layout, operator, shape)):
            dropped.setdefault(layout, []).append(operator.name)
            layout = None
        if layout is None and operator.name in split and takes_n_g(operator) and placement.device in read_by:
            layout = PLAIN_LAYOUT
        elif layout is None and (plain_wanted or operator.name in split):
            layout = best_layout(bridge, operator, shape)
        elif layout is None and in_doubt(bridge, operator):
            best = best_layout(bridge, operator, shape)
            if best != stock_layout(bridge, operator):
                layout = FORCED_PLAIN_LAYOUT if best == PLAIN_LAYOUT else best
        checked.append(replace(placement, layout=layout))
    warnings = (
        f"this CPU cannot keep {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} in layout {layout}; "
        "using another layout"
        for layout, names in dropped.items()
    )
    return tuple(checked), tuple(warnings)


def host_shape(operator: Operator, placement: OperatorPlacement) -> Shape:
    """[K, N, E] of what the CPU multiplies by: the whole weight, or the CC slice of a split one."""
    if not 0 < placement.cc < 1:
        return operator.shape
    k, n, e = operator.shape
    cc, axis = slice_counts(operator, placement)[0], cut_axis(operator)
    return (cc, n, e) if axis == "cols" else (k, cc if axis == "rows" else 2 * cc, e)
