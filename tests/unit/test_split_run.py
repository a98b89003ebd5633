"""What an engine checks of a plan before it loads the model, and what it makes of what the split back end reports: a
corrected plan, counters per token, shapes of slices."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from worlds import model_info, placed, some_plan, weight, weights_of

from ggml_bridge.split import SliceInfo, SplitMemory, SplitStats
from oallama.cli.run import split_document
from oallama.core.errors import PlanError
from oallama.core.types import Predicted
from oallama.plan.plan import Plan
from oallama.run.answer import Generation
from oallama.run.load_checks import check_layers
from oallama.run.plugin_report import PluginReport
from oallama.run.split import corrected_plan
from oallama.run.weight_places import host_shape

GATE = weight(role="ffn_gate", k=256, n=512, layer=0)
DOWN = weight(role="ffn_down", k=512, n=256, layer=0)
FUSED = replace(GATE, name="blk.1.ffn_up.weight", role="ffn_up", layer=1, gate_up=True)
OUTPUT = weight(role="output", k=256, n=300, type_name="F16")
OPERATORS = (GATE, DOWN, OUTPUT)


def plan(layout=None):
    half = [placed(operator.name, gg=0.5, layout=layout) for operator in (GATE, DOWN)]
    made = some_plan([*half, placed(OUTPUT.name)], predicted=Predicted(ttft_s=1.0, tpot_s=0.1, total_s=2.0))
    held = {"weights_gpu": 73_728, "weights_host": 227_328, "staging": 1000, "spare": 825_272}
    return replace(made, memory=replace(made.memory, **held))


def as_loaded(operator, gg, layout="CPU_REPACK"):
    return SliceInfo(operator.name, "rows", True, 512 - gg, 0, gg, 256, 256, layout if gg < 512 else "-")


def test_a_plan_that_was_kept_is_the_same_plan():
    for layout in (None, "CPU_REPACK"):
        assert corrected_plan(plan(layout), OPERATORS, [as_loaded(GATE, 256), as_loaded(DOWN, 256)]) == plan(layout)


def test_what_was_not_loaded_corrects_nothing():
    waiting = [replace(as_loaded(GATE, 0), loaded=False), replace(as_loaded(DOWN, 0), loaded=False)]
    assert corrected_plan(plan(), OPERATORS, waiting) == plan()


@pytest.mark.parametrize("gg", [0, 32, 128])
def test_a_shrunk_slice_moves_bytes_and_takes_the_prediction_away(gg):
    corrected = corrected_plan(plan(), OPERATORS, [as_loaded(GATE, gg), as_loaded(DOWN, gg)])
    assert [(p.gg, p.cc) for p in corrected.operators] == [(gg / 512, 1 - gg / 512)] * 2 + [(0.0, 1.0)]
    moved = (256 - gg) * (GATE.bytes + DOWN.bytes) // 512
    before, after = plan().memory, corrected.memory
    assert after.weights_gpu == before.weights_gpu - moved
    assert (after.weights_host, after.spare) == (before.weights_host + moved, before.spare + moved)
    assert corrected.predicted is None
    assert Plan.from_json(corrected.to_json()) == corrected


def test_another_layout_than_asked_for_is_shown_and_keeps_the_prediction():
    corrected = corrected_plan(plan("AMX"), OPERATORS, [as_loaded(GATE, 256), as_loaded(DOWN, 256)])
    assert [p.layout for p in corrected.operators] == ["CPU_REPACK", "CPU_REPACK", None]
    assert (corrected.predicted, corrected.memory) == (plan().predicted, plan().memory)


@pytest.mark.parametrize(
    ("operator", "shape"),
    [(GATE, (256, 384, 1)), (DOWN, (384, 256, 1)), (FUSED, (256, 384, 1)), (OUTPUT, (256, 224, 1))],
)
def test_the_cpu_multiplies_by_its_slice(operator, shape):
    cc = 224 / 300 if operator is OUTPUT else 0.75
    assert host_shape(operator, placed(operator.name, gg=1 - cc)) == shape
    assert host_shape(operator, placed(operator.name)) == operator.shape


def test_seconds_per_token_are_those_of_tokens_one_by_one():
    memory, single = SplitMemory(0, 0, 0, 0, 0, 0), SplitStats(launch_s=3 / 8, total_s=3 / 4)
    report = PluginReport(
        1, 0, True, (), (as_loaded(GATE, 256),), memory, SplitStats(launch_s=9.0), single, (), (), None
    )
    engine = SimpleNamespace(split_report=lambda: report)
    told = split_document(engine, Generation("abc", (1, 2, 3), 5, 3, 0.1, 0.1, "limit"))
    assert told["n_decoded"] == 2 and told["prompt"]["launch_s"] == 9.0 - 3 / 8
    assert told["per_token"] == {
        "launch_s": 3 / 16, "host_s": 0.0, "wait_s": 0.0, "join_s": 0.0, "total_s": 3 / 8
    }  # fmt: skip
    nothing = split_document(engine, Generation("a", (1,), 5, 1, 0.1, 0.0, "limit"))
    assert nothing["n_decoded"] == 0 and nothing["per_token"]["total_s"] == 3 / 4, "it divides by nothing"


LAYERS = weights_of(model_info(n_layer=4))


@pytest.mark.parametrize(
    ("n_gpu_layers", "whole", "refused"),  # whole: all operators of these layers are on the device; None: the output
    [
        (0, (), None), (1, (None,), None), (2, (3, None), None), (3, (2,), None), (3, (3,), None),
        (5, (0, 1, 2, 3, None), None), (999, (0,), None),
        (0, (None,), "output.weight"), (1, (3,), "blk.3.attn_q.weight"), (3, (1, 3), "blk.1.attn_q.weight"),
        (4, (0,), "blk.0.attn_q.weight"),
    ],
)  # fmt: skip
def test_a_whole_operator_of_a_layer_on_the_host_is_refused(n_gpu_layers, whole, refused):
    made = some_plan(
        (placed(op.name, gg=1.0 if op.layer in whole else 0.5) for op in LAYERS), n_gpu_layers=n_gpu_layers
    )
    if refused is None:
        check_layers(made, 4, LAYERS)
    else:
        with pytest.raises(PlanError, match=f"{refused} on CUDA0, but n_gpu_layers = {n_gpu_layers} leaves"):
            check_layers(made, 4, LAYERS)
