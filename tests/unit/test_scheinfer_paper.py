"""The solver against ScheInfer's published rates, and the numbers of docs/scheinfer.md against the scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from oallama.cost.slice_times import Rates
from oallama.place.slicing import solve_cg

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from scheinfer import predict, published  # noqa: E402
from scheinfer.testbed import LLAMA, Betas, alone, ffn, streaming  # noqa: E402

GRANULE = 32 / 28672


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads((ROOT / "docs/benchmarks/scheinfer.json").read_text())


@pytest.mark.parametrize(("threads", "rate"), published.RATES.items())
def test_the_published_rate_comes_back_from_the_cpu_that_it_implies(threads: int, rate: float) -> None:
    block = alone(ffn(LLAMA, Betas(cpu=predict.implied_cpu_beta(rate))))
    found = solve_cg(block, streaming(), 0)
    assert found.rates.cg == pytest.approx(rate, abs=GRANULE)
    assert round(found.rates.cg, 2) == rate
    finer = min(streaming().seconds(block, Rates(1 - r, r, 0.0), 1) for r in (i / 2000 for i in range(2001)))
    assert found.seconds <= finer * (1 + 2 * GRANULE)


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
    assert written["fixed_means"] == approx(predict.fixed_means(predict.fixed()))


def test_the_tables_of_the_page_show_the_written_numbers(written: dict[str, Any]) -> None:
    page = (ROOT / "docs/scheinfer.md").read_text()
    for row in written["rates"]:
        cells = [str(row["threads"]), f"{row['published_r_cg']:.2f}", f"{row['implied_cpu_beta']:.2e}"]
        cells += [f"{row['implied_cpu_gb_per_s']:.0f}", f"{row['solved_r_cg']:.3f}"]
        assert f"| {' | '.join(cells)} |" in page
    means = " | ".join(f"{mean:.2f}" for mean in written["fixed_means"]["by_fixed_rate"])
    assert f"| predicted | {means} |" in page
    for key, rows in (("memory", written["memory"]), ("tokens", written["tokens"])):
        for cpu, name in (("16_threads", "16 threads"), ("table_i", "Table I")):
            shown = " | ".join(f"{row['predicted']:.2f}" for row in rows[cpu])
            assert f"| predicted, {name} | {shown} |" in page, key


def test_tokens_cannot_gain_more_than_the_devices_differ(written: dict[str, Any]) -> None:
    for rows in written["tokens"].values():
        for row in rows:
            assert 1 <= row["predicted"] <= row["bound"] * (1 + 1e-9)
            assert row["bound"] <= published.CPU[1] / published.GPU[1]
