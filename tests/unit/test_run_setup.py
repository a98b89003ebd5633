"""What an engine checks of a plan before it loads the model."""

import pytest
from worlds import model_info, placed, some_plan, weights_of

from oallama.core.errors import PlanError
from oallama.run.setup import check_layers

N_LAYER = 4
OPERATORS = weights_of(model_info(n_layer=N_LAYER))


def plan(n_gpu_layers, *whole):
    """With all operators of these layers whole on the device; None: the output."""
    placements = (placed(op.name, gg=1.0 if op.layer in whole else 0.5) for op in OPERATORS)
    return some_plan(placements, n_gpu_layers=n_gpu_layers)


@pytest.mark.parametrize(
    ("n_gpu_layers", "whole"),
    [(0, ()), (1, (None,)), (2, (3, None)), (3, (2,)), (3, (3,)), (5, (0, 1, 2, 3, None)), (999, (0,))],
)
def test_whole_operators_are_in_layers_of_the_device(n_gpu_layers, whole):
    check_layers(plan(n_gpu_layers, *whole), N_LAYER, OPERATORS)


@pytest.mark.parametrize(
    ("n_gpu_layers", "whole", "name"),
    [(0, (None,), "output.weight"), (1, (3,), "blk.3.attn_q.weight"), (3, (1, 3), "blk.1.attn_q.weight"),
     (4, (0,), "blk.0.attn_q.weight")],
)  # fmt: skip
def test_a_whole_operator_of_a_layer_on_the_host_is_refused(n_gpu_layers, whole, name):
    with pytest.raises(PlanError, match=f"{name} on CUDA0, but n_gpu_layers = {n_gpu_layers} leaves"):
        check_layers(plan(n_gpu_layers, *whole), N_LAYER, OPERATORS)
