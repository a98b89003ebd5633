"""docs/benchmarks.md against the raw results beside it: every row of its tables that can be found mechanically is made
anew from them, each number rounded once."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from experiments.comparison import compare_with_stock, figures  # noqa: E402
from policy_tables import section, with_section  # noqa: E402

PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
LINES = PAGE.splitlines()
Row = Mapping[str, Any]


def raw(name: str) -> Any:
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f}..{high:.2f})"


def assert_on_the_page(wanted: Sequence[str]) -> None:
    assert wanted
    missing = [row for row in wanted if row not in LINES]
    assert not missing, "\n".join(missing)


#
# arms on an emulated card, against stock --fit
#


def emulated_rows(name: str, tpot_digits: int, predicted_digits: int, medians: bool) -> Iterator[str]:
    """medians: of the samples, and ratios of these, for TTFT and TPOT; else means, and bench's own ratios."""
    prompts = {row["n_prompt"] for cell in raw(name)["cells"] for row in cell["rows"]}
    for cell in raw(name)["cells"]:
        for row in cell["rows"] if cell["rows"] and cell["rows"][0]["samples_ns"] else ():
            first = cell["rows"][0]
            cap = cell["cap"].replace("%", " %")
            place = f"{cap}, {row['n_prompt']}" if len(prompts) > 1 else cap.replace("GiB", " GiB")
            predicted = row["predicted"] or {}
            ttft_p = f"{1e3 * predicted['ttft_s']:.0f}" if predicted else "-"
            tpot_p = f"{1e3 * predicted['tpot_s']:.{predicted_digits}f}" if predicted else "-"
            if row is first:
                ratios = ["1.00"] * 3
            elif row["same_as"] == first["arm"] and not row["arm"].startswith("stock"):
                ratios = ["=", "=", "stock's very configuration"]
            else:
                ratios = [ratio(row, first, metric, medians) for metric in SAMPLES]
            ttft, tpot = (1e3 * typical(row, metric, medians) for metric in ("ttft", "tpot"))
            yield line(place, f"`{row['arm']}`", f"{ttft:.0f}", ttft_p, ratios[0], f"{tpot:.{tpot_digits}f}",
                       tpot_p, *ratios[1:], f"{row['device_bytes'] / 2**20:.0f}")  # fmt: skip


SAMPLES = {"ttft": "samples_ttft_s", "tpot": "samples_tpot_s", "total": "samples_ns"}


def typical(row: Row, metric: str, medians: bool) -> float:
    return statistics.median(row[SAMPLES[metric]]) if medians else row[f"{metric}_s"]


def ratio(row: Row, first: Row, metric: str, medians: bool) -> str:
    prefix = "" if metric == "total" else f"{metric}_"
    value, found = row[f"{prefix}ratio_to_first"], row[f"{prefix}ratio_ci95"]
    if metric == "total" and found:
        return interval(value, *found)
    if medians:
        value = typical(first, metric, True) / typical(row, metric, True)
    return f"{value:.2f}"


@pytest.mark.parametrize(
    ("name", "tpot_digits", "predicted_digits", "medians"),
    [
        ("emulated-1b", 1, 0, False),
        ("emulated-8b", 0, 0, False),
        ("emulated-8b-memory", 0, 0, False),
        ("emulated-8b-memory-again", 0, 0, False),
        ("emulated-8b-logits", 0, 0, True),
        ("emulated-8b-groups", 0, 0, True),
        ("emulated-8b-3gib-64", 0, 0, True),
        ("emulated-mixtral", 1, 1, True),
        ("emulated-mixtral-again", 1, 1, True),
        ("emulated-f16", 1, 1, False),
        ("emulated-f16-quarter", 1, 1, True),
        ("emulated-mixtral-2gib", 1, 1, True),
        ("emulated-hetegen", 1, 1, True),
        ("emulated-8b-arms", 1, 0, True),
        ("emulated-all", 1, 1, True),
        ("emulated-all-before", 1, 1, True),
    ],
)
def test_arms_on_the_emulated_card(name: str, tpot_digits: int, predicted_digits: int, medians: bool) -> None:
    assert_on_the_page(list(emulated_rows(name, tpot_digits, predicted_digits, medians)))


@pytest.mark.parametrize("name", ["emulated-policies", "emulated-slow-cpu"])
def test_policies_measured_beside_predicted(name: str) -> None:
    assert with_section(PAGE, name, section(name)) == PAGE


#
# `auto` against the best stock arm
#


def test_auto_against_the_best_stock_arm() -> None:
    found, rows = [], []
    for cell in raw("ab-matrix")["cells"]:
        place = (cell["device"], cell["model"], cell["cap"], cell["workload"])
        made = {metric: compare_with_stock(place, cell["rows"], metric)[0] for metric in ("total", "ttft", "tpot")}
        found += made.values()
        if cell["device"] != "rpc-worker":
            assert all(each.same for each in made.values())
            continue
        shown = ["1 (same)" if each.same else interval(each.value, each.low, each.high) for each in made.values()]
        begin = f"| {cell['model']} | {cell['cap'].replace('%', ' %')} | stock"
        cells = next(each.split(" | ") for each in LINES if each.startswith(begin))
        rows.append((cell["id"], cells[3:6], shown))
    assert len(rows) == 6
    assert [row for row in rows if row[1] != row[2]] == []
    total = next(each for each in figures(found) if each.metric == "total")
    changed = [each.value for each in found if each.metric == "total" and each.device == "rpc-worker"]
    assert f"Best cell {total.best.value:.2f}, geometric mean {total.mean:.3f} over all twelve" in PAGE
    assert f"{statistics.geometric_mean(changed):.3f} over the six with a worker" in PAGE


#
# one process, arms in turns
#


def test_flash_attention_on_the_cpu() -> None:
    wanted = []
    for run in raw("attention")["runs"]:
        for phase in ("prefill", "decode"):
            cases = [case for case in run["cases"] if case["phase"] == phase]
            wanted.append(line(run["model"], phase, *(speed_of(case["off_speed"]) for case in cases)))
    assert_on_the_page(wanted)


def speed_of(found: Row) -> str:
    return interval(found["median"], found["q1"], found["q3"])


def test_policies_on_a_worker() -> None:
    wanted = []
    for result in raw("policies")["results"]:
        for policy in ("layers", "oato-full", "oato"):
            of = result[policy]
            measured, speeds = of["measured"], of["speed_against_layers"]
            wanted.append(line(f"{100 * result['gpu_weights']:.0f}%", policy, f"{of['weights_gpu'] / 1e6:.0f}",
                               f"{measured['ttft_s']:.2f}", f"{1e3 * measured['tpot_s']:.1f}",
                               speed_of(speeds["ttft_s"]), speed_of(speeds["tpot_s"])))  # fmt: skip
    assert_on_the_page(wanted)


def test_the_cpu_alone_against_stock() -> None:
    wanted = []
    for result in raw("cpu")["results"]:
        for phase, key in (("prefill", "ttft_s"), ("decode", "tpot_s")):
            of = result["speed"][key]
            rates = [
                phase_rate(result, samples, key)
                for samples in (result["samples"]["stock"], result["samples"]["oallama"])
            ]
            wanted.append(line(result["model"].removesuffix(".gguf"), phase, *(f"{rate:.1f}" for rate in rates),
                               f"{of['median']:.3f}", f"{of['q1']:.3f} .. {of['q3']:.3f}"))  # fmt: skip
    assert_on_the_page(wanted)


def phase_rate(result: Row, samples: Sequence[Row], key: str) -> float:
    """Tokens a second in the median sample."""
    n_tokens = result["n_prompt"] if key == "ttft_s" else 1
    return float(n_tokens / statistics.median(sample[key] for sample in samples))


def test_the_split_back_end_against_stock() -> None:
    names = {"m1b-q4_0.gguf": "1B Q4_0", "m1b-q4_k.gguf": "1B Q4_K"}
    wanted = []
    for result in raw("split-host")["results"]:
        speeds = [result["speed"][key] for key in ("prefill_s", "decode_s")]
        shown = [f"{of['median']:.3f} ({of['q1']:.3f}..{of['q3']:.3f})" for of in speeds]
        wanted.append(line(names[result["model"]], str(result["threads"]), *shown))
    assert_on_the_page(wanted)


@pytest.mark.parametrize("name", ["1b", "3b", "moe"])
def test_splits_against_whole_layers(name: str) -> None:
    rows = raw(f"split-bench-{name}")
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    layers, alone, split = ([row for row in rows if row["arm"] == arm] for arm in arms)
    assert all([row["n_gen"] for row in arm] == [0, 32] for arm in (layers, alone, split))

    def told(arm: Sequence[Row]) -> str:
        speeds = [f"{row['avg_ts']:.1f}" for row in arm]
        ratios = [interval(row["ratio_to_first"], *row["ratio_ci95"]) if row["ratio_ci95"] else "" for row in arm]
        return " | ".join([f"{arm[0]['device_bytes'] / 1e6:.0f}", *speeds, *ratios]).rstrip(" |")

    for arm in (layers, alone, split):
        assert any(told(arm) in each for each in LINES), told(arm)
