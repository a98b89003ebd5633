"""What a layer on the host takes in a batch that llama.cpp offloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from described_cases import CARD, HOST, model, operators
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from oallama.core.profile import LinearFit, Profile
from oallama.core.types import CPU_DEVICE, Workload
from oallama.cost.graph import build_graph, crossings
from oallama.cost.kernels import index_rest, rest_seconds
from oallama.cost.passes import Pass
from oallama.cost.rates import TransferRates
from oallama.cost.whole import Costs, host_cache, placement_seconds, takes_attention, transfer_seconds, whole_tasks
from oallama.place.attention import with_attention
from oallama.place.explain import baselines
from oallama.place.memory import ledger
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described

ONE, SMALL, LARGE = Pass(1, 4096, 1), Pass(31, 4096, 1), Pass(512, 4096, 1)
LEAST = Pass(32, 4096, 1)  # that ggml offloads


def profile() -> Profile:
    of = model()
    return with_attention(described(HOST, CARD, of, operators(of), (1, 31, 512)), "on")


def costs(of: Profile, over: Pass, llama_uses_device: bool = True) -> Costs:
    ops = operators(model())
    problem = Problem(tuple(ops), build_graph(model(), ops), of, lambda *_: None, None, 0.9, None)  # type: ignore[arg-type, return-value]
    return costs_over(problem, (over,), llama_uses_device)


def on(device: str, of: Profile, over: Pass) -> float:
    return rest_seconds(index_rest(of), device, (over,))


@pytest.mark.parametrize("over", [ONE, SMALL])
def test_a_small_batch_stays_on_the_host(over: Pass) -> None:
    of = profile()
    assert costs(of, over).rest_cpu_s == on(CPU_DEVICE, of, over)


@pytest.mark.parametrize("over", [LEAST, LARGE])
def test_a_large_batch_is_computed_on_the_device_and_the_cache_sent_there(over: Pass) -> None:
    of = profile()
    per_position = 2 * 2 * 2 * 128  # keys and values of two heads, f16
    up, down = of.link["h2d_pageable"], of.link["d2h_pinned"]
    there = 2 * up.alpha_s + 4096 * per_position * up.beta_s_per_byte
    back = 2 * down.alpha_s + over.n_tokens * per_position * down.beta_s_per_byte
    assert costs(of, over).rest_cpu_s == pytest.approx(on("card", of, over) + there + back)
    assert costs(of, over).rest_cpu_s != pytest.approx(on(CPU_DEVICE, of, over))


def test_a_large_batch_is_faster_there() -> None:
    of = profile()
    assert costs(of, LARGE).rest_cpu_s < on(CPU_DEVICE, of, LARGE)


def test_nothing_is_offloaded_where_llama_cpp_has_no_device() -> None:
    of = profile()
    assert costs(of, LARGE, llama_uses_device=False).rest_cpu_s == on(CPU_DEVICE, of, LARGE)


def test_a_plan_is_held_against_a_cpu_that_no_device_helps() -> None:
    ops, of = operators(model()), profile()
    nothing = LoadBytes(0, sum(op.bytes for op in ops), 0, 0, 8 * 2**30)
    problem = Problem(tuple(ops), build_graph(model(), ops), of, lambda *_: nothing, None, 0.9, None)
    load = Workload(512, 4, 4096)
    held = ledger(8 * 2**30, 0.9, 0, nothing.weights_host, 0, 0)
    unhelped = replace(problem, profile=replace(of, fingerprint={**of.fingerprint, "device_backend": "RPC"}))
    helped, alone = (
        next(one.predicted for one in baselines(each, load, held) if one.name == "all CPU")
        for each in (problem, unhelped)
    )
    assert helped == alone
    assert costs(of, LARGE).rest_cpu_s < costs(of, LARGE, llama_uses_device=False).rest_cpu_s


@pytest.mark.parametrize("backend", ["RPC", "CPU", None])
def test_some_devices_take_no_such_work(backend: str | None) -> None:
    of = profile()
    of = replace(of, fingerprint={**of.fingerprint, "device_backend": backend})
    assert host_cache(of) is None
    assert costs(of, LARGE).rest_cpu_s == on(CPU_DEVICE, of, LARGE)


def test_repacked_weights_keep_attention_on_the_host() -> None:
    of = profile()
    faster = tuple(
        replace(case, layout="CPU_REPACK", seconds=case.seconds / 1e6) for case in of.cases if case.device == CPU_DEVICE
    )
    of = replace(of, cases=(*of.cases, *faster))
    priced = costs(of, LARGE)
    assert not takes_attention(operators(model()), priced.operators)
    assert priced.rest_cpu_s == on(CPU_DEVICE, of, LARGE)


def test_a_profile_that_does_not_say_how_large_the_cache_is() -> None:
    of = profile()
    of = replace(of, rest=tuple(replace(case, shape=None) for case in of.rest))
    assert host_cache(of) is None


def test_what_is_offloaded_crosses_nothing() -> None:
    """Attention on the device and FFNs on the host: in a large batch these are computed on the device too."""
    of = profile()
    ops = operators(model())
    on_device = [not op.role.startswith("ffn_") for op in ops]
    large, small = costs(of, LARGE), costs(of, SMALL)
    whole = crossings(large.graph, [True] * len(ops), 0)
    last_ffn = [op.layer != 3 or not op.role.startswith("ffn_") for op in ops]  # of one token: never a large batch
    alone = crossings(large.graph, last_ffn, 0)
    assert transfer_seconds(large, on_device, 0) == large.rates.over(alone, (LARGE,))
    assert alone.device_splits == whole.device_splits + 1
    assert transfer_seconds(small, on_device, 0) == small.rates.over(crossings(small.graph, on_device, 0), (SMALL,))
    assert crossings(small.graph, on_device, 0).device_splits > alone.device_splits


@settings(max_examples=examples(60))
@given(st.data(), st.sampled_from([ONE, SMALL, LARGE]))
def test_the_tasks_of_a_pass_take_what_it_is_predicted_to_take(data: st.DataObject, over: Pass) -> None:
    """Whatever is on the device, streamed or sliced; activations go each way at that way's speed."""
    ops = operators(model())
    made = costs(profile(), over)
    made = replace(made, rates=TransferRates(LinearFit(1e-5, 1e-9, 1.0), LinearFit(5e-5, 3e-9, 1.0), 2e-5))
    first = data.draw(st.integers(0, 5))
    on_device = [data.draw(st.booleans()) and op.layer_in(4) >= first for op in ops]
    on_host = [i for i, there in enumerate(on_device) if not there]
    inside = frozenset(on_host if data.draw(st.booleans()) else (i for i in on_host if data.draw(st.booleans())))
    tasks = whole_tasks(made, ops, on_device, first, host_cache(profile()), inside)
    assert sum(task.seconds for task in tasks) == pytest.approx(placement_seconds(made, on_device, first, inside))
    for engine, line in (("in", made.rates.copy_in), ("out", made.rates.copy_out)):
        moved = [task.seconds for task in tasks if task.kind == "crossing" and task.stream == engine]
        assert all(seconds >= line.alpha_s for seconds in moved)


def test_slices_are_not_offloaded() -> None:
    """They are computed by the split back end, whose inputs and outputs are in host memory."""
    made = costs(profile(), LARGE)
    sliced = [o.role.startswith("ffn_") and o.layer == 0 for o in operators(model())]
    inside = frozenset(i for i, cut in enumerate(sliced) if cut)
    on_device = [not cut for cut in sliced]
    left = replace(made, offloaded=tuple(o and not cut for o, cut in zip(made.offloaded, sliced, strict=True)))
    transfer_s = transfer_seconds(left, on_device, 0)
    assert transfer_s > transfer_seconds(made, on_device, 0)
    assert transfer_s == transfer_seconds(made, on_device, 0, sliced=inside)
    alone = sum(c.t_gpu_s or 0.0 for c, cut in zip(made.operators, sliced, strict=True) if not cut)
    total = alone + 4 * made.rest_device_s + transfer_s
    assert placement_seconds(made, on_device, 0, inside) == pytest.approx(total)
