"""What a run is expected to do, said before it, and what became of that, said after."""

from dataclasses import replace

import placement_records
import pytest
from worlds import SMALL, World

from oallama.core.errors import DeviceError, ModelFileError
from oallama.core.types import DeviceInfo, Predicted, Workload
from oallama.core.units import GIB
from oallama.device.machines import machine_of
from oallama.device.opening import OpenDevice
from oallama.device.spec import parse_device
from oallama.model.memory import load_refusal
from oallama.report.expected import UNMEASURED, expected_line, fits_text, measured_texts, rates_text
from oallama.run.load import spill_warning

pytestmark = pytest.mark.usefixtures("small_cards")

SERVED = placement_records.served()
RECORD = replace(SERVED.plan, workload=Workload(n_prompt=500, n_gen=200, n_ctx=8192))
OPERATORS = SERVED.operators
N_LAYER = 3


@pytest.mark.parametrize("policy", ["cpu", "layers", "oato", "split", "scheinfer"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_it_is_what_a_plan_made_for_that_depth_would_be_priced_at(policy, share):
    """Whole operators to the digit. Behind slices that are streamed, attention that takes longer may hide copies, or
    take memory from them."""
    on = machine_of("pc-12gb")
    world = World(
        model=SMALL, host=on.host, card=on.card, share=share, workload=Workload(n_prompt=500, n_gen=200, n_ctx=16384)
    )
    placer, plan = world.placer(), world.plan(policy)
    streams = any(place.cg for place in plan.operators) or bool(plan.token_assignment)
    for depth in (600, 2048, 12000):
        there = placer.price(plan, Workload(n_prompt=depth, n_gen=1, n_ctx=16384)).tpot_s
        assert placer.token_seconds(plan, depth) == pytest.approx(there, rel=0.05 if streams else 1e-6)


def test_nothing_is_expected_without_a_prediction_or_a_profile():
    world = World(model=SMALL)
    plan = world.plan("cpu")
    assert world.placer().token_seconds(replace(plan, predicted=None), 600) is None
    assert world.with_profile(rest=()).placer().token_seconds(plan, 600) is None
    assert world.alone().token_seconds(plan, 600) is None


def test_what_fits_and_what_does_not():
    some = fits_text(RECORD, OPERATORS, N_LAYER)
    assert " of weights on rpc://127.0.0.1:9 with 500 KiB of KV cache and 250 KiB of buffers, of the 5.15" in some
    assert some.endswith(" MiB it may hold; the other weights and the KV cache of 1 of 3 layers on the CPU")
    placed = tuple(replace(p, gg=1.0, cg=0.0, cc=0.0) for p in RECORD.operators)
    whole = replace(RECORD, operators=placed, n_gpu_layers=N_LAYER + 1)
    assert fits_text(whole, OPERATORS, N_LAYER).startswith("all weights on ")
    assert "on the CPU" not in fits_text(whole, OPERATORS, N_LAYER)
    none = fits_text(placement_records.on_cpu(SERVED).plan, OPERATORS, N_LAYER)
    assert none.startswith("all weights (") and none.endswith(") are on the CPU")


def test_rates_say_where_they_change():
    def seconds(depth):
        return 4e-4 * (1 if depth <= 1024 else 2)

    said = rates_text(RECORD, seconds)
    assert said == ("expected 2,500 tokens/s at 600 tokens of context, 1,250 from 1,280 on, 1,250 at all 8,192")
    bounded = replace(RECORD, workload=replace(RECORD.workload, n_ctx=1279))
    assert "from" not in rates_text(bounded, seconds), "the next step of the cache is outside"
    steady = rates_text(RECORD, lambda depth: 4e-4)
    assert steady == "expected 2,500 tokens/s at 600 tokens of context, and within a tenth of that up to all 8,192"
    assert rates_text(RECORD, lambda depth: None) == "expected 2,500 tokens/s"
    assert rates_text(replace(RECORD, predicted=None), seconds) == UNMEASURED


def test_an_emulated_device_makes_no_rate_expected():
    line = expected_line(RECORD, OPERATORS, N_LAYER, lambda depth: 4e-4, timed=False)
    assert "tokens/s" not in line and "KV cache" in line
    assert "; expected 2,500 tokens/s" in expected_line(RECORD, OPERATORS, N_LAYER, lambda depth: 4e-4)


def test_measured_figures_stand_beside_the_expected_ones():
    assert measured_texts(0.5, 0.1, Predicted(ttft_s=0.4, tpot_s=0.08, total_s=1.0)) == [
        "TTFT 500 ms (400 ms expected)", "TPOT 100 ms", "10.0 tokens/s (12.5 expected)"
    ]  # fmt: skip
    assert measured_texts(0.5, 0.1, None) == ["TTFT 500 ms", "TPOT 100 ms", "10.0 tokens/s"]
    assert measured_texts(0.5, 0.0, None) == ["TTFT 500 ms"]


def card(kind="GPU", spec="CUDA0", free=8 * GIB):
    info = DeviceInfo(
        name="CUDA0", description="a card", backend="CUDA", type=kind, memory_total=12 * GIB, memory_free=free,
        asynchronous=True, host_buffer=True, events=True,
    )  # fmt: skip
    return OpenDevice("CUDA0", info, parse_device(spec))


def test_memory_that_a_driver_keeps_elsewhere_is_said():
    said = spill_warning(10 * GIB, card())
    assert "was given 10 GiB but had 8 GiB free" in said and "2 GiB in host memory" in said


@pytest.mark.parametrize(
    ("n_bytes", "device"),
    [
        (8 * GIB, card()),
        (8 * GIB + GIB // 100, card()),  # what the device says is not exact
        (10 * GIB, card("IGPU")),  # its memory is the host's
        (10 * GIB, card(spec="rpc-worker")),
        (10 * GIB, card(spec="emulated:rtx3060")),
        (10 * GIB, card(free=0)),  # it does not tell
        (10 * GIB, OpenDevice("none", None, parse_device("none"))),
    ],
)
def test_nothing_is_said_of_what_is_not_known_to_spill(n_bytes, device):
    assert spill_warning(n_bytes, device) == ""


def test_a_device_without_room_for_a_model_is_told_with_what_it_had_free():
    reason = "unable to allocate CUDA0 buffer"
    refused = load_refusal("m.gguf", card(), reason)
    assert isinstance(refused, DeviceError)
    assert str(refused).startswith(f"CUDA0 (8 GiB were free) has no room for the model: {reason}; ")
    assert str(load_refusal("m.gguf", card(free=0), reason)).startswith("CUDA0 has no room")
    for device in (None, OpenDevice("none", None, parse_device("none"))):
        assert isinstance(load_refusal("m.gguf", device, reason), ModelFileError)
    assert isinstance(load_refusal("m.gguf", card(), "unknown architecture"), ModelFileError)
