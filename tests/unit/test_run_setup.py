"""What an engine checks of a plan before it loads the model."""

from __future__ import annotations

import pytest
from split_cases import ffn, operator

from oallama.core.errors import PlanError
from oallama.core.types import MemoryLedger, OperatorPlacement, Workload
from oallama.plan.plan import Plan
from oallama.run.setup import check_layers

N_LAYER = 4
OPERATORS = (*(op for layer in range(N_LAYER) for op in ffn(layer)), operator("output", 256, 3200, None))


def plan(n_gpu_layers: int, *whole: int | None) -> Plan:
    """With all operators of these layers whole on the device; None: the output."""
    placements = tuple(
        OperatorPlacement(op.name, 1.0, 0.0, 0.0) if op.layer in whole else OperatorPlacement(op.name, 0.5, 0.0, 0.5)
        for op in OPERATORS
    )
    memory = MemoryLedger(0, 0.9, 0, 0, 0, 0, 0, 0, 0)
    return Plan("m.gguf", "f" * 64, "", "CUDA0", "oato", Workload(1, 1, 64), placements, n_gpu_layers, memory, None)


@pytest.mark.parametrize(
    ("n_gpu_layers", "whole"),
    [(0, ()), (1, (None,)), (2, (3, None)), (3, (2,)), (3, (3,)), (5, (0, 1, 2, 3, None)), (999, (0,))],
)
def test_whole_operators_are_in_layers_of_the_device(n_gpu_layers: int, whole: tuple[int | None, ...]) -> None:
    check_layers(plan(n_gpu_layers, *whole), N_LAYER, OPERATORS)


@pytest.mark.parametrize(
    ("n_gpu_layers", "whole", "name"),
    [(0, (None,), "output.weight"), (1, (3,), "blk.3.ffn_gate.weight"), (3, (1, 3), "blk.1.ffn_gate.weight"),
     (4, (0,), "blk.0.ffn_gate.weight")],
)  # fmt: skip
def test_a_whole_operator_of_a_layer_on_the_host_is_refused(
    n_gpu_layers: int, whole: tuple[int | None, ...], name: str
) -> None:
    with pytest.raises(PlanError, match=f"{name} on CUDA0, but n_gpu_layers = {n_gpu_layers} leaves"):
        check_layers(plan(n_gpu_layers, *whole), N_LAYER, OPERATORS)
