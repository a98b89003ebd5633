"""Where a plan's weights go in a load: layouts that this CPU has, override patterns, and the split back end's text."""

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
    """rows: the plan's, with layouts that this CPU has; warnings: about requested layouts that it lacks. patterns,
    split_texts: as in LoadSettings."""

    rows: tuple[OperatorPlacement, ...]
    patterns: tuple[Pattern, ...]
    split_texts: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def named(self) -> tuple[Pattern, ...]:
        """The patterns that name a layout: all that a load without a device needs."""
        return tuple(pattern for pattern in self.patterns if pattern[1] is not None)


def weight_places(
    operators: Sequence[Operator],
    rows: Sequence[OperatorPlacement],
    tensor_names: Sequence[str],
    first_device_layer: int,
    settings: Sequence[SplitSettings],
) -> WeightPlaces:
    """The WeightPlaces of a plan's rows. first_device_layer: the first layer whose norms and KV are on a device.
    settings: of each device. Raises BridgeError."""
    usable, warnings = usable_layouts(operators, rows, load_bridge(), settings)
    patterns = host_patterns(operators, usable, tensor_names, devices_with_n_g(settings))
    texts = split_texts(operators, usable, first_device_layer, settings)
    return WeightPlaces(usable, patterns, texts, warnings)


def usable_plan(plan: Plan, operators: Sequence[Operator], counts: bool = False) -> tuple[Plan, tuple[str, ...]]:
    """(the plan with layouts that this CPU has, a warning for each requested layout that it lacks), for a stock program
    (plan/export.py). counts: as in needs_split. Raises BridgeError."""
    named = any(row.layout for row in plan.operators)
    if not (named or split_names(plan, operators, counts) or any_in_doubt(operators)):
        return plan, ()  # llama.cpp chooses
    usable, warnings = usable_layouts(operators, plan.operators, load_bridge(), plan.split_settings, counts)
    return replace(plan, operators=usable), warnings


def usable_layouts(
    operators: Sequence[Operator],
    rows: Sequence[OperatorPlacement],
    bridge: Bridge,
    settings: Sequence[SplitSettings],
    counts: bool = False,
) -> tuple[tuple[OperatorPlacement, ...], tuple[str, ...]]:
    """A plan's rows with layouts that this CPU has and computes correctly, and a warning for each layout dropped.
    settings: of each device. counts: as in needs_split.

    If the plan names the plain layout for a whole operator, llama.cpp must not repack anything (load_params.py). Then
    each operator without a layout gets the one that llama.cpp would have chosen, by name. So do split operators, for
    which llama.cpp does not choose; those that are streamed for n_g and kept once stay plain, the only layout that a
    device reads. If llama.cpp would choose a layout that computes wrongly, the operator gets the best of the others.
    """
    by_name = {operator.name: operator for operator in operators}
    layouts, with_n_g = bridge.cpu_layouts(), devices_with_n_g(settings)
    split = {p.name for p in rows if needs_split(by_name[p.name], p, with_n_g, counts)}
    plain_wanted = any(row.layout == PLAIN_LAYOUT and row.name not in split for row in rows)
    read_by = {device for device in with_n_g if not (settings[device].streaming or StreamSettings()).kept_twice}
    checked: list[OperatorPlacement] = []
    dropped: dict[str, list[str]] = {}  # layout -> operators
    for row in rows:
        operator, layout = by_name[row.name], row.layout
        shape = host_shape(operator, row)
        if layout is not None and not (layout in layouts and supports(bridge, layout, operator, shape)):
            dropped.setdefault(layout, []).append(operator.name)
            layout = None
        if layout is None and operator.name in split and takes_n_g(operator) and row.device in read_by:
            layout = PLAIN_LAYOUT
        elif layout is None and (plain_wanted or operator.name in split):
            layout = best_layout(bridge, operator, shape)
        elif layout is None and in_doubt(bridge, operator):
            best = best_layout(bridge, operator, shape)
            if best != stock_layout(bridge, operator):
                layout = FORCED_PLAIN_LAYOUT if best == PLAIN_LAYOUT else best
        checked.append(replace(row, layout=layout))
    warnings = (
        f"this CPU cannot keep {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} in layout {layout}; "
        "using another layout"
        for layout, names in dropped.items()
    )
    return tuple(checked), tuple(warnings)


def host_shape(operator: Operator, row: OperatorPlacement) -> Shape:
    """[K, N, E] of the weight that the CPU multiplies by: the whole operator, or its CC slice."""
    if not 0 < row.cc < 1:
        return operator.shape
    k, n, e = operator.shape
    cc, axis = slice_counts(operator, row)[0], cut_axis(operator)
    return (cc, n, e) if axis == "cols" else (k, cc if axis == "rows" else 2 * cc, e)
