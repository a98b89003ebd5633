"""What a run is expected to do, said before it; what became of that, said after; and what runs took, which is kept, and
corrects the profile that predicts the next."""

from dataclasses import replace
from types import SimpleNamespace

import placement_records
import pytest
from worlds import CARD, HOST, SMALL, World, model_info

from oallama.cli.placement_options import expected
from oallama.core.errors import DeviceError, ModelFileError
from oallama.core.history import BlockRuns, History, Rates, SeenPasses
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, DeviceInfo, Predicted, Workload
from oallama.core.units import GIB
from oallama.device.machines import machine_of
from oallama.device.opening import OpenDevice
from oallama.device.spec import parse_device
from oallama.model.memory import load_refusal
from oallama.planner.price import seen_passes
from oallama.profile.history import (
    CHANGE,
    MEMORY_PASSES,
    SLOWEST,
    adopted,
    corrected,
    history_path,
    read_history,
    timings_of,
    with_seen,
    write_history,
)
from oallama.profile.store import FOLDER_VARIABLE
from oallama.report.expected import (
    ENOUGH_TOKENS,
    UNMEASURED,
    drift_text,
    fits_nothing,
    fits_text,
    measured_texts,
    rates_text,
)
from oallama.run.held import spill_warning

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
    assert (
        " of weights on rpc://127.0.0.1:9 with 500 KiB of KV cache and 250 KiB of buffers, of a limit of 5.15" in some
    )
    assert some.endswith(" MiB; the other weights and the KV cache of 1 of 3 layers on the CPU")
    placed = tuple(replace(p, gg=1.0, cg=0.0, cc=0.0) for p in RECORD.operators)
    whole = replace(RECORD, operators=placed, n_gpu_layers=N_LAYER + 1)
    assert fits_text(whole, OPERATORS, N_LAYER).startswith("all weights on ")
    assert "on the CPU" not in fits_text(whole, OPERATORS, N_LAYER)
    on_cpu = placement_records.on_cpu(SERVED).plan
    none = fits_text(on_cpu, OPERATORS, N_LAYER)
    assert none.startswith("all weights (") and none.endswith(") are on the CPU")
    memory = replace(on_cpu.memory, limit=922 << 10)
    nothing = fits_text(replace(on_cpu, policy="fit", device="CUDA0", memory=memory), OPERATORS, N_LAYER)
    assert nothing == f"nothing fits the 922 KiB of CUDA0: {none}"
    with_buffers = replace(on_cpu, policy="fit", device="CUDA0", memory=replace(memory, compute=6 << 20))
    assert nothing == fits_text(with_buffers, OPERATORS, N_LAYER)
    assert fits_nothing(with_buffers) and not fits_nothing(on_cpu) and not fits_nothing(whole)


def test_rates_are_those_of_the_workload_and_of_a_full_context():
    said = rates_text(RECORD, 8e-4)
    assert said == "expected 2,500 tokens/s at 600 tokens of context, 1,250 at all 8,192"
    assert rates_text(RECORD, None) == "expected 2,500 tokens/s"
    assert rates_text(replace(RECORD, predicted=None), 8e-4) == UNMEASURED
    on_cpu = rates_text(replace(RECORD, predicted=None, device="none"), 8e-4)
    assert on_cpu == f"{UNMEASURED} (`oallama profile MODEL`)", "there is nothing to tune"


@pytest.mark.parametrize("is_emulated", [False, True])
def test_an_emulated_device_makes_no_rate_expected(is_emulated):
    placer = SimpleNamespace(
        operators=OPERATORS, model=SimpleNamespace(n_layer=N_LAYER), device=SimpleNamespace(is_emulated=is_emulated),
        known_profile=None, token_seconds=lambda plan, depth: 8e-4,
    )  # fmt: skip
    line = expected(placer, RECORD)
    assert "KV cache" in line and ("; expected 2,500 tokens/s at 600" in line) != is_emulated


def test_measured_figures_stand_beside_the_expected_ones():
    assert measured_texts(26, 0.408, 0.1, Predicted(ttft_s=0.04, tpot_s=0.08, total_s=1.0)) == [
        "prompt 26 tokens, 0.41 s (40 ms predicted)", "answer 10.0 tokens/s (12.5 predicted)"
    ]  # fmt: skip
    assert measured_texts(26, 12.3, 0.1, None, n_cached=2) == [
        "prompt 26 tokens (2 cached), 12.3 s", "answer 10.0 tokens/s"
    ]  # fmt: skip
    assert measured_texts(1835, 12.3, 0.1, None, n_cached=1024)[0] == "prompt 1,835 tokens (1,024 cached), 12.3 s"
    assert measured_texts(1, 0.5, 0.0, None) == ["prompt 1 token, 0.50 s"]


def card(kind="GPU", spec="CUDA0", free=8 * GIB):
    info = DeviceInfo(
        name="CUDA0", description="a card", backend="CUDA", type=kind, memory_total=12 * GIB, memory_free=free,
        asynchronous=True, host_buffer=True, events=True,
    )  # fmt: skip
    return OpenDevice("CUDA0", info, parse_device(spec))


def test_memory_that_a_driver_keeps_elsewhere_is_said():
    said = spill_warning(10 * GIB, "CUDA0", card().own_free)
    assert "had 8 GiB free but got 10 GiB" in said and "2 GiB in host memory" in said


@pytest.mark.parametrize(
    ("n_bytes", "device"),
    [
        (8 * GIB, card()),
        (8 * GIB + GIB // 100, card()),  # what the device says is not exact
        (10 * GIB, card("IGPU")),  # its memory is the host's
        (10 * GIB, card(spec="rpc://h:1")),
        (10 * GIB, card(spec="emulated:rtx3060")),
        (10 * GIB, card(free=0)),  # it does not tell
        (10 * GIB, OpenDevice("none", None, parse_device("none"))),
    ],
)
def test_nothing_is_said_of_what_is_not_known_to_spill(n_bytes, device):
    assert spill_warning(n_bytes, device.name, device.own_free) == ""


def test_a_device_without_room_for_a_model_is_told_with_what_it_had_free():
    reason = "unable to allocate CUDA0 buffer"
    refused = load_refusal("m.gguf", card(), reason)
    assert isinstance(refused, DeviceError)
    assert str(refused).startswith(f"CUDA0 (8 GiB were free) has no room for the model: {reason}; ")
    assert str(load_refusal("m.gguf", card(free=0), reason)).startswith("CUDA0 has no room")
    for device in (None, OpenDevice("none", None, parse_device("none"))):
        assert isinstance(load_refusal("m.gguf", device, reason), ModelFileError)
    assert isinstance(load_refusal("m.gguf", card(), "unknown architecture"), ModelFileError)


@pytest.mark.parametrize(("tpot_s", "says"), [(0.13, "1.30×"), (0.07, "0.70×"), (0.12, ""), (0.08, "")])
def test_tokens_far_from_what_was_predicted_are_one_sentence(tpot_s, says):
    drift = drift_text(ENOUGH_TOKENS, tpot_s, 0.1, "m.gguf")
    assert says in drift and bool(drift) is bool(says)
    assert not drift or "`oallama tune m.gguf`" in drift
    assert drift_text(ENOUGH_TOKENS - 1, tpot_s, 0.1, "m.gguf") == drift_text(64, tpot_s, None, "m.gguf") == ""


def test_tokens_that_are_slow_beside_other_programs_say_so_in_one_sentence():
    drift = drift_text(4, 0.31, 0.1, "m.gguf", others_cores=1.9, n_cores=2)
    assert "3.1×" in drift and "1.9 of 2 cores" in drift and "tune" not in drift
    for tpot_s, others in ((0.31, 0.2), (0.29, 1.9)):
        assert "tune" in drift_text(ENOUGH_TOKENS, tpot_s, 0.1, "m.gguf", others, 2), "the machine has become slower"


# ---- what runs took

NOTHING = History(version=1, model_fingerprint="f" * 64, profile="a" * 16)
WORLD = World(
    model=model_info(n_embd=1024, n_ff=8192),
    card=replace(CARD, pinned_bytes_per_s=10e9, pageable_bytes_per_s=10e9),
    host=replace(HOST, bytes_per_s=20e9),
    options=Options(flash_attn="on", gpu_weights=0.0),
    share=1.0,
).with_profile(sharing=())
"""A world in which the CPU computes a part of each FFN, and another part is streamed."""
PASSES = SeenPasses(
    batch=1, n_passes=100, cpu_s=2.0, wait_s=1.0, other_s=0.5, predicted_cpu_s=2.0, predicted_device_s=3.0,
    predicted_between_s=0.25, copies_last=False,
)  # fmt: skip


def test_passes_are_averaged_and_old_ones_forgotten():
    once = with_seen(NOTHING, [PASSES])
    assert once.seen == (PASSES,)
    twice = with_seen(once, [replace(PASSES, n_passes=300, cpu_s=4.0), replace(PASSES, batch=8)])
    assert [one.batch for one in twice.seen] == [1, 8]
    assert twice.seen[0].cpu_s == pytest.approx(3.5) and twice.seen[0].n_passes == 400
    long = with_seen(NOTHING, [replace(PASSES, n_passes=10**6)])
    half = with_seen(long, [replace(PASSES, n_passes=MEMORY_PASSES, cpu_s=4.0)])
    assert half.seen[0].cpu_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("passes", "decode", "link"),
    [
        (replace(PASSES, cpu_s=2.05, wait_s=0.2), Rates(), 1.0),  # as predicted
        (replace(PASSES, cpu_s=3.0, wait_s=0.0), Rates(1.5), 1.0),  # the device was not waited for
        (replace(PASSES, wait_s=3.25), Rates(1.0, 2.0), 1.0),
        (replace(PASSES, wait_s=3.25, copies_last=True), Rates(), 2.0),
        (replace(PASSES, cpu_s=1e3, wait_s=0.0), Rates(SLOWEST), 1.0),
        (replace(PASSES, cpu_s=3.0, wait_s=0.0, n_passes=31), Rates(), 1.0),  # too few
    ],
)
def test_rates_follow_from_what_was_seen(passes, decode, link):
    seen = with_seen(NOTHING, [passes])
    history = adopted(seen)
    assert history.link == pytest.approx(link) and history.prompt == Rates()
    assert (history.decode.cpu, history.decode.device) == pytest.approx((decode.cpu, decode.device))
    assert (history is seen) is history.changes_nothing
    assert history is seen or history.seen == ()


@pytest.mark.parametrize("slower", [1.0, 1.6])
def test_a_corrected_profile_predicts_what_was_seen(slower):
    """Of a CPU that is slower than the profile has it: the runs of single tokens that a true profile predicts."""
    plan = WORLD.plan("scheinfer")
    name = next(place.name for place in plan.operators if place.cg and place.cc)
    cases = WORLD.profile.cases
    slow = tuple(replace(c, seconds=slower * c.seconds) if c.device == CPU_DEVICE else c for c in cases)

    def seen(world, run):
        placer = world.placer()
        (found,) = seen_passes(placer.problem_for(plan), plan, placer.placed(plan), [run])
        return found

    nothing = BlockRuns(block=name, batch=1, n_runs=64, n_tokens=64, cpu_s=0.0, wait_s=0.0, other_s=0.0)
    true = seen(WORLD.with_profile(cases=slow), nothing)
    waited_s = max(0.0, true.predicted_device_s - true.predicted_between_s - true.predicted_cpu_s)
    run = replace(nothing, cpu_s=64 * true.predicted_cpu_s, wait_s=64 * waited_s)
    one = seen(WORLD, run)
    assert one.cpu_s == pytest.approx(slower * one.predicted_cpu_s, rel=0.02)
    history = adopted(with_seen(NOTHING, [one]))
    assert history.decode.cpu == pytest.approx(slower if slower - 1 > CHANGE else 1.0, rel=0.02)
    better = corrected(WORLD.profile, history)
    after = seen(WORLD.with_profile(cases=better.cases, link=better.link), run)
    assert after.cpu_s == pytest.approx(after.predicted_cpu_s, rel=0.02)
    assert (better is WORLD.profile) is (slower == 1.0)


def test_a_correction_scales_each_side_and_says_so():
    profile = WORLD.profile
    history = replace(NOTHING, decode=Rates(2.0, 3.0), prompt=Rates(5.0, 7.0), link=11.0)
    scaled = corrected(profile, history)
    for before, after in zip(profile.cases, scaled.cases, strict=True):
        rates = history.decode if before.n_tokens == 1 else history.prompt
        rate = rates.cpu if before.device == CPU_DEVICE else rates.device
        assert after.seconds == pytest.approx(rate * before.seconds)
        assert after.samples == pytest.approx([rate * sample for sample in before.samples])
    for name, fit in profile.link.items():
        rate = 11.0 if name.startswith("h2d") else 1.0
        assert scaled.link[name].seconds(1e6) == pytest.approx(rate * fit.seconds(1e6))
    assert "--refresh" in scaled.warnings[-1]
    assert replace(scaled, cases=profile.cases, link=profile.link, warnings=profile.warnings) == profile


def test_a_history_is_kept_by_model_and_machine_until_that_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    profile = WORLD.profile
    nothing = replace(NOTHING, profile=(timings := timings_of(profile)))
    assert read_history("f" * 64, "a", timings) == nothing
    history = replace(with_seen(nothing, [PASSES]), link=1.5)
    write_history(history, "a")
    assert read_history("f" * 64, "a", timings) == history
    again = timings_of(replace(profile, cases=(replace(profile.cases[0], seconds=1.0), *profile.cases[1:])))
    for other in (("e" * 64, "a", timings), ("f" * 64, "b", timings), ("f" * 64, "a", again)):
        assert read_history(*other).seen == ()
    path = history_path("f" * 64, "a")
    for damaged in ("", "{}", path.read_text().replace('"version": 1', '"version": 2')):
        path.write_text(damaged)
        assert read_history("f" * 64, "a", timings) == nothing
