"""Eq. 3 from a profile, and Eq. 4 and 15: what a sliced block's tasks take, against worlds whose times are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import EMBD, FF, World, ffn, llama, operator

from oallama.core.errors import ProfileError
from oallama.core.types import LinearFit, Operator
from oallama.cost.blocks import SplitBlock, split_blocks
from oallama.cost.linear import Resource, kernel_times, resource_lines, stream_rates, streamed_block
from oallama.cost.operator_cost import Pass
from oallama.cost.slice_times import Rates, StreamedBlock, StreamRates, paper_times, slice_times
from oallama.cost.split_ffn import block_seconds, split_costs
from oallama.cost.timeline import PAPER, Prefetch, timeline

WORLDS = st.builds(
    World, st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.floats(0, 1e-5), st.floats(0, 1e-5), st.floats(0, 1e-9),
    st.floats(0, 1e-4), st.builds(LinearFit, st.floats(0, 1e-4), st.floats(1e-11, 1e-8), st.just(1.0)),
)  # fmt: skip


def one_ffn(world: World, layout: str = "CPU") -> tuple[StreamedBlock, StreamRates, SplitBlock]:
    """The FFN of a model whose attention has other sizes, so that the profile shows what a mul-mat of no size takes."""
    ops = llama(1)
    profile = world.profile(ops, ("CPU", "CPU_REPACK"))
    chosen = [index for index, op in enumerate(ops) if op.role.startswith("ffn_")]
    (block,) = split_blocks(ops, [FF * (index in chosen) for index in range(len(ops))])
    costs = split_costs(profile, ops, 2, (Pass(1, 1, 1),))
    return streamed_block(kernel_times(profile), ops, block, layout), stream_rates(costs, profile.link), block


def experts() -> list[Operator]:
    shapes = (("ffn_gate_exps", EMBD, FF), ("ffn_up_exps", EMBD, FF), ("ffn_down_exps", FF, EMBD))
    return [operator(role, k, n, e=8, used=2) for role, k, n in shapes]


@settings(deadline=None)
@given(WORLDS, st.integers(1, FF // 32 - 1), st.sampled_from([1, 7, 32, 512]))
def test_without_streaming_the_timeline_is_the_price_of_a_split_block(world: World, cut: int, n_tokens: int) -> None:
    streamed, rates, block = one_ffn(world)
    ops = llama(1)
    costs = split_costs(world.profile(ops), ops, 2, (Pass(n_tokens, n_tokens, 1),))
    cc = 32 * cut / FF
    times = slice_times(streamed, rates, Rates(cc, 0.0, 1 - cc), n_tokens)
    expected = block_seconds(costs, block, (FF - 32 * cut,))[0]
    assert timeline([times], Prefetch(), None).end_s == pytest.approx(expected)


def test_a_streamed_block_by_hand() -> None:
    """Half on the CPU, a quarter streamed, a quarter resident; three mul-mats of 147,456 bytes, one token."""
    world = World(cpu_rate=1e9, device_rate=5e9, launch_s=3e-5, link=LinearFit(1e-5, 1e-9, 1.0))
    streamed, rates, _ = one_ffn(world)
    times = slice_times(streamed, rates, Rates(0.5, 0.25, 0.25), 1)
    size = 147456
    assert times.send_s == pytest.approx(1e-5 + EMBD * 4e-9)
    assert times.cpu_s == pytest.approx(1.5 * size / 1e9)
    assert [step.launch_s for step in times.steps] == [3e-5, 0]
    assert [step.copy_s for step in times.steps] == [0, pytest.approx(3e-5 + 0.75 * size / 1e9)]
    assert [step.gpu_s for step in times.steps] == [pytest.approx(0.75 * size / 5e9)] * 2
    assert times.cpu_bytes == pytest.approx(1.5 * size)
    assert times.copy_bytes_per_s == pytest.approx(1e9)
    assert times.join_s == pytest.approx(1e-5 + EMBD * 4e-9 + EMBD * 12e-9)


def test_assigned_tokens_move_cc_to_the_device() -> None:
    streamed, rates, _ = one_ffn(
        World(cpu_rate=1e9, device_rate=5e9, token_s_per_byte=1e-10, link=LinearFit(0.0, 1e-9, 1.0))
    )
    at = {n_g: slice_times(streamed, rates, Rates(0.75, 0.0, 0.25), 512, n_g) for n_g in (0, 1, 256, 512)}
    assert [len(times.steps) for times in at.values()] == [1, 2, 2, 2]
    assert [step.copy_s for step in at[1].steps] == [0, pytest.approx(3 * 0.75 * 147456e-9)]
    assert at[256].cpu_s == pytest.approx(sum(gemm.cpu_s(0.75, 256) for gemm in streamed.gemms))
    assert at[512].cpu_s == at[512].cpu_bytes == 0
    assert at[512].steps[1].gpu_s == pytest.approx(sum(gemm.gpu_s(0.75, 512) for gemm in streamed.gemms))


def test_whole_blocks_are_llama_cpps() -> None:
    streamed, rates, _ = one_ffn(World())
    for whole in (Rates(1.0, 0.0, 0.0), Rates(0.0, 0.0, 1.0)):
        times = slice_times(streamed, rates, whole, 1)
        assert times.send_s == times.join_s == 0
        assert times.cpu_s + sum(step.gpu_s for step in times.steps) > 0
    assert slice_times(streamed, rates, Rates(0.0, 1.0, 0.0), 1).join_s > 0


def test_of_experts_only_the_routed_ones_are_streamed_and_not_before_they_are_known() -> None:
    ops = experts()
    profile = World().profile(ops)
    (block,) = split_blocks(ops, [FF] * 3)
    streamed = streamed_block(kernel_times(profile), ops, block, "CPU")
    rates = stream_rates(split_costs(profile, ops, 2, (Pass(1, 1, 1),)), {"h2d_pinned": LinearFit(2e-5, 1e-9, 1.0)})
    decode, prefill = (slice_times(streamed, rates, Rates(0.0, 1.0, 0.0), n) for n in (1, 512))
    assert decode.routed and prefill.routed
    assert decode.steps[0].copy_s == pytest.approx(3 * 2 * 2e-5 + block.bytes * 2 / 8 * 1e-9), "a copy for each expert"
    assert prefill.steps[0].copy_s == pytest.approx(3 * 8 * 2e-5 + block.bytes * 1e-9)
    assert slice_times(streamed, rates, Rates(0.5, 0.5, 0.0), 1).cpu_bytes == pytest.approx(block.bytes * 2 / 8 / 2)


def test_behind_the_last_attention_a_prompt_has_as_many_tokens_as_logits_are_wanted() -> None:
    streamed, rates, _ = one_ffn(World(token_s_per_byte=1e-10))
    last = replace(streamed, outputs_only=True, gap=((1, 1e-3), (512, 5e-3)))
    cut = Rates(0.5, 0.25, 0.25)
    prompt, token = slice_times(last, rates, cut, 512, n_g=100), slice_times(last, rates, cut, 1)
    assert prompt == replace(token, gap_s=5e-3)
    nothing = slice_times(last, rates, cut, 512, n_outputs=0)
    assert (nothing.cpu_s, nothing.steps, nothing.send_s, nothing.join_s) == (0.0, (), 0.0, 0.0)
    assert nothing.gap_s == 5e-3


def test_what_llama_cpp_runs_whole_costs_what_it_takes_there() -> None:
    """It may have a faster layout, or stream large batches by itself; a slice has no such price."""
    streamed, rates, _ = one_ffn(World())
    priced = replace(streamed, whole=((1, 1e-6), (512, 2e-6)))
    assert slice_times(priced, rates, Rates(1.0, 0.0, 0.0), 512).cpu_s == 2e-6
    cut = Rates(0.75, 0.0, 0.25)
    assert slice_times(priced, rates, cut, 512) == slice_times(streamed, rates, cut, 512)
    for takes in (True, False):
        given = slice_times(replace(priced, takes_n_g=takes), rates, Rates(1.0, 0.0, 0.0), 512, n_g=256)
        assert bool(given.steps) is takes


def test_a_device_that_does_nothing_by_itself_holds_up_the_cpu() -> None:
    streamed, rates, _ = one_ffn(World())
    cut = Rates(0.5, 0.25, 0.25)
    free, held = (slice_times(streamed, replace(rates, blocking=blocking), cut, 1) for blocking in (False, True))
    assert held.steps == ()
    theirs = sum(step.copy_s + step.launch_s + step.gpu_s for step in free.steps)
    assert held.send_s == pytest.approx(free.send_s + theirs)
    assert timeline([held], PAPER).end_s > timeline([free], Prefetch("layer", 2)).end_s


def test_equation_4_to_the_letter() -> None:
    streamed, rates, _ = one_ffn(World(cpu_rate=1e9, device_rate=5e9, link=LinearFit(2e-5, 1e-9, 1.0)))
    rates = replace(rates, kernel_launch_s=7e-6)
    size = 147456
    times = paper_times(streamed, rates, Rates(0.5, 0.25, 0.25), 1)
    assert [step.launch_s for step in times.steps] == [pytest.approx(3 * 7e-6)] * 3  # 2 sgn(r_CG) + sgn(r_GG)
    assert [step.copy_s for step in times.steps] == [pytest.approx(2e-5 + size / 4e9)] * 3
    assert [step.gpu_s for step in times.steps] == [pytest.approx(size / 2 / 5e9)] * 3
    assert times.cpu_s == pytest.approx(1.5 * size / 1e9)
    assert times.send_s == times.join_s == 0
    no_cg = paper_times(streamed, rates, Rates(1.0, 0.0, 0.0), 1)
    assert timeline([no_cg], PAPER).end_s == pytest.approx(3 * size / 1e9)
    prime = paper_times(streamed, rates, Rates(0.5, 0.25, 0.25), 512, 100)  # Eq. 15
    assert prime.steps[0].launch_s == pytest.approx(5 * 7e-6)
    assert prime.steps[0].copy_s == pytest.approx(2 * 2e-5 + 0.75 * size / 1e9)
    assert prime.cpu_s == pytest.approx(3 * streamed.gemms[0].cpu_s(0.5, 412))


@settings(deadline=None)
@given(st.floats(1e8, 1e11), st.floats(1e-7, 1e-5))
def test_lines_of_a_profile_are_its_world(rate: float, alpha: float) -> None:
    lines = resource_lines(World(cpu_rate=rate, alpha_s=alpha).profile(llama(1)))
    line = lines[Resource("CPU", "CPU", "MUL_MAT", "Q4_0", 1)]
    assert line.beta_s_per_byte == pytest.approx(1 / rate, rel=1e-3)
    assert line.seconds(0) == pytest.approx(alpha, rel=1e-3, abs=1e-9)
    assert line.r2 == pytest.approx(1.0, abs=1e-6)
    assert {resource.n_tokens for resource in lines} == {1, 32, 512}


def test_one_size_makes_no_line() -> None:
    assert resource_lines(World().profile(ffn(0)[:2])) == {}


def test_what_was_not_measured_is_said() -> None:
    ops = ffn(0)
    profile = World().profile(ops)
    (block,) = split_blocks(ops, [FF] * 3)
    with pytest.raises(ProfileError, match="CPU in layout AMX"):
        streamed_block(kernel_times(profile), ops, block, "AMX")
    with pytest.raises(ProfileError, match="no link"):
        stream_rates(split_costs(profile, ops, 2, (Pass(1, 1, 1),)), {})
    assert kernel_times(World().profile(ops, ("CPU", "AMX"))).layouts(ops) == ("AMX", "CPU")
