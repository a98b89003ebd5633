"""The micro-batch: which sizes are looked at, that the best of them is taken, and that it is paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import GPU, PAIR, problem
from seeds import examples
from split_cases import EMBD, VOCAB, World, ffn, operator

from oallama.core.options import Options
from oallama.core.profile import LinearFit
from oallama.core.types import Phase, Workload
from oallama.place.decide import LEAST_GAIN, decide, larger_ubatches, seconds_in

LONG = Workload(n_prompt=2000, n_gen=1, n_ctx=4096)
LINK = LinearFit(1e-6, 4e-9, 1.0)
STREAMS = World(cpu_rate=2e8, device_rate=8e10, token_s_per_byte=5e-10, link=LINK)
"""A CPU so slow that a prompt is better streamed, and a device so fast that the link is what it waits for."""

WIDE = [*ffn(0, n_ff=8192), *ffn(1, n_ff=8192), operator("output", EMBD, VOCAB, None)]
"""Weights that are large beside their activations."""


#
# sizes
#


@pytest.mark.parametrize(
    ("n_prompt", "expected"),
    [(1, ()), (512, ()), (513, (768,)), (1024, (1024,)), (1100, (1024, 1280)), (2048, (1024, 2048))],
)
def test_sizes_are_doubled_up_to_the_whole_prompt(n_prompt: int, expected: tuple[int, ...]) -> None:
    assert larger_ubatches(Workload(n_prompt, 1, 4096), Options()) == expected


def test_no_size_is_above_the_batch_or_the_context() -> None:
    long = Workload(10_000, 1, 16384)
    assert larger_ubatches(long, Options()) == (1024, 2048)
    assert larger_ubatches(long, Options(n_batch=700)) == (700,)
    assert larger_ubatches(long, Options(n_batch=8192)) == (1024, 2048, 4096, 8192)
    assert larger_ubatches(Workload(1000, 1, 1001), Options()) == (1001,)


@pytest.mark.parametrize("n_ubatch", [64, 512, 1024])
def test_what_the_user_asks_for_is_kept(n_ubatch: int) -> None:
    assert larger_ubatches(replace(LONG, n_ubatch=n_ubatch), Options(n_ubatch=n_ubatch)) == ()


#
# the choice
#


SIZES = (1024, 2048)


@settings(max_examples=examples(15))
@given(
    st.sampled_from([PAIR, GPU, STREAMS]),
    st.sampled_from(["oato", "layers", "split", "scheinfer"]),
    st.sampled_from([10**5, 3 * 10**5, 10**6, 10**8]),
    st.sampled_from(["mixed", "decode", "prefill"]),
)
def test_the_promise_of_its_own_size_is_the_price_it_was_chosen_by(
    world: World, policy: str, free: int, phase: Phase
) -> None:
    made = problem(world, free)
    decision = decide(made, policy, LONG, phase)
    again = seconds_in(made, decision, decision.workload.n_ubatch, phase)
    assert again == pytest.approx(decision.placement.seconds, rel=1e-6)


#
# decisions
#


@pytest.mark.parametrize(("free", "raised"), [(10**8, True), (8 * 10**7, False)])
def test_a_long_prompt_that_streams_is_read_in_larger_micro_batches_where_they_fit(free: int, raised: bool) -> None:
    """Of all sizes the best, in as many bytes as it really takes."""
    made = problem(STREAMS, free, WIDE, compute_per_token=10, gpu_weights=0.1)
    sizes = larger_ubatches(LONG, Options())
    fixed = {n: decide(made, "scheinfer", replace(LONG, n_ubatch=n), "mixed") for n in (LONG.n_ubatch, *sizes)}
    first = fixed[LONG.n_ubatch]
    best = decide(made, "scheinfer", LONG, "mixed", larger_ubatches=sizes)
    assert best.placement.seconds == pytest.approx(min(each.placement.seconds for each in fixed.values()))
    assert best.memory == fixed[best.workload.n_ubatch].memory and best.memory.spare >= 0
    if not raised:
        assert best == first
        return
    assert best.workload.n_ubatch > LONG.n_ubatch and best.memory.staging > first.memory.staging
    assert best.placement.seconds < (1 - LEAST_GAIN) * first.placement.seconds
    assert best.notes[0].startswith(f"micro-batch raised from 512 to {best.workload.n_ubatch} tokens")
    assert decide(made, "auto", LONG, "mixed", larger_ubatches=sizes) == best


def test_its_buffers_are_paid_for_and_too_large_ones_leave_it_as_it_was() -> None:
    sizes = larger_ubatches(LONG, Options())
    for per_token in (10, 100, 1000):
        made = problem(STREAMS, 10**6, compute_per_token=per_token)
        best = decide(made, "oato", LONG, "mixed", larger_ubatches=sizes)
        assert best.memory.spare >= 0
        if best.placement.first_device_layer <= 2:
            assert best.memory.compute == per_token * best.workload.n_ubatch
    assert best.workload.n_ubatch <= 512, "at 1000 bytes a token not even 1024 tokens fit"


@pytest.mark.parametrize("policy", ["auto", "layers", "scheinfer"])
def test_what_gains_nothing_is_left_as_it_was(policy: str) -> None:
    """On the CPU alone, and while tokens are generated."""
    sizes = larger_ubatches(LONG, Options())
    made = problem(STREAMS, 10**6)
    assert decide(made, policy, LONG, "decode", larger_ubatches=sizes) == decide(made, policy, LONG, "decode")
    if policy != "layers":
        slow = problem(World(cpu_rate=1e10, device_rate=1e6), 10**6)
        assert decide(slow, policy, LONG, "mixed", larger_ubatches=sizes).workload == LONG
