"""The solver against ScheInfer's published rates and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheinfer_testbed import (
    CPU,
    GPU,
    LAUNCH_S,
    LLAMA,
    RATES,
    Betas,
    alone,
    device_end,
    ffn,
    implied_cpu_beta,
    streaming,
)
from slicing_cases import solve_cg

from oallama.cost.slices import Cut, Gemms
from oallama.cost.timeline import Step

GRANULE = 32 / 28672
SECONDS = st.floats(1e-5, 1e-2)


@pytest.mark.parametrize(("threads", "rate"), RATES.items())
def test_the_published_rate_comes_back_from_the_cpu_that_it_implies(threads: int, rate: float) -> None:
    block = alone(ffn(LLAMA, Betas(cpu=implied_cpu_beta(rate))))
    found, seconds = solve_cg(block, streaming(), 0)
    assert found.cg / found.extent == pytest.approx(rate, abs=GRANULE)
    assert round(found.cg / found.extent, 2) == rate
    extent = found.extent
    streamed = [round(i / 2000 * extent) for i in range(2001)]
    finer = min(streaming().seconds(block, Cut(extent - cg, cg, 0), 1) for cg in streamed)
    assert seconds <= finer * (1 + 2 * GRANULE)


@settings(deadline=None)
@given(st.integers(1, 6), SECONDS, SECONDS, SECONDS)
def test_the_three_cases_have_the_papers_closed_forms(n: int, launch: float, copy: float, gpu: float) -> None:
    end = device_end((Step(copy, gpu, launch),) * n)
    if launch <= copy and gpu <= copy:
        assert end == pytest.approx(launch + n * copy + gpu)  # Eq. 10
    elif max(launch, copy) <= gpu:
        assert end == pytest.approx(launch + copy + n * gpu)  # Eq. 11
    elif max(copy, gpu) <= launch:
        assert end == pytest.approx(n * launch + copy + gpu)  # Eq. 12


def test_equation_4_to_the_letter() -> None:
    block, on = ffn(LLAMA, Betas()), streaming()
    extent = block.block.extent
    half = Cut(extent // 2, extent // 4, extent // 4)
    times = on.block_times(block, half, 1)
    assert {step.launch_s for step in times.steps} == {3 * LAUNCH_S}  # 2 sgn(r_CG) + sgn(r_GG)
    assert times.steps[0].copy_s == pytest.approx(Gemms(block.gemms[:1]).copy_s(on.rates.weights, 0.25, 1))
    assert times.steps[0].gpu_s == pytest.approx(2 * Gemms(block.gemms[:1]).gpu_s(0.25, 1))
    assert times.cpu_s == pytest.approx(block.gemms.cpu_s(0.5, 1))
    assert times.send_s == times.join_s == 0
    prime = on.block_times(block, half, 512, 100)  # Eq. 15
    assert prime.steps[0].launch_s == pytest.approx(5 * LAUNCH_S)
    assert prime.cpu_s == pytest.approx(block.gemms.cpu_s(0.5, 412))


def test_the_start_up_time_of_a_kernel_is_that_of_any_number_of_tokens() -> None:
    gemm = Gemms(ffn(LLAMA, Betas()).gemms[:1])
    work = LLAMA.n_embd * LLAMA.n_ff
    for n_tokens in (1, 300, 4000):
        half = 0.5 * n_tokens * work  # Eq. 3: alpha + beta T M H
        assert gemm.cpu_s(0.5, n_tokens) == pytest.approx(CPU[0] + half * CPU[1])
        assert gemm.gpu_s(0.5, n_tokens) == pytest.approx(GPU[0] + half * GPU[1])
