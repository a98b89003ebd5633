"""Hot experts of a loaded model: which ones the device has in which slot, and others in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.core.types import ModelInfo, Operator
from oallama.model.gguf_file import TensorInfo, check_unchanged
from oallama.model.gguf_reader import read_gguf
from oallama.plan.plan import Plan
from oallama.run.split import LoadedSplit


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

    def exchange(self, split: LoadedSplit, layer: int, experts: Sequence[int]) -> int:
        """Puts these experts into the layer's slots, reading from the file what is not there yet. Returns how many that
        were. Raises UsageError for experts that do not exist, or are not as many as slots, ModelFileError."""
        slots, block = self._slots.get(layer, []), self._blocks.get(layer, [])
        n_expert = min((operator.shape[2] for operator in block), default=0)
        wanted = set(experts)
        if not slots or len(wanted) != len(slots) or not all(0 <= expert < n_expert for expert in wanted):
            raise UsageError(
                f"layer {layer} has room for {len(slots)} hot experts of {n_expert}; name as many, each once"
            )
        free = [slot for slot, expert in enumerate(slots) if expert not in wanted]
        missing = sorted(wanted - set(slots))
        if missing:
            check_unchanged(self._model.files)
            tensors = {tensor.name: tensor for tensor in read_gguf(self._model.path).tensors}
            own = [tensors[operator.name] for operator in block]
        for slot, expert in zip(free, missing, strict=True):
            matrices = {tensor.name: _matrix(tensor, expert) for tensor in own}
            slots[slot] = _NONE
            split.swap_expert(slot, expert, matrices)
            slots[slot] = expert
        return len(missing)

    def of_plan(self, plan: Plan) -> Plan:
        """The plan with the experts that are hot now."""
        layers = {operator.name: layer for layer, block in self._blocks.items() for operator in block}
        placements = tuple(
            replace(p, hot_experts=self._now(layers[p.name]) or p.hot_experts) if p.name in layers else p
            for p in plan.operators
        )
        return replace(plan, operators=placements)

    def _now(self, layer: int | None) -> tuple[int, ...]:
        return tuple(sorted(expert for expert in self._slots[layer] if expert != _NONE))


_NONE = -1  # in a slot: the device could not be given one


def _matrix(tensor: TensorInfo, expert: int) -> bytes:
    size = tensor.n_bytes // tensor.shape[2]
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset + expert * size)
        return file.read(size)
