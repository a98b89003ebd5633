"""What runs took, beside what was predicted: kept, and a profile that is corrected by it predicts them."""

from dataclasses import replace

import pytest
from worlds import CARD, HOST, World, model_info

from oallama.core.history import BlockRuns, History, Rates, SeenPasses
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE
from oallama.place.price import seen_passes
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
from oallama.report.expected import ENOUGH_TOKENS, drift_text

pytestmark = pytest.mark.usefixtures("small_cards")

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
    plan = WORLD.plan("hetegen")
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


@pytest.mark.parametrize(("tpot_s", "says"), [(0.13, "1.30 times"), (0.07, "0.70 times"), (0.12, ""), (0.08, "")])
def test_tokens_far_from_what_was_predicted_are_one_sentence(tpot_s, says):
    drift = drift_text(ENOUGH_TOKENS, tpot_s, 0.1, "m.gguf")
    assert says in drift and bool(drift) is bool(says)
    assert not drift or "`oallama tune m.gguf`" in drift
    assert drift_text(ENOUGH_TOKENS - 1, tpot_s, 0.1, "m.gguf") == drift_text(64, tpot_s, None, "m.gguf") == ""


def test_tokens_that_are_slow_beside_other_programs_say_so_in_one_sentence():
    drift = drift_text(4, 0.31, 0.1, "m.gguf", others_cores=1.9, n_cores=2)
    assert "3.1 times" in drift and "1.9 of 2 cores" in drift and "tune" not in drift
    for tpot_s, others in ((0.31, 0.2), (0.29, 1.9)):
        assert "tune" in drift_text(ENOUGH_TOKENS, tpot_s, 0.1, "m.gguf", others, 2), "the machine has become slower"
