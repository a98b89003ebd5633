"""Loading a model for an engine: layouts checked, progress shown, refusals told in one sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oallama.core.types import Operator, OperatorPlacement
from oallama.device.load_params import PLAIN_LAYOUT

if TYPE_CHECKING:
    from ggml_bridge import Bridge


def usable_layouts(
    operators: Sequence[Operator], placements: Sequence[OperatorPlacement], bridge: Bridge
) -> tuple[tuple[OperatorPlacement, ...], tuple[str, ...]]:
    """Placements whose named layouts this CPU has and can multiply with, and a warning for each layout dropped.

    Where the plan insists on plain memory for some operator, llama.cpp must be kept from repacking (load_params.py);
    then the operators left to its choice get the layout it would have chosen by name.
    """
    by_name = {operator.name: operator for operator in operators}
    layouts = bridge.cpu_layouts()
    plain_wanted = any(placement.layout == PLAIN_LAYOUT for placement in placements)
    checked: list[OperatorPlacement] = []
    dropped: dict[str, list[str]] = {}  # layout -> operators
    for placement in placements:
        operator, layout = by_name[placement.name], placement.layout
        if layout is not None and not (layout in layouts and _supports(bridge, layout, operator)):
            dropped.setdefault(layout, []).append(operator.name)
            layout = None
        if layout is None and plain_wanted:
            layout = next((name for name in layouts if _supports(bridge, name, operator)), PLAIN_LAYOUT)
        checked.append(replace(placement, layout=layout))
    warnings = (
        f"this CPU cannot keep {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} in layout {layout}; "
        "llama.cpp chooses another one"
        for layout, names in dropped.items()
    )
    return tuple(checked), tuple(warnings)


def _supports(bridge: Bridge, layout: str, operator: Operator) -> bool:
    import ggml_bridge

    k, n, e = operator.shape
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    try:
        return bridge.layout_supports(layout, operator.type, k, n, e, used)
    except (ggml_bridge.Unsupported, ValueError):
        return False


class LoadProgress:
    """llama.cpp's progress callback: a bar on stderr where that is a terminal, and the way to stop a load.

    `callback` goes into llama_model_params. After a stopped load `raise_interrupt` raises what stopped it.
    """

    def __init__(self, name: str, n_bytes: int, show: bool) -> None:
        from llama_cpp import llama_cpp as api

        self._cancelled = False
        self._interrupt: BaseException | None = None
        self._bar: Any = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=n_bytes, desc=f"load {name}", unit="B", unit_scale=True, leave=False, delay=0.3)
        self.callback = api.llama_progress_callback(self._on_progress)

    def cancel(self) -> None:
        """Ask the load to stop at its next step."""
        self._cancelled = True

    def raise_interrupt(self) -> None:
        if self._interrupt is not None:
            raise self._interrupt

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _on_progress(self, share: float, user_data: Any) -> bool:
        try:
            if self._bar is not None:
                self._bar.update(int(share * self._bar.total) - self._bar.n)
            return not self._cancelled
        except BaseException as error:  # Ctrl-C arrives here; it cannot cross the C caller
            self._interrupt = error
            return False


@contextlib.contextmanager
def load_progress(name: str, n_bytes: int, show: bool) -> Iterator[LoadProgress]:
    progress = LoadProgress(name, n_bytes, show)
    try:
        yield progress
    finally:
        progress.close()
