"""Rows as llama-bench writes them, in every format, as its tools and sqlite read them."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace

import pytest
from bench_cases import NAMES, capped, report, result, series, stock

from oallama.bench.records import ArmResult, BenchTest
from oallama.bench.rows import FORMATS, formatted, rows
from oallama.run.stock import Cap

PP, TG, PG = BenchTest(64, 0), BenchTest(0, 16), BenchTest(64, 16, 128)
CPU = ArmResult(stock("stock-cpu", 0), report())
NGL = ArmResult(stock("stock-ngl", 99), report(*NAMES, n_gpu_layers=99))
SLOW, FAST = [1.2, 1.21, 1.19, 1.2, 1.22, 1.18], [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def made(*arms: ArmResult, **changes: object):
    return rows(result(arms or (CPU, NGL), series(PP, SLOW, FAST), series(TG, SLOW, FAST), **changes))  # type: ignore[arg-type]


def test_prompt_and_generation_of_a_pair_have_ratios_of_their_own() -> None:
    (first, second) = rows(result((CPU, NGL), series(PG, SLOW, FAST)))
    assert first["ttft_s"] == pytest.approx(1.2 * 64 / 80, rel=1e-3)
    assert second["tpot_s"] == pytest.approx(1.0 * 16 / 80 / 16, rel=1e-3)
    assert second["ttft_ratio_to_first"] == pytest.approx(1.2, rel=1e-3)
    assert second["tpot_ratio_to_first"] == pytest.approx(1.2, rel=1e-3)
    (_, prompt_only) = rows(result((CPU, NGL), series(PP, SLOW, FAST)))
    assert (prompt_only["tpot_s"], prompt_only["tpot_ratio_to_first"]) == (None, None)


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        ((CPU, ArmResult(NGL.spec, NGL.report, same_as="stock-cpu")), "the same configuration as stock-cpu"),
        ((CPU, ArmResult(NGL.spec, NGL.report, problems=("half of it is gone",))), "half of it is gone"),
        ((ArmResult(CPU.spec, CPU.report, problems=("it is a fraud",)), NGL), "stock-cpu did not do what it says"),
    ],
)
def test_a_ratio_that_would_mislead_is_refused(arms: tuple[ArmResult, ...], says: str) -> None:
    row = made(*arms)[1]
    assert (row["ratio_to_first"], row["ratio_ci95"]) == (None, None)
    assert says in row["ratio_refused"]
    assert row["avg_ts"] > 0  # what was measured is still told
    assert f": {row['ratio_refused']}." in formatted(made(*arms), "md")


def test_json_is_a_list_as_llama_bench_writes_it_and_knows_no_nan() -> None:
    whole = made()
    whole[0]["avg_ts"] = math.inf
    text = formatted(whole, "json")
    parsed = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert parsed[0]["avg_ts"] is None
    assert parsed[1]["samples_ns"] == whole[1]["samples_ns"]
    lines = formatted(made(), "jsonl").splitlines()
    assert [json.loads(line)["arm"] for line in lines] == [row["arm"] for row in made()]


@pytest.fixture
def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    tricky = ArmResult(stock("it's; DROP TABLE llama_bench", 99), NGL.report)
    connection.executescript(formatted(made(CPU, tricky), "sql"))
    return connection


def test_sqlite_takes_the_statements(database: sqlite3.Connection) -> None:
    found = database.execute("SELECT arm, n_prompt, avg_ts, ratio_to_first, ratio_ci95 FROM llama_bench").fetchall()
    expected = made()
    assert [row[0] for row in found] == ["stock-cpu", "it's; DROP TABLE llama_bench"] * 2
    assert [row[2] for row in found] == [row["avg_ts"] for row in expected]
    assert [row[3] for row in found] == [row["ratio_to_first"] for row in expected]
    assert found[0][4] is None
    assert json.loads(found[1][4]) == expected[1]["ratio_ci95"]
    low = database.execute("SELECT json_extract(ratio_ci95, '$[0]') FROM llama_bench WHERE rowid = 2").fetchone()
    assert low == (pytest.approx(expected[1]["ratio_ci95"][0]),)


def test_markdown_is_for_people() -> None:
    odd = ArmResult(stock("stock-ngl", 99, search=({"flag": "-ngl", "value": 99, "seconds": 0.5},)), NGL.report)
    arms = [replace(arm, spec=capped(arm.spec, Cap(1 << 20, 1 << 19))) for arm in (CPU, odd)]
    whole = rows(result(arms, series(PG, SLOW, FAST), warnings=("it was | noisy\nhere",), interrupted=True))
    text = formatted(whole, "md")
    header, rule, *table = text.split("\n\n")[0].splitlines()
    assert header.count("|") == rule.count("|") == 13
    assert len(table) == 2
    assert "| stock-cpu | pp64+tg16 @ d128 |" in table[0]
    assert "1.200 (1.1" in table[1]
    for sentence in (
        "stock-ngl: searched -ngl: 99 500.0 ms.", "Cap on the device: 1.0 MiB for every arm.",
        "Cap on weights there: 0.50 MiB for every arm.", "Interrupted: ",
    ):  # fmt: skip
        assert sentence in text
    assert "it was \\| noisy" in text
    assert formatted([], "md") == "nothing was measured\n"
    assert set(FORMATS) == {"md", "csv", "json", "jsonl", "sql"}


def test_too_few_samples_have_no_ratio() -> None:
    (_, row) = rows(result((CPU, NGL), series(PP, SLOW[:4], FAST[:4])))
    assert row["ratio_to_first"] is None
    assert "4 samples of each arm are too few" in row["ratio_refused"]
