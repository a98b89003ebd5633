"""What a layer on the host takes in a batch that llama.cpp offloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from described_cases import CARD, HOST, model, operators

from oallama.core.types import CPU_DEVICE, Profile
from oallama.cost.attention import with_attention
from oallama.cost.graph import build_graph
from oallama.cost.offload import host_cache, takes_attention
from oallama.cost.operator_cost import Pass
from oallama.cost.predict import Costs, index_rest, rest_seconds
from oallama.place.problem import Problem, costs_over
from oallama.profile.described import described

ONE, SMALL, LARGE = Pass(1, 4096, 1), Pass(31, 4096, 1), Pass(512, 4096, 1)


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


def test_a_large_batch_is_computed_on_the_device_and_the_cache_sent_there() -> None:
    of = profile()
    per_position = 2 * 2 * 2 * 128  # keys and values of two heads, f16
    up, down = of.link["h2d_pageable"], of.link["d2h"]
    there = 2 * up.alpha_s + 4096 * per_position * up.beta_s_per_byte
    back = 2 * down.alpha_s + 512 * per_position * down.beta_s_per_byte
    assert costs(of, LARGE).rest_cpu_s == pytest.approx(on("card", of, LARGE) + there + back)
    assert costs(of, LARGE).rest_cpu_s < on(CPU_DEVICE, of, LARGE)


def test_nothing_is_offloaded_where_llama_cpp_has_no_device() -> None:
    of = profile()
    assert costs(of, LARGE, llama_uses_device=False).rest_cpu_s == on(CPU_DEVICE, of, LARGE)


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
