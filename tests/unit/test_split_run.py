"""What the engine makes of what the split backend reports: a corrected plan, counters per token, shapes of slices."""

from dataclasses import replace

import pytest

from ggml_bridge.split import SliceInfo, SplitStats
from oallama.core.types import MemoryLedger, Operator, OperatorPlacement, Predicted, Workload
from oallama.plan.plan import Plan
from oallama.run.split import SplitMeter, corrected_plan
from oallama.run.weight_places import host_shape

GATE = Operator("blk.0.ffn_gate.weight", 0, "ffn_gate", "MUL_MAT", "Q4_0", (256, 512, 1), 256 * 512 * 18 // 32, 1.0)
DOWN = Operator("blk.0.ffn_down.weight", 0, "ffn_down", "MUL_MAT", "Q4_0", (512, 256, 1), 256 * 512 * 18 // 32, 1.0)
FUSED = replace(GATE, name="blk.1.ffn_up.weight", role="ffn_up", layer=1, gate_up=True)
OUTPUT = Operator("output.weight", None, "output", "MUL_MAT", "F16", (256, 300, 1), 256 * 300 * 2, 1.0)
OPERATORS = (GATE, DOWN, OUTPUT)


def plan(layout=None):
    half = [OperatorPlacement(operator.name, 0.5, 0.0, 0.5, layout) for operator in (GATE, DOWN)]
    return Plan(
        model_path="model.gguf",
        model_fingerprint="ab",
        machine_fingerprint="",
        device="RPC0",
        policy="split",
        workload=Workload(8, 8, 256),
        operators=(*half, OperatorPlacement(OUTPUT.name, 0.0, 0.0, 1.0)),
        n_gpu_layers=0,
        memory=MemoryLedger(1 << 20, 0.9, 900_000, 73_728, 227_328, 0, 0, 1000, 825_272),
        predicted=Predicted(1.0, 0.1, 2.0),
    )


def as_loaded(operator, gg, layout="CPU_REPACK"):
    return SliceInfo(operator.name, "rows", True, 512 - gg, 0, gg, 256, 256, 1, 1, layout if gg < 512 else "-")


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
    placement = OperatorPlacement(operator.name, 1 - cc, 0.0, cc)
    assert host_shape(operator, placement) == shape
    assert host_shape(operator, OperatorPlacement(operator.name, 0.0, 0.0, 1.0)) == operator.shape


def test_the_meter_tells_prompt_and_tokens_apart():
    counted = iter(SplitStats(n_graphs=n, launch_s=n / 8, total_s=n / 4) for n in (10, 12, 14, 15, 17))
    meter = SplitMeter(lambda: next(counted), 2)
    for _ in range(4):
        meter.beat()
    done = meter.run()
    assert (done.prompt.n_graphs, done.decode.n_graphs, done.n_decoded) == (4, 3, 2)
    assert done.per_token() == {
        "launch_s": 3 / 16, "host_s": 0.0, "wait_s": 0.0, "join_s": 0.0, "total_s": 3 / 8
    }  # fmt: skip


def test_a_meter_without_tokens_divides_by_nothing():
    meter = SplitMeter(SplitStats, 1)
    assert meter.run().n_decoded == 0
    assert meter.run().per_token()["total_s"] == 0.0
