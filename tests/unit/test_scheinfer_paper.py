"""The solver against ScheInfer's published rates, and the numbers of docs/reproduction.md against the
scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.cost.block_cost import Cut, Gemms
from oallama.cost.streams import Step
from oallama.place.cuts import solve_cg

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from reproduce import scheinfer_constants as published  # noqa: E402
from reproduce import scheinfer_formulas as predict  # noqa: E402
from reproduce.scheinfer_testbed import LLAMA, Betas, alone, device_end, ffn, streaming  # noqa: E402

GRANULE = 32 / 28672
SECONDS = st.floats(1e-5, 1e-2)


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads((ROOT / "docs/benchmarks/scheinfer.json").read_text())


@pytest.mark.parametrize(("threads", "rate"), published.RATES.items())
def test_the_published_rate_comes_back_from_the_cpu_that_it_implies(threads: int, rate: float) -> None:
    block = alone(ffn(LLAMA, Betas(cpu=predict.implied_cpu_beta(rate))))
    found, seconds = solve_cg(block, streaming(), 0)
    assert predict.r_cg(found) == pytest.approx(rate, abs=GRANULE)
    assert round(predict.r_cg(found), 2) == rate
    finer = min(streaming().seconds(block, predict.cut_at_rate(block, i / 2000), 1) for i in range(2001))
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
    assert {step.launch_s for step in times.steps} == {3 * published.LAUNCH_S}  # 2 sgn(r_CG) + sgn(r_GG)
    assert times.steps[0].copy_s == pytest.approx(Gemms(block.gemms[:1]).copy_s(on.rates.weights, 0.25, 1))
    assert times.steps[0].gpu_s == pytest.approx(2 * Gemms(block.gemms[:1]).gpu_s(0.25, 1))
    assert times.cpu_s == pytest.approx(block.gemms.cpu_s(0.5, 1))
    assert times.send_s == times.join_s == 0
    prime = on.block_times(block, half, 512, 100)  # Eq. 15
    assert prime.steps[0].launch_s == pytest.approx(5 * published.LAUNCH_S)
    assert prime.cpu_s == pytest.approx(block.gemms.cpu_s(0.5, 412))


def test_the_start_up_time_of_a_kernel_is_that_of_any_number_of_tokens() -> None:
    gemm = Gemms(ffn(LLAMA, Betas()).gemms[:1])
    work = LLAMA.n_embd * LLAMA.n_ff
    for n_tokens in (1, 300, 4000):
        half = 0.5 * n_tokens * work  # Eq. 3: alpha + beta T M H
        assert gemm.cpu_s(0.5, n_tokens) == pytest.approx(published.CPU[0] + half * published.CPU[1])
        assert gemm.gpu_s(0.5, n_tokens) == pytest.approx(published.GPU[0] + half * published.GPU[1])


def test_fewer_threads_imply_a_slower_cpu() -> None:
    betas = [predict.implied_cpu_beta(rate) for rate in published.RATES.values()]
    assert betas == sorted(betas)


def approx(value: Any) -> Any:
    """The same as JSON would hold it, numbers to a millionth."""
    if isinstance(value, dict):
        return {str(key): approx(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [approx(item) for item in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("part", ["rates", "other_rates", "fixed", "table_i_speeds"])
def test_the_numbers_in_docs_are_what_the_solver_gives(part: str, written: dict[str, Any]) -> None:
    assert written[part] == approx(getattr(predict, part)())


def test_the_ablations_in_docs_are_what_the_solver_gives(written: dict[str, Any]) -> None:
    assert written["memory"]["table_i"] == approx(predict.memory(Betas()))
    assert written["tokens"]["table_i"] == approx(predict.tokens(Betas()))
    assert written["fixed_means"] == approx(predict.fixed_means(predict.fixed()))


def test_the_tables_of_the_page_show_the_written_numbers(written: dict[str, Any]) -> None:
    page = (ROOT / "docs/reproduction.md").read_text()
    for row in written["rates"]:
        cells = [str(row["threads"]), f"{row['published_r_cg']:.2f}", f"{row['implied_cpu_beta']:.2e}"]
        cells += [f"{row['implied_cpu_gb_per_s']:.0f}", f"{row['solved_r_cg']:.3f}"]
        assert f"| {' | '.join(cells)} |" in page
    means = written["fixed_means"]
    for published_mean, mean in zip(means["published"], means["by_fixed_rate"], strict=True):
        assert f"| {published_mean:.2f} | {mean:.2f} |" in page
    for key, rows in (("memory", written["memory"]), ("tokens", written["tokens"])):
        for cpu, name in (("16_threads", "16 threads"), ("table_i", "Table I")):
            shown = " | ".join(f"{row['predicted']:.2f}" for row in rows[cpu])
            assert f"| predicted, {name} | {shown} |" in page, key
    bound = " | ".join(f"{row['bound']:.2f}" for row in written["tokens"]["table_i"])
    assert f"| bound, Table I | {bound} |" in page
    speeds = [f"{row['gpu_tflops']:.0f}" for cpu in ("16_threads", "table_i") for row in written["tokens"][cpu]]
    mixtral, llama, mixtral_i, llama_i = (speeds[i : i + 3] for i in (0, 3, 6, 9))
    said = " ".join(page.split())
    assert "{}, {} and {} TFLOPS for Mixtral (16 threads; {}, {}, {} with".format(*mixtral, *mixtral_i) in said
    assert "{}, {} and {} for LLaMA ({}, {}, {})".format(*llama, *llama_i) in said


def test_tokens_cannot_gain_more_than_the_devices_differ(written: dict[str, Any]) -> None:
    for rows in written["tokens"].values():
        for row in rows:
            assert 1 <= row["predicted"] <= row["bound"] * (1 + 1e-9)
            assert row["bound"] <= published.CPU[1] / published.GPU[1]
