"""docs/benchmarks.md against the raw results beside it: rows of its tables made anew, each number rounded once."""

import json
from pathlib import Path
from statistics import mean, median

import pytest

from oallama.bench.stats import speed_ratio

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINES = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()


def times(row):
    """Milliseconds of a prompt and of a token: medians, and as predicted."""
    for metric, digits in (("ttft", 0), ("tpot", 1)):
        yield f"{1e3 * median(row[f'samples_{metric}_s']):.{digits}f}"
        yield f"{1e3 * row['predicted'][f'{metric}_s']:.{digits}f}" if row["predicted"] else "-"


def of(first, row):
    """How many times as fast a row is as another over the whole run, with its interval."""
    if first is row:
        return "1.00"
    ratio = speed_ratio(first["samples_ns"], row["samples_ns"])
    return f"{ratio.value:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def rows_of(cell):
    """Yield the page's rows of one comparison, without its name: each arm with a configuration of its own, against
    `--fit` and against the fastest arm of stock llama.cpp."""
    fit, *_ = shown = [row for row in cell["rows"] if not row["same_as"]]
    best = min((row for row in shown if row["arm"].startswith("stock")), key=lambda row: mean(row["samples_ns"]))
    for row in shown:
        ttft, ttft_p, tpot, tpot_p = times(row)
        held = f"{row['device_bytes'] / 2**20:.0f}"
        cells = f"`{row['arm']}`", ttft, ttft_p, tpot, tpot_p, of(fit, row), of(best, row), held
        yield f" {' | '.join(cells)} |"


@pytest.mark.parametrize("name", ["emulated-8b-rivals", "emulated-shapes-rivals", "emulated-experts-rivals"])
def test_tables_against_the_fastest_stock(name):
    document = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    rows = [row for cell in document["cells"] for row in rows_of(cell)]
    assert rows
    missing = [row for row in rows if not any(line.endswith(f"|{row}") for line in LINES)]
    assert not missing, "\n".join(missing)


def test_every_raw_file_is_named_by_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    kept = {path.name for path in (DOCS / "benchmarks").iterdir()}
    assert {name for name in kept if f"benchmarks/{name}" not in text} == set()
