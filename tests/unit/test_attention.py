"""Flash attention or not: chosen from what was timed, recorded in the plan, overruled by the user."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_cases import CPU, PER_POSITION, profile, rest
from placement_cases import model, operators

from oallama.core.errors import DoesNotFit, PlanError, UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, FlashAttention, MemoryLedger, Operator, Predicted, Workload
from oallama.cost.passes import Pass, passes, passes_at
from oallama.place.attention import (
    AttentionRule,
    attention_choices,
    attention_seconds,
    rest_total,
    scores_fit,
    usual_attention,
    with_attention,
)
from oallama.place.placement import Candidate, Placement, unmeasured_cpu_record
from oallama.plan.plan import Plan

N_LAYER = 4


def decode_at(depth: int, n_gen: int = 10) -> tuple[Pass, ...]:
    return (Pass(1, depth, n_gen),)


@pytest.mark.parametrize(
    ("depth", "faster"), [(1, "on"), (100, "on"), (153, "on"), (154, "off"), (256, "off"), (300, "on"), (4096, "off")]
)
def test_the_choice_follows_the_depth(depth: int, faster: str) -> None:
    assert attention_choices(CPU, decode_at(depth)) == (faster,)
    times = {way: attention_seconds(CPU, way, "CPU", decode_at(depth)) for way in PER_POSITION}  # type: ignore[arg-type]
    assert times["on"] == pytest.approx(10 * 1e-6 * depth)
    assert times["off"] == pytest.approx(10 * 0.6e-6 * -(-depth // 256) * 256)


def test_the_whole_workload_decides() -> None:
    """A few deep tokens do not outweigh many shallow ones."""
    shallow, deep = decode_at(32, 1000), decode_at(2048, 1)
    assert attention_choices(CPU, shallow + deep) == ("on",)
    assert attention_choices(CPU, decode_at(32, 10) + decode_at(2048, 10)) == ("off",)


def test_what_is_impossible_or_unknown_is_not_chosen() -> None:
    deep = decode_at(2048)
    assert attention_choices(CPU, deep, plain_allowed=False) == ("on",)
    assert attention_choices(profile(rest("CPU", "on")), deep) == ("on",)
    assert attention_choices(profile(rest("CPU", "off")), decode_at(1)) == ("off",)
    assert attention_choices(profile(), deep) == ()


def test_both_are_planned_with_where_cpu_and_device_differ() -> None:
    flash_device = profile(*(rest("CPU", way) for way in PER_POSITION), rest("GPU", "on", 0.1), rest("GPU", "off"),
                           device="GPU")  # fmt: skip
    assert attention_choices(flash_device, decode_at(2048)) == ("on", "off")
    assert attention_choices(flash_device, decode_at(32)) == ("on",)
    lacking = profile(*(rest("CPU", way) for way in PER_POSITION), rest("GPU", "off"), device="GPU")
    assert attention_choices(lacking, decode_at(32)) == ("off",)


def test_a_profile_can_be_cut_down_to_one_way() -> None:
    mixed = profile(rest("CPU", "on"), rest("CPU", "off"), rest("GPU", "off"), device="GPU")
    assert with_attention(mixed, "auto") == mixed
    assert with_attention(mixed, "off").rest == rest("CPU", "off") + rest("GPU", "off")
    assert with_attention(mixed, "on").rest == rest("CPU", "on") + rest("GPU", "off")  # the GPU has nothing else
    seconds = rest_total(mixed, "on", (3, 1), decode_at(512, 1))
    assert seconds == pytest.approx(3 * 512e-6 + 1 * 0.6 * 512e-6)


def test_unmeasured_the_depth_decides() -> None:
    assert usual_attention(passes_at(0, 0, 128, 512)) == "on"
    assert usual_attention(passes_at(0, 20, 128, 512)) == "on"
    assert usual_attention(()) == "on"
    assert usual_attention(passes_at(512, 0, 16, 512)) == "off"
    assert usual_attention(passes_at(4096, 0, 128, 512)) == "off"


def test_passes_of_a_workload_are_those_behind_nothing() -> None:
    load = Workload(1000, 100, 4096, 512)
    assert passes(load, "mixed") == passes_at(0, 1000, 100, 512)
    assert passes_at(300, 600, 0, 512) == (Pass(512, 812, 1, 0), Pass(88, 900, 1, 1))
    assert passes_at(300, 0, 8, 512) == (Pass(1, 304, 8),)


def test_the_scores_may_not_be_larger_than_the_model() -> None:
    small = replace(model(2), n_head=32, file_bytes=10**9)
    assert scores_fit(small, Workload(1, 1, 4096))  # 256 MiB
    assert not scores_fit(small, Workload(1, 1, 16384))  # 1 GiB
    assert scores_fit(small, Workload(1, 1, 16384, n_ubatch=128))
    assert scores_fit(replace(small, file_bytes=3 * 10**9), Workload(1, 1, 16384))


def test_a_larger_micro_batch_keeps_to_that() -> None:
    allowed = [(way, n) for way in ("on", "off") for n in (512, 1024) if rule().allows(way, Workload(1, 1, 16384, n))]
    assert allowed == [("on", 512), ("on", 1024), ("off", 512)]


#
# the rule: what the user asked for, and a placement for each way
#

LOAD = Workload(64, 128, 4096)


def decision(seconds: float, first_device_layer: int = N_LAYER + 1) -> Candidate:
    ops: list[Operator] = operators(N_LAYER)
    placed = Placement.whole((False,) * len(ops), first_device_layer, seconds)
    ledger = MemoryLedger(0, 0.9, 0, 0, 0, 0, 0, 0, 0)
    return Candidate("oato", LOAD, placed, ledger, Predicted(seconds, 0.0, seconds), ())


BOTH = profile(*(rest("CPU", way) for way in PER_POSITION), rest("GPU", "on", 0.1), rest("GPU", "off"), device="GPU")
DEEP = decode_at(2048)


def rule(flash_attn: str = "auto", type_v: str | None = None) -> AttentionRule:
    return AttentionRule(model(N_LAYER), Options(flash_attn=flash_attn, type_v=type_v))  # type: ignore[arg-type]


def test_the_faster_of_both_placements_is_taken() -> None:
    load = Workload(2048, 64, 4096)
    seconds = {"on": 2.0, "off": 1.0}
    found, way = rule().decide(lambda way: decision(seconds[way]), BOTH, load)
    assert (found.predicted.total_s, way) == (1.0, "off")
    seconds = {"on": 1.0, "off": 1.0}
    assert rule().decide(lambda way: decision(seconds[way]), BOTH, load)[1] == "on"  # the device's


def test_attention_over_other_passes_takes_the_place_of_the_workloads() -> None:
    """As `oallama bench` asks: the workload itself is shallow, so that it would be "on" on either side."""

    def placed_with(on_device: int, attention_passes: tuple[Pass, ...] | None) -> str:
        layers = (N_LAYER - on_device, on_device)

        def decided(way: FlashAttention) -> Candidate:
            return decision(1.0 + rest_total(BOTH, way, layers, passes(LOAD, "mixed")), N_LAYER - on_device)

        return rule().decide(decided, BOTH, LOAD, attention_passes)[1]

    assert placed_with(0, None) == placed_with(N_LAYER, None) == "on"
    assert placed_with(0, DEEP) == "off"
    assert placed_with(N_LAYER, DEEP) == "on"
    for on_device in range(N_LAYER + 1):
        layers, long = (N_LAYER - on_device, on_device), decode_at(2048, 1000)
        faster = min(PER_POSITION, key=lambda way: rest_total(BOTH, way, layers, long))  # type: ignore[arg-type]
        assert placed_with(on_device, long) == faster


def test_a_way_that_does_not_fit_leaves_the_other() -> None:
    def only(fits: str) -> FlashAttention:
        def decided(way: FlashAttention) -> Candidate:
            if way != fits:
                raise DoesNotFit(2, 1, "GPU")
            return decision(1.0)

        return rule().decide(decided, BOTH, Workload(2048, 64, 4096))[1]

    assert only("on") == "on"
    assert only("off") == "off"
    with pytest.raises(DoesNotFit):
        only("neither")


@pytest.mark.parametrize("way", ["on", "off"])
def test_the_user_always_wins(way: str) -> None:
    asked = rule(way)
    assert asked.decide(lambda way: decision(1.0), BOTH, Workload(2048, 64, 4096))[1] == way
    assert asked.unmeasured_on_cpu(LOAD, lambda: CPU, DEEP) == way
    assert asked.attention("auto").flash_attn == way


def test_on_the_cpu_alone_a_profile_is_used_if_there_is_one() -> None:
    slow_plain = profile(rest("CPU", "on", 0.1), rest("CPU", "off"))
    assert rule().unmeasured_on_cpu(LOAD, lambda: None, DEEP) == "off"
    assert rule().unmeasured_on_cpu(LOAD, lambda: slow_plain, DEEP) == "on"
    assert rule().unmeasured_on_cpu(LOAD, lambda: BOTH, DEEP) == "off"  # its device does not count
    assert rule(type_v="q8_0").unmeasured_on_cpu(LOAD, lambda: CPU, DEEP) == "on"


def test_a_quantised_v_cache_needs_flash_attention() -> None:
    assert rule(type_v="q8_0").decide(lambda way: decision(1.0), CPU, Workload(2048, 64, 4096))[1] == "on"
    with pytest.raises(UsageError, match="V cache of type q8_0 needs flash attention"):
        rule("off", "q8_0")
    planned = Attention("off", "f16", "f16")
    assert Options(type_v="Q8_0").attention(planned) == Attention("on", "f16", "q8_0")
    assert Options().attention(planned) == planned


#
# the plan
#

RECORD = unmeasured_cpu_record(model(2), operators(2), LOAD, 0)


def test_a_plan_says_it_and_keeps_saying_it() -> None:
    attention = Attention("off", "q8_0", "bf16")
    plan = replace(RECORD, attention=attention)
    again = Plan.from_json(plan.to_json())
    assert again.attention == attention
    assert plan.to_json()["attention"] == {"flash_attn": "off", "type_k": "q8_0", "type_v": "bf16"}


def test_an_older_plan_says_nothing() -> None:
    document = RECORD.to_json()
    assert "attention" not in document
    assert Plan.from_json(document).attention is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("off", r"plan\.attention must be an object, not 'off'"),
        (
            {"flash_attn": "maybe", "type_k": "f16", "type_v": "f16"},
            "flash_attn must be one of auto, on, off, not 'maybe'",
        ),
        ({"flash_attn": "on", "type_k": "q3", "type_v": "f16"}, "type_k is 'q3'"),
        ({"flash_attn": "on", "type_k": "f16"}, "type_v is missing"),
    ],
)
def test_nonsense_in_a_plan_is_one_sentence(said: object, message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        Plan.from_json({**RECORD.to_json(), "attention": said})
    assert "\n" not in str(error.value)
