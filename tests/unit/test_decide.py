"""From a policy to a verified placement, with a probe that answers from a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from placement_cases import model, operators

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.profile import LinearFit, Profile, ProfileCase
from oallama.core.types import MulMat, Operator, StreamSettings, Workload
from oallama.cost.graph import build_graph
from oallama.cost.slices import Cut
from oallama.place.decide import decide
from oallama.place.explain import baselines
from oallama.place.memory import CorrectedRoom, DeviceMemory, ledger
from oallama.place.placement import Place, Placement, plan_record
from oallama.place.policies.registry import Rules
from oallama.place.problem import LoadBytes, Problem, device_memory, own_bytes

N_LAYER = 4
LOAD = Workload(n_prompt=64, n_gen=32, n_ctx=256)


def profile(device: str = "RPC0", t_gpu_s: float = 0.1) -> Profile:
    cases = []
    for shape in ((256, 256, 1), (256, 1000, 1)):
        for n_tokens in (1, 512):
            mul_mat = MulMat("MUL_MAT", "F16", shape)
            cases.append(ProfileCase("CPU", "CPU", mul_mat, n_tokens, 0, 1.0, (1.0,)))
            cases.append(ProfileCase("RPC0", "device", mul_mat, n_tokens, 0, t_gpu_s, (t_gpu_s,)))
    link = {key: LinearFit(1e-3, 0.0, 1.0) for key in ("h2d_pinned", "h2d_pageable", "d2h")}
    return Profile(1, {}, device, tuple(cases), (), link if device != "CPU" else {}, None, 0.0, ())


class Table:
    """A probe: KV 100 bytes a layer, norms 10 bytes a layer, compute as a share of the micro-batch; hidden: of the
    bytes of operators there, more bytes."""

    def __init__(
        self,
        ops: list[Operator],
        free: int,
        compute_per_token: float = 0.0,
        hidden: Callable[[int], int] = lambda placed_bytes: 0,
    ) -> None:
        self.ops, self.free, self.compute_per_token, self.hidden = ops, free, compute_per_token, hidden
        self.asked: list[tuple[Workload, Placement]] = []

    def __call__(self, load: Workload, placed: Placement) -> LoadBytes:
        self.asked.append((load, placed))
        n_device_layers = max(0, N_LAYER - placed.first_device_layer)
        placed_bytes = sum(op.bytes for op, there in zip(self.ops, placed.on_device, strict=True) if there)
        total = sum(op.bytes for op in self.ops)
        if placed.first_device_layer > N_LAYER:
            return LoadBytes(0, total, 0, 0, self.free)
        compute = int(self.compute_per_token * load.n_ubatch) + self.hidden(placed_bytes)
        return LoadBytes(
            10 * n_device_layers + placed_bytes, total - placed_bytes, 100 * n_device_layers, compute, self.free
        )


def problem(free: int, gpu_weights: float | None = None, **table: Any) -> tuple[Problem, Table]:
    ops = operators(N_LAYER)
    probe = Table(ops, free, **table)
    graph = build_graph(model(N_LAYER), ops)
    return Problem(tuple(ops), graph, profile(), probe, None, 0.9, gpu_weights), probe


def test_ledger_stays_under_ninety_percent_and_adds_up() -> None:
    made, _ = problem(free=20_000)
    decision = decide(made, "oato", LOAD, "mixed")
    memory = decision.memory
    assert memory.limit == 18_000
    assert memory.weights_gpu + memory.kv + memory.compute + memory.staging + memory.spare == memory.limit
    assert memory.spare >= 0
    assert any(decision.placement.on_device)


def test_everything_goes_to_a_device_that_is_faster_and_large_enough() -> None:
    made, _ = problem(free=10**6)
    decision = decide(made, "auto", LOAD, "mixed")
    assert all(decision.placement.on_device)
    assert decision.predicted.total_s == pytest.approx(
        decision.predicted.ttft_s + LOAD.n_gen * decision.predicted.tpot_s
    )


def test_gpu_weights_caps_the_share_of_operator_bytes() -> None:
    for share in (0.25, 0.5, 0.75):
        made, _ = problem(free=10**6, gpu_weights=share)
        for policy in ("oato", "layers"):
            decision = decide(made, policy, LOAD, "mixed")
            ops = made.operators
            placed = sum(op.bytes for op, there in zip(ops, decision.placement.on_device, strict=True) if there)
            assert placed <= share * sum(op.bytes for op in ops)
            assert placed > 0


def test_what_the_probe_adds_is_taken_off_the_budget_until_it_fits() -> None:
    made, probe = problem(free=20_000, hidden=lambda placed_bytes: 2_500 if placed_bytes else 0)
    decision = decide(made, "oato", LOAD, "mixed")
    assert decision.memory.spare >= 0
    assert len(probe.asked) >= 3  # all on the host, a first proposal that is too large, a smaller one


@pytest.mark.parametrize("policy", ["oato", "layers", "scheinfer", "split"])
def test_what_the_first_look_counted_too_much_is_used(policy: str) -> None:
    """With every operator on the host, llama.cpp needs room to stream them; what is on the device needs none."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: 0 if placed_bytes else 8_000)
    decision = decide(made, policy, LOAD, "mixed")
    assert 0 <= decision.memory.spare < (4_500 if policy == "layers" else 1_000)


@pytest.mark.parametrize("policy", ["oato", "scheinfer", "split"])
def test_what_is_a_little_too_large_again_and_again_is_shrunk_until_it_fits(policy: str) -> None:
    """What is taken off the device comes back as a buffer to stream it to, until enough is gone."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: max(0, 17_000 - placed_bytes) * (placed_bytes > 9_000))
    decision = decide(made, policy, LOAD, "mixed")
    assert decision.memory.spare >= 0 and any(decision.placement.on_device)


def test_overruns_of_two_looks_add_up() -> None:
    """3,000 bytes more than expected, then 500 more beside what that took off: 3,500 in all, whatever is proposed."""
    first = DeviceMemory(capacity=20_000, fill=0.9, kv=400, compute=100, other_weights=40, n_layer=N_LAYER)
    room = CorrectedRoom(first)
    for hidden in (3_000, 3_500):
        own = room.memory.operator_room(0)
        real = ledger(first.capacity, first.fill, own + 40, 0, 400, 100 + hidden)
        assert real.spare < 0
        assert room.learn(0, own, real)
    assert room.memory.compute >= 100 + 3_500
    own = room.memory.operator_room(0)
    assert ledger(first.capacity, first.fill, own + 40, 0, 400, 100 + 3_500).spare >= 0


def test_operators_need_their_layers_norms_and_cache_beside_them() -> None:
    memory = DeviceMemory(capacity=20_000, fill=0.9, kv=400, compute=100, other_weights=40, n_layer=N_LAYER)
    rooms = [memory.operator_room(first) for first in range(N_LAYER + 2)]
    assert rooms == [17_460, 17_570, 17_680, 17_790, 17_900, 0], "llama.cpp has nothing there behind the last layer"
    limited = replace(memory, operators_limit=17_600)
    assert [limited.operator_room(first) for first in (0, 2)] == [17_460, 17_600]


def test_slices_are_a_placement_s_own_bytes_with_what_they_need_beside_them() -> None:
    made, _ = problem(free=20_000)
    placed = Placement.whole([i < 3 for i in range(len(made.operators))], 0)
    assert own_bytes(made, placed) == 3 * 1000
    assert own_bytes(made, replace(placed, gg_bytes=500, staging_bytes=30, hot_bytes=7)) == 3 * 1000 + 500 + 30 + 7


def test_a_record_is_of_the_machine_and_says_how_tokens_are_assigned() -> None:
    made, _ = problem(free=20_000)
    decision = decide(made, "oato", LOAD, "mixed")
    assert plan_record(decision, model(N_LAYER), made.operators, "card", "a machine").machine_fingerprint == "a machine"
    tokens = ((1, 0), (64, 16))
    streamed = replace(decision.placement, token_assignment=tokens, streaming=StreamSettings(3))
    sliced = replace(decision, placement=streamed)
    record = plan_record(sliced, model(N_LAYER), made.operators, "card", "a machine")
    assert (record.token_assignment, record.streaming) == (tokens, StreamSettings(3))


def test_between_what_fitted_and_what_did_not_the_room_is_halved() -> None:
    """Beside more than 80,000 bytes of operators another 20,000 are taken."""
    first = DeviceMemory(capacity=100_000, fill=0.9, kv=400, compute=100, other_weights=40, n_layer=N_LAYER)
    room, fitted = CorrectedRoom(first), []
    for _ in range(12):
        own = room.memory.operator_room(0)
        real = ledger(first.capacity, first.fill, own + 40, 0, 400, 100 + (20_000 if own > 80_000 else 0))
        fitted += [own] if real.spare >= 0 else []
        if not room.learn(0, own, real):
            break
    else:
        pytest.fail("it looks without end")
    assert 80_000 - 2 * 0.003 * first.limit <= max(fitted) <= 80_000


def test_a_placement_is_verified_with_the_layouts_that_its_plan_names() -> None:
    made, probe = problem(free=12_000)
    decision = decide(made, "oato", LOAD, "mixed")
    assert probe.asked[-1][1] == decision.placement
    assert set(decision.placement.layouts) == {"CPU"}
    left_open = replace(made, profile=replace(made.profile, fingerprint={"device_host_buffer": False}))
    assert set(decide(left_open, "oato", LOAD, "mixed").placement.layouts) == {None}, "llama.cpp chooses as we would"


def test_micro_batch_is_halved_until_the_compute_buffers_fit_and_said_so() -> None:
    made, _ = problem(free=20_000, compute_per_token=100)  # 51,200 bytes at 512 tokens, 12,800 at 128
    decision = decide(made, "oato", LOAD, "mixed")
    assert decision.workload.n_ubatch == 128
    assert "micro-batch lowered from 512 to 128" in decision.notes[0]


def test_does_not_fit_names_required_available_and_device() -> None:
    made, _ = problem(free=1_000, compute_per_token=100)
    with pytest.raises(DoesNotFit) as caught:
        decide(made, "oato", LOAD, "mixed")
    assert (caught.value.required, caught.value.available, caught.value.device) == (6_400 + 440, 900, "RPC0")
    memory, load, notes = device_memory(made, LOAD, required=False)
    assert memory is None and load == LOAD and "even at a micro-batch of 64 tokens" in notes[0]
    fallback = decide(made, "auto", LOAD, "mixed")
    assert fallback.policy == "cpu"
    assert "everything stays on the CPU" in fallback.notes[0]


def test_auto_leaves_a_policy_alone_that_nothing_fits() -> None:
    """Whatever is taken off the device comes back as a buffer, and 500 bytes are always too much."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: max(0, 18_500 - placed_bytes) if placed_bytes else 0)
    for policy in ("oato", "atsinfer"):
        with pytest.raises(DoesNotFit, match=f"the {policy} placement"):
            decide(made, policy, LOAD, "mixed")
    decision = decide(made, "auto", LOAD, "mixed")
    assert decision.memory.spare >= 0


def test_kv_that_does_not_fit_leaves_layers_on_the_host() -> None:
    made, _ = problem(free=250)  # limit 225: KV and norms of two layers, no operator of 1000 bytes
    decision = decide(made, "auto", LOAD, "mixed")
    assert decision.policy in ("cpu", "oato", "layers")
    assert not any(decision.placement.on_device)


@pytest.mark.parametrize(("compute_per_token", "n_ubatch"), [(0.05, 512), (1.0, 128)])
def test_the_micro_batch_is_not_halved_for_a_kv_cache_that_does_not_fit_anyway(
    compute_per_token: float, n_ubatch: int
) -> None:
    made, _ = problem(free=250, compute_per_token=compute_per_token)  # KV takes 400
    memory, load, notes = device_memory(made, LOAD, required=True)
    assert memory is not None and memory.operator_room(N_LAYER) >= 0
    assert load.n_ubatch == n_ubatch
    assert "some layers keep theirs on the host" in notes[-1] and len(notes) == 1 + (n_ubatch < 512)


def test_auto_is_never_predicted_slower_than_its_candidates() -> None:
    made, _ = problem(free=16_000)
    auto = decide(made, "auto", LOAD, "mixed")
    for policy in ("oato", "layers", "cpu"):
        assert auto.placement.seconds <= decide(made, policy, LOAD, "mixed").placement.seconds


def test_a_device_is_used_for_whole_layers_and_for_slices_of_any_sort() -> None:
    of = Placement.whole((False, False), first_device_layer=5)
    assert not of.uses_device(4) and of.uses_device(5)
    for some in (Place(Cut(32, 0, 32)), Place(Cut(32, 32, 0)), Place(Cut(0, 64, 0)), Place(Cut(64, 0, 0), None, (1,))):
        assert replace(of, places=(of.places[0], some)).uses_device(4)


def test_slow_device_is_left_alone() -> None:
    made, _ = problem(free=10**6)
    slow = replace(made, profile=profile(t_gpu_s=5.0))
    decision = decide(slow, "oato", LOAD, "mixed")
    assert not any(decision.placement.on_device)
    assert "nothing is placed on RPC0" in decision.notes[0]
    assert decision.memory.spare == decision.memory.limit == 900_000


def test_paper_rules_fill_regardless_of_gain_and_stop_at_the_first_that_does_not_fit() -> None:
    made, _ = problem(free=10**6)
    slow = replace(made, profile=profile(t_gpu_s=5.0))
    assert all(decide(slow, "oato", LOAD, "mixed", Rules("paper", "paper")).placement.on_device)


@pytest.mark.parametrize("name", ["affinity", "fill", "prefetch"])
def test_a_rule_that_there_is_not_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'best'; give one of"):
        Rules(**{name: "best"})  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [Rules(affinity="paper"), Rules(fill="paper"), Rules(fill="full")])
def test_auto_with_rules_of_oato_is_oato_whatever_would_be_faster(rules: Rules) -> None:
    made, _ = problem(free=10**6)
    slow = replace(made, profile=profile(t_gpu_s=5.0))
    assert decide(slow, "auto", LOAD, "mixed").policy == "split"
    decision = decide(slow, "auto", LOAD, "mixed", rules)
    assert decision.policy == "oato"
    assert decision.placement == decide(slow, "oato", LOAD, "mixed", rules).placement
    for policy in ("layers", "scheinfer", "cpu", "hetegen"):
        with pytest.raises(UsageError, match=f"say how oato places; policy {policy} does not"):
            decide(slow, policy, LOAD, "mixed", rules)


def test_full_uses_a_slow_device_up() -> None:
    made, _ = problem(free=16_000)
    slow = replace(made, profile=profile(t_gpu_s=5.0))
    decision = decide(slow, "oato", LOAD, "mixed", Rules(fill="full"))
    assert decision.memory.spare < 1000  # no operator of 1000 bytes would still fit
    assert decision.memory.spare >= 0


def test_without_a_device_every_policy_is_the_cpu() -> None:
    made, _ = problem(free=0)
    alone = replace(made, profile=profile(device="CPU"))
    for policy in ("auto", "oato", "layers", "cpu"):
        assert decide(alone, policy, LOAD, "mixed").policy == "cpu"


def test_a_plan_is_held_against_stock_and_the_cpu_at_the_same_prices() -> None:
    made, probe = problem(free=10**6)
    plan = decide(made, "oato", LOAD, "mixed")
    asked = len(probe.asked)
    stock, alone, bound = baselines(made, LOAD, plan.memory)
    assert (stock.name, alone.name, bound.name) == ("stock --fit", "all CPU", "physical bound")
    assert 0 < bound.predicted.total_s <= plan.predicted.total_s
    assert stock.predicted == plan.predicted, "all fits, so both have all on the device"
    assert alone.predicted == decide(made, "cpu", LOAD, "mixed").predicted
    assert alone.predicted.total_s > 5 * stock.predicted.total_s
    assert all(question in probe.asked[:asked] for question in probe.asked[asked:-1]), "no dry load of their own"
    half, _ = problem(free=16_000, gpu_weights=0.5)
    plan = decide(half, "oato", LOAD, "mixed")
    stock, alone, bound = baselines(half, LOAD, plan.memory)
    assert bound.predicted.total_s <= plan.predicted.total_s <= stock.predicted.total_s < alone.predicted.total_s


def test_without_a_device_a_plan_is_held_against_the_cpu() -> None:
    made, _ = problem(free=10**6)
    held = decide(made, "cpu", LOAD, "mixed").memory
    assert (held.weights_gpu, held.kv, held.compute, held.staging) == (0, 0, 0, 0)
    for without in (replace(made, profile=profile(device="CPU")), replace(made, slices_only=True)):
        assert [one.name for one in baselines(without, LOAD, held)] == ["all CPU", "physical bound"]
    stock, alone, _ = baselines(problem(free=0)[0], LOAD, held)
    assert stock.predicted == alone.predicted


def test_an_encoder_beside_a_decoder_is_refused_in_a_sentence() -> None:
    made, _ = problem(free=10**6)
    encoder = [replace(op, name=f"enc.{op.name}", role=f"enc.{op.role}") for op in operators(N_LAYER, output=False)]
    ops = (*encoder, *made.operators)
    with pytest.raises(UsageError, match="an encoder beside its decoder, and such models are not placed"):
        replace(made, operators=ops, graph=build_graph(model(N_LAYER), ops))
