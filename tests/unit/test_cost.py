"""Operator, transfer and graph costs, by hand arithmetic on small records."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import costs, model, operators, rates

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile, ProfileCase, RestCase, RestShape
from oallama.core.types import FIRST_ROLES, MulMat, Operator, Workload
from oallama.cost.graph import build_graph, computes_outputs_only, crossings, node_sides
from oallama.cost.kernels import Kernels, index_rest, interpolate, rest_of
from oallama.cost.passes import Pass, passes
from oallama.cost.rates import weight_stream
from oallama.cost.whole import operator_cost, operator_costs, placement_seconds

OP = Operator("blk.0.ffn_up.weight", 0, "ffn_up", "MUL_MAT", "Q4_0", (256, 512, 1), 73728, 1.0)


def case(device: str, layout: str, n_tokens: int, seconds: float, working_set_bytes: int = 0) -> ProfileCase:
    return ProfileCase(device, layout, OP.mul_mat, n_tokens, working_set_bytes, seconds, (seconds,))


def profile(*cases: ProfileCase, rest: tuple[RestCase, ...] = (), boundary: LinearFit | None = None) -> Profile:
    link = {"h2d_pageable": LinearFit(1e-5, 1e-9, 1.0), "d2h": LinearFit(2e-5, 2e-9, 1.0)}
    return Profile(1, {}, "RPC0", cases, rest, link, boundary, 3e-5, ())


def test_passes_of_a_workload() -> None:
    load = Workload(n_prompt=1100, n_gen=10, n_ctx=2048, n_ubatch=512)
    assert passes(load, "prefill") == (Pass(512, 512, 1, 0), Pass(512, 1024, 1, 0), Pass(76, 1100, 1, 1))
    assert passes(load, "decode") == (Pass(1, 1105, 1),)
    assert passes(load, "mixed") == (*passes(load, "prefill"), Pass(1, 1105, 10))
    behind = replace(load, n_past=900)
    assert passes(behind, "prefill") == (Pass(512, 1412, 1, 0), Pass(512, 1924, 1, 0), Pass(76, 2000, 1, 1))
    assert passes(behind, "decode") == (Pass(1, 2005, 1),)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_more_tokens_never_take_less_time_on_a_rising_curve(a: int, b: int) -> None:
    curve = ((1, 1.0), (32, 2.0), (512, 10.0))
    assert interpolate(curve, min(a, b)) <= interpolate(curve, max(a, b))


def test_cpu_time_is_that_of_the_fastest_layout_over_the_phase() -> None:
    made = profile(
        case("CPU", "CPU", 1, 1.0),
        case("CPU", "CPU", 32, 40.0),
        case("CPU", "CPU_REPACK", 1, 2.0),
        case("CPU", "CPU_REPACK", 32, 20.0),
        case("RPC0", "device", 1, 0.5),
    )
    kernels = Kernels(made)
    decode = operator_cost(kernels, OP, (Pass(1, 1, 1),))
    assert (decode.t_cpu_s, decode.layout, decode.t_gpu_s) == (1.0, "CPU", 0.5)
    prefill = operator_cost(kernels, OP, (Pass(32, 32, 2),))
    assert (prefill.t_cpu_s, prefill.layout) == (40.0, "CPU_REPACK")
    assert operator_cost(Kernels(replace(made, device="CUDA0")), OP, (Pass(1, 1, 1),)).t_gpu_s is None


def test_plain_weights_are_streamed_for_large_batches_where_the_device_takes_them() -> None:
    made = profile(
        case("CPU", "CPU", 1, 1.0),
        case("CPU", "CPU", 64, 64.0),
        case("CPU", "CPU_REPACK", 1, 1.0),
        case("CPU", "CPU_REPACK", 64, 50.0),
        case("RPC0", "device", 1, 0.5),
        case("RPC0", "device", 64, 2.0),
    )
    over = (Pass(64, 64, 1), Pass(1, 64, 1))
    stream = LinearFit(3.0, 0.0, 1.0)
    streamed = operator_cost(Kernels(made), OP, over, stream)
    assert (streamed.layout, streamed.t_cpu_s) == ("CPU", pytest.approx(3.0 + 2.0 + 1.0))
    assert operator_cost(Kernels(made), OP, over).layout == "CPU_REPACK"
    assert weight_stream(made) is None  # its fingerprint names no device that takes them
    assert weight_stream(replace(made, fingerprint={"device_backend": "CUDA"})) == made.link["h2d_pageable"]


@given(st.sampled_from([(8, 2), (64, 8), (128, 8), (256, 8)]), st.integers(1, 4096))
def test_a_prompt_uses_fewer_experts_than_if_all_were_used_alike(experts: tuple[int, int], n_tokens: int) -> None:
    n_expert, n_used = experts
    mul_mat = MulMat("MUL_MAT_ID", "Q4_0", (32, 32, n_expert), n_used)
    share = mul_mat.share_routed(n_tokens)
    assert n_used / n_expert <= share <= mul_mat.share_read(n_tokens)
    assert share <= mul_mat.share_routed(n_tokens + 1)
    assert mul_mat.share_routed(1) == n_used / n_expert


def test_weights_of_a_file_that_is_read_are_streamed_from_pinned_memory_if_there_is_any() -> None:
    link = {"h2d_pageable": LinearFit(1e-5, 1e-9, 1.0), "h2d_pinned": LinearFit(1e-5, 3e-10, 1.0)}
    made = replace(profile(), link=link, fingerprint={"device_backend": "CUDA"})
    assert weight_stream(made) == link["h2d_pageable"]
    assert weight_stream(made, mapped=False) == link["h2d_pinned"]
    without = replace(made, fingerprint={**made.fingerprint, "device_host_buffer": False})
    assert weight_stream(without, mapped=False) == link["h2d_pageable"]


def test_output_and_last_ffn_see_only_the_last_token_of_a_prompt() -> None:
    ops = operators(2)
    roles = {op.name for op in ops if computes_outputs_only(op, 2)}
    assert roles == {
        "output.weight", "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"
    }  # fmt: skip
    made = profile(case("CPU", "CPU", 1, 1.0), case("CPU", "CPU", 512, 512.0))
    three = [replace(OP, name=name, layer=layer) for name, layer in (("a", 0), ("b", 1), ("c", None))]
    prompt = passes(Workload(1024, 0, 2048, 512), "prefill")
    priced = operator_costs(Kernels(made), three, 2, prompt)
    assert [cost.t_cpu_s for cost in priced] == [pytest.approx(1024.0), 1.0, 1.0]


def test_operators_before_the_first_block_count_with_it_and_see_all_tokens() -> None:
    """As Gemma 3n has them: two projections of the embedding."""
    first = [replace(OP, name=f"{role}.weight", layer=None, role=role) for role in FIRST_ROLES]
    ops = [*first, *operators(2)]
    graph = build_graph(model(2), ops)
    assert graph.layer_operators == ((0, 9), (9, 16), (16, 17))
    assert not any(computes_outputs_only(op, 2) for op in first)
    nothing, everything = crossings(graph, [False] * len(ops), 3), crossings(graph, [True] * len(ops), 0)
    assert (nothing.device_splits, everything.device_splits) == (0, 1)


def test_missing_cpu_timing_is_a_profile_error_that_names_the_operator() -> None:
    with pytest.raises(ProfileError, match=r"blk\.0\.ffn_up\.weight"):
        operator_cost(Kernels(profile(case("RPC0", "device", 1, 1.0))), OP, (Pass(1, 1, 1),))


def shaped(n_tokens: int, n_kv: int, seconds: float, flash_attn: bool, device: str = "CPU") -> RestCase:
    return RestCase(device, n_tokens, n_kv, seconds, (seconds,), RestShape(64, 2, 1, 32, 32, 128, flash_attn))


def test_without_flash_attention_the_cache_is_gone_through_in_steps() -> None:
    cases = [shaped(1, n_kv, 1e-3 * n_kv, way) for n_kv in (256, 1024) for way in (True, False)]
    over = {n_kv: (Pass(1, n_kv, 1),) for n_kv in (10, 256, 257, 500, 2000)}
    flash = index_rest(profile(rest=tuple(case for case in cases if case.shape.flash_attn)))
    plain = index_rest(profile(rest=tuple(case for case in cases if not case.shape.flash_attn)))
    for n_kv, shown in ((10, 256), (256, 256), (257, 512), (500, 512), (2000, 2048)):
        assert rest_of(flash, "CPU", over[n_kv])[0] == pytest.approx(1e-3 * n_kv)
        assert rest_of(plain, "CPU", over[n_kv])[0] == pytest.approx(1e-3 * shown)
    assert index_rest(profile(rest=tuple(cases))) == flash  # of both, flash attention


def test_batches_may_be_measured_at_depths_of_their_own() -> None:
    cases = (shaped(1, 32, 1.0, True), shaped(1, 1024, 32.0, True), shaped(64, 64, 64.0, True),
             shaped(64, 1024, 1024.0, True))  # fmt: skip
    index = index_rest(profile(rest=cases))
    assert rest_of(index, "CPU", (Pass(1, 512, 2),))[0] == pytest.approx(2 * 16.0)
    assert rest_of(index, "CPU", (Pass(64, 512, 1),))[0] == pytest.approx(512.0)
    assert rest_of(index, "CPU", (Pass(8, 512, 1),))[0] == pytest.approx(16.0 + (512.0 - 16.0) * 7 / 63)


def test_everything_on_the_device_crosses_only_at_the_ends() -> None:
    ops = operators(3)
    graph = build_graph(model(3), ops)
    moved = crossings(graph, [True] * len(ops), 0)
    assert (moved.device_splits, moved.copies_in, moved.copies_out) == (1, 1, 1)
    assert (moved.bytes_in_per_token, moved.bytes_out_per_token) == (256 * 4, 0)  # the embedding of every token
    assert (moved.bytes_in_per_output, moved.bytes_out_per_output) == (0, 1000 * 4)  # the logits of the last
    nothing = crossings(graph, [False] * len(ops), 4)
    assert (nothing.device_splits, nothing.copies_in, nothing.copies_out) == (0, 0, 0)


@given(st.lists(st.booleans(), min_size=15, max_size=15), st.integers(0, 3))
def test_crossings_are_those_between_the_sides_of_all_nodes(on_device: list[bool], first: int) -> None:
    """What counts them goes layer by layer."""
    graph = build_graph(model(2), operators(2))
    sides = node_sides(graph, on_device, first)
    moved = crossings(graph, on_device, first)
    copied = {(source, side) for node, side in zip(graph.nodes, sides, strict=True) for source in node.inputs
              if sides[source] != side}  # fmt: skip
    assert moved.copies_in == sum(side for _, side in copied)
    assert moved.copies_out == sum(not side for _, side in copied)
    assert moved.device_splits == sum(there and not before for before, there in pairwise([False, *sides]))
    computed = [side for side, node in zip(sides, graph.nodes, strict=True) if node.bytes_per_token]
    assert moved.splits == 1 + sum(a != b for a, b in pairwise(computed))


@given(st.lists(st.booleans(), min_size=15, max_size=15), st.integers(0, 3), st.integers(0, 14))
def test_a_window_prices_a_move_exactly_as_the_whole_graph_does(sides: list[bool], first: int, moved: int) -> None:
    ops = operators(2)
    graph = build_graph(model(2), ops)
    price = rates(1.0, 1e-3, 0.5)
    layer = graph.operator_layer[moved]
    window = graph.around(layer, layer + 1)
    other = list(sides)
    other[moved] = not other[moved]
    whole = [price.seconds(crossings(graph, s, first), 3, 1) for s in (sides, other)]
    local = [price.seconds(crossings(graph, s, first, window), 3, 1) for s in (sides, other)]
    assert local[1] - local[0] == pytest.approx(whole[1] - whole[0])


@pytest.mark.parametrize(("first", "seconds"), [(0, 0.75), (1, 1.5), (2, 2.25), (3, 3.0), (4, 3.0)])
def test_norms_and_attention_are_where_their_layer_is(first: int, seconds: float) -> None:
    """Of three layers, 1 s each on the host and 0.25 s on the device; 3: only the output, 4: nothing is there."""
    ops = operators(3)
    problem = replace(costs(ops, 3, [(0.0, 0.0)] * len(ops), rates(0.0)), rest_cpu_s=1.0, rest_device_s=0.25)
    assert placement_seconds(problem, (False,) * len(ops), first) == pytest.approx(seconds)


def test_blocks_that_only_predict_further_tokens_take_no_time() -> None:
    """MTP: the last of three blocks has no operators, as a decode does not run it."""
    ops = operators(2)
    problem = replace(costs(ops, 3, [(0.0, 0.0)] * len(ops), rates(0.0)), rest_cpu_s=1.0, rest_device_s=0.25)
    for first, seconds in ((0, 0.5), (1, 1.25), (2, 2.0), (3, 2.0), (4, 2.0)):
        assert placement_seconds(problem, (False,) * len(ops), first) == pytest.approx(seconds)
    graph = problem.graph
    last = [op.name for op in ops if computes_outputs_only(op, graph.n_run)]
    assert last == [f"blk.1.{role}.weight" for role in ("ffn_gate", "ffn_up", "ffn_down")] + ["output.weight"]
    assert last == [ops[n.operator].name for n in graph.nodes if n.operator is not None and n.outputs_only]
