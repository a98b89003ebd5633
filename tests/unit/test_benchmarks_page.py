"""docs/benchmarks.md against the raw results beside it: rows of its tables made anew, each number rounded once."""

import json
import statistics
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINES = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
SAMPLES = {"ttft": "samples_ttft_s", "tpot": "samples_tpot_s", "total": "samples_ns"}


def raw(name):
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def line(*cells):
    return f"| {' | '.join(cells)} |"


def interval(value, low, high):
    return f"{value:.2f} ({low:.2f}..{high:.2f})"


def assert_on_the_page(rows):
    rows = list(rows)
    assert rows
    missing = [row for row in rows if row not in LINES]
    assert not missing, "\n".join(missing)


def ratio(row, first, metric):
    """× of a row: of medians, or bench's own with its interval over the whole run."""
    if metric == "total" and row["ratio_ci95"]:
        return interval(row["ratio_to_first"], *row["ratio_ci95"])
    medians = [statistics.median(each[SAMPLES[metric]]) for each in (first, row)]
    return f"{medians[0] / medians[1]:.2f}"


def arm_rows(name, tpot_digits, predicted_digits, arms):
    cells = [cell for cell in raw(name)["cells"] if cell["rows"] and cell["rows"][0]["samples_ns"]]
    several_prompts = len({row["n_prompt"] for cell in cells for row in cell["rows"]}) > 1
    for cell in cells:
        first = cell["rows"][0]
        for row in cell["rows"]:
            if arms and row["arm"] not in arms:
                continue
            cap = (cell.get("cap") or cell["command"][cell["command"].index("--vram") + 1]).replace("%", " %")
            place = f"{cap}, {row['n_prompt']}" if several_prompts else cap.replace("GiB", " GiB")
            predicted = row["predicted"]
            ttft_p, tpot_p = (
                (f"{1e3 * predicted['ttft_s']:.0f}", f"{1e3 * predicted['tpot_s']:.{predicted_digits}f}")
                if predicted
                else ("-", "-")
            )
            if row is first:
                ratios = ["1.00"] * 3
            elif row["same_as"] == first["arm"] and not row["arm"].startswith("stock"):
                ratios = ["=", "=", "stock's very configuration"]
            else:
                ratios = [ratio(row, first, metric) for metric in SAMPLES]
            ttft, tpot = (1e3 * statistics.median(row[SAMPLES[metric]]) for metric in ("ttft", "tpot"))
            yield line(place, f"`{row['arm']}`", f"{ttft:.0f}", ttft_p, ratios[0], f"{tpot:.{tpot_digits}f}",
                       tpot_p, *ratios[1:], f"{row['device_bytes'] / 2**20:.0f}")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tpot_digits", "predicted_digits", "arms"),
    [
        ("emulated-8b-rivals", 0, 0, ("stock-fit", "auto")),
        ("emulated-8b-groups", 0, 0, ()),
        ("emulated-8b-3gib-64", 0, 0, ()),
        ("emulated-8b-arms", 1, 0, ()),
        ("emulated-f16-quarter", 1, 1, ()),
        ("emulated-mixtral-2gib", 1, 1, ()),
        ("emulated-all", 1, 1, ("stock-fit", "oato", "auto")),
    ],
)
def test_arms_on_the_emulated_card(name, tpot_digits, predicted_digits, arms):
    assert_on_the_page(arm_rows(name, tpot_digits, predicted_digits, arms))


def test_every_raw_file_is_named_by_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    kept = {path.name for path in (DOCS / "benchmarks").iterdir()}
    assert {name for name in kept if f"benchmarks/{name}" not in text} == set()
