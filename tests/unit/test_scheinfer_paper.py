"""The solver against ScheInfer's published rates and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from scheinfer_testbed import (
    CPU,
    GPU,
    LLAMA,
    RATES,
    Betas,
    alone,
    ffn,
    implied_cpu_beta,
    streaming,
)
from slicing_cases import solve_cg

from oallama.cost.slices import Cut, Gemms

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


def test_the_start_up_time_of_a_kernel_is_that_of_any_number_of_tokens() -> None:
    gemm = Gemms(ffn(LLAMA, Betas()).gemms[:1])
    work = LLAMA.n_embd * LLAMA.n_ff
    for n_tokens in (1, 300, 4000):
        half = 0.5 * n_tokens * work  # Eq. 3: alpha + beta T M H
        assert gemm.cpu_s(0.5, n_tokens) == pytest.approx(CPU[0] + half * CPU[1])
        assert gemm.gpu_s(0.5, n_tokens) == pytest.approx(GPU[0] + half * GPU[1])
