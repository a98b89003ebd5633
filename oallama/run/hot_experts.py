"""Hot experts of a loaded model: which ones the device has in which slot, and others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.core.errors import UsageError
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.types import ModelInfo, Operator
from oallama.model.gguf_file import TensorInfo, check_unchanged
from oallama.model.gguf_reader import read_gguf
from oallama.plan.plan import Plan

if TYPE_CHECKING:
    from ggml_bridge import SplitPlan

PIECE_BYTES = 1 << 20
"""That are read and copied to the device at once: a token that is asked for meanwhile waits for no more."""


class HotExperts:
    """The slots of each layer's experts, in the order in which the plan was loaded. A layer whose operators have
    different sets keeps them."""

    def __init__(self, model: ModelInfo, operators: Sequence[Operator], plan: Plan) -> None:
        self._model = model
        self._blocks: dict[int | None, list[Operator]] = {}
        self._slots: dict[int | None, list[int]] = {}
        hot = {placement.name: placement.hot_experts for placement in plan.operators}
        for operator in operators:
            own = list(hot[operator.name])
            if own:
                self._blocks.setdefault(operator.layer, []).append(operator)
                known = self._slots.setdefault(operator.layer, own)
                self._slots[operator.layer] = own if own == known else []

    @property
    def layers(self) -> dict[int, Operator]:
        """Those whose experts may be exchanged, each with an operator of its experts."""
        return {layer: self._blocks[layer][0] for layer, slots in self._slots.items() if layer is not None and slots}

    def of_layer(self, layer: int) -> tuple[int, ...]:
        """Its hot experts now, by slot; without those that are on their way."""
        return tuple(expert for expert in self._slots[layer] if expert != _NONE)

    def exchange(self, split: SplitPlan, layer: int, experts: Sequence[int]) -> int:
        """Puts these experts into the layer's slots, reading from the file what is not there yet. Returns how many that
        were. Raises UsageError for experts that do not exist, or are not as many as slots, ModelFileError."""
        slots, block = self._slots.get(layer, []), self._blocks.get(layer, [])
        n_expert = min((operator.shape[2] for operator in block), default=0)
        wanted = set(experts)
        if not slots or len(wanted) != len(slots) or not all(0 <= expert < n_expert for expert in wanted):
            raise UsageError(
                f"layer {layer} has room for {len(slots)} hot experts of {n_expert}; name as many, each once"
            )
        going = [expert for expert in slots if expert not in wanted]
        missing = sorted(wanted - set(slots))
        for goes, comes in zip(going, missing, strict=True):
            for step in self.steps(split, layer, goes, comes):
                step()
        return len(missing)

    def steps(self, split: SplitPlan, layer: int, goes: int, comes: int) -> Iterator[Callable[[], None]]:
        """What gives an expert's slot to another one, piece by piece. Each is to be called before the next is asked
        for, and while the model does not compute; between two of them it may: then the CPU has both experts. Raises
        ModelFileError."""
        slots, block = self._slots[layer], self._blocks[layer]
        slot, names = slots.index(goes), [operator.name for operator in block]
        check_unchanged(self._model.files)

        def free() -> None:
            slots[slot] = _NONE
            split.free_slot(names, slot)

        def fill() -> None:
            split.fill_slot(names, slot, comes)
            slots[slot] = comes

        yield free
        for name in names:
            for offset, data in _pieces(self._tensors[name], comes):
                yield partial(split.write_slot, name, slot, data, offset)
        yield fill

    def of_plan(self, plan: Plan) -> Plan:
        """The plan with the experts that are hot now."""
        if not self._blocks:
            return plan
        layers = {operator.name: layer for layer, block in self._blocks.items() for operator in block}
        placements = tuple(
            replace(p, hot_experts=self._now(layers[p.name]) or p.hot_experts) if p.name in layers else p
            for p in plan.operators
        )
        return replace(plan, operators=placements)

    def _now(self, layer: int | None) -> tuple[int, ...]:
        return tuple(sorted(expert for expert in self._slots[layer] if expert != _NONE))

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in read_gguf(self._model.path).tensors}


_NONE = -1  # in a slot: the device could not be given one


def _pieces(tensor: TensorInfo, expert: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of an expert's matrix, whole blocks of its type."""
    size, block = tensor.n_bytes // tensor.shape[2], GGML_TYPES_BY_NAME[tensor.type].block_bytes
    most = max(1, PIECE_BYTES // block) * block
    with Path(tensor.path).open("rb") as file:
        for offset in range(0, size, most):
            file.seek(tensor.offset + expert * size + offset)
            yield offset, file.read(min(most, size - offset))
