"""docs/gpu.md: what is measured is told as measured, a rehearsal as a rehearsal, and what is not there is not there.
The results here are made up; the page's are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from experiments.pages import table
from gpu_steps import tables
from gpu_steps.copy_tables import copies_table
from gpu_steps.plots import write_plots
from gpu_steps.report import NOT_YET, current, is_gpu, page, read_documents
from gpu_steps.scale import FULL, LEASE

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "scripts" / "gpu_steps" / "page.md").read_text(encoding="utf-8")
MODEL = LEASE.oato_q4.name


def row(arm: str, seconds: float, **changes: Any) -> dict[str, Any]:
    samples = [seconds * (1 + 0.001 * i) for i in range(6)]
    return {
        "arm": arm, "n_threads": 16, "ttft_s": seconds / 4, "tpot_s": seconds / 40, "device_bytes": 3 << 30,
        "samples_ns": [round(1e9 * s) for s in samples], "samples_ttft_s": [s / 4 for s in samples],
        "samples_tpot_s": [s / 40 for s in samples], "cap_operator_bytes": 10**9, "operator_bytes_on_device": 10**9,
        "problems": [], "same_as": "", **changes,
    }  # fmt: skip


def case(device: str, n_tokens: int, gb_per_s: float, gflops: float, n: int = 14336) -> dict[str, Any]:
    return {"device": device, "layout": "", "type": "Q4_0", "shape": [4096, n, 1], "n_tokens": n_tokens,
            "gb_per_s": gb_per_s, "gflops": gflops}  # fmt: skip


PROFILE = {
    "model": MODEL, "threads": 16, "device": "CUDA0", "launch_s": 1.1e-5, "warnings": [],
    "link": {"h2d_pinned": {"beta_s_per_byte": 2e-11}, "h2d_pageable": {"beta_s_per_byte": 1e-10}, "d2h": {}},
    "contention": {"cpu_alone_gb_per_s": 77.7, "link_alone_gb_per_s": 51.5, "cpu_with_link_gb_per_s": 44.4,
                   "link_with_cpu_gb_per_s": 33.3},
    "cases": [case("CPU", 1, 50.0, 100.0), case("CPU", 512, 1.0, 1000.0), case("CUDA0", 1, 2000.0, 4000.0),
              case("CUDA0", 512, 9.0, 300000.0)],
}  # fmt: skip


def step(kind: str, data: Any, state: str = "done") -> dict[str, Any]:
    return {"kind": kind, "state": state, "seconds": 12.0, "tries": 1, "title": "", "error": "", "data": data}


def document(
    device: str = "CUDA0", description: str = "NVIDIA H100", rows: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    rows = rows or [row("stock-fit", 4.0), row("stock-ngl", 3.0), row("split", 2.0)]
    cell = {"model": MODEL, "cap": "50%", "paper": "oato", "n_prompt": 64, "n_gen": 32, "arms": [], "rows": rows}
    return {
        "schema": 1, "device": device, "scale": "lease",
        "calls": [{"began": "2026-12-01T00:00:00Z", "threads": 16, "cpus": "", "budget_s": 570}],
        "steps": {
            "machine": step("machine", {"fingerprint": {"cpu": "Xeon", "cores_allowed": 16, "memory_bytes": 2**37},
                                        "cards": [{"name": "NVIDIA H100"}], "pack": {}}),
            "doctor": step("doctor", {"checks": [], "devices": [{"name": device, "description": description}]}),
            "profile-x": step("profile", PROFILE),
            "oato-x-50": step("ab", cell),
        },
    }  # fmt: skip


def whole(documents: dict[str, Any]) -> str:
    return page(TEMPLATE, documents, None, None)


#
# measured, rehearsed, or neither
#


def test_without_results_the_page_says_so_and_has_no_figure_of_ours() -> None:
    text = whole({})
    assert f"This is {NOT_YET}" in text and "Nor was it rehearsed" in text
    assert "{{" not in text and "## Measured" not in text and "## Rehearsed" not in text
    ours = [line for line in text.splitlines() if line.startswith("| OATO") or line.startswith("| ScheInfer")]
    assert len(ours) >= 9 and all(line.endswith((f"{NOT_YET} |", "| - |")) for line in ours)


def test_what_a_card_did_is_measured() -> None:
    text = whole({"gpu-h100.json": document()})
    assert "**Measured on:**" in text and "## Measured: CUDA0" in text and f"This is {NOT_YET}" not in text
    line = next(line for line in text.splitlines() if line.startswith("| OATO §4.5") and "| 50% |" in line)
    assert "20.7 % faster" in line and f"{MODEL}: 1.50" in line, "against the best stock arm, not the first"
    assert "[gpu-h100.json](benchmarks/gpu-h100.json)" in text


@pytest.mark.parametrize(
    ("device", "description", "measured"),
    [("CUDA0", "NVIDIA H100", True), ("Vulkan0", "NVIDIA GeForce RTX 4090", True),
     ("Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", False), ("rpc-worker:1:1", "x", False), ("cpu-pair", "x", False)],
)  # fmt: skip
def test_only_a_card_is_a_card(device: str, description: str, measured: bool) -> None:
    found = document(device, description)
    assert is_gpu(found) == measured
    text = whole({"gpu-x.json": found})
    assert (f"This is {NOT_YET}" in text) != measured
    assert ("## Measured: " in text) == measured and ("## Rehearsed: " in text) != measured
    papers = [line for line in text.splitlines() if line.startswith("| OATO §4.5")]
    assert any(MODEL in line for line in papers) == measured, "a rehearsal is no figure beside the papers'"


def test_a_card_that_did_not_answer_measured_nothing() -> None:
    found = document()
    found["steps"]["doctor"] = step("doctor", None, "failed")
    assert not is_gpu(found)


#
# tables
#


def test_ratios_are_against_the_best_stock_arm() -> None:
    lines = tables.ab_tables(document())
    split = next(line for line in lines if line.startswith("| split"))
    assert split.count("1.50 (") == 3 and "stock-ngl" in lines[-2]


def test_an_arm_that_did_not_do_what_it_says_has_no_ratio() -> None:
    rows = [row("stock-fit", 4.0), row("split", 2.0, problems=["it holds more than the cap"])]
    text = "\n".join(tables.ab_tables(document(rows=rows)))
    assert "none: it holds more than the cap" in text and "2.00" not in text


def test_a_cell_that_was_cut_short_is_marked() -> None:
    found = document()
    found["steps"]["oato-x-50"]["state"] = "cut"
    assert "(cut short)" in tables.ab_tables(found)[0]


def test_the_profile_is_told_in_gb_per_s() -> None:
    line = tables.profile_table(document())[2]
    assert "| 16 | 50.0 | 10.0 | - | 77.7 / 44.4 | 51.5 / 33.3 | 11 |" in line


def test_correctness_names_what_is_wrong() -> None:
    good = {"arch": "llama", "type": "F16", "nmse_decode": 1e-9, "nmse_prefill": 3e-6, "verdict": "ok"}
    found = document()
    found["steps"]["correctness-split"] = step("correctness", [good, {**good, "type": "TQ1_0", "verdict": "differs"}])
    text = "\n".join(tables.correctness_table(found))
    assert "| split | 1 of 2 | 2 | 3.0e-06 |" in text and "| split | llama | TQ1_0 | differs |" in text


def test_small_copies_are_told_in_microseconds(tmp_path: Path) -> None:
    def row(large: int, piece: int, small_s: float) -> dict[str, Any]:
        samples = [[1e-5, small_s + i * 1e-6, 2e-3 if large else 0.0] for i in (-1, 0, 1)]
        return {"large_bytes": large, "piece_bytes": piece, "small_bytes": 8192, "pinned": True, "samples": samples}

    found = document()
    large = 32 << 20
    found["steps"]["copy-queue"] = step(
        "copies", [row(0, 0, 2e-5), row(large, large, 1.99e-3), row(large, 1 << 20, 5e-5)]
    )
    text = copies_table(found)
    assert "| 8 KiB | alone | 20 | 19..21 | - | - | - | - |" in text
    assert "| 8 KiB | one copy of 32 MiB | 1990 | 1989..1991 | 1970 | 4000 | 10 | 2000 |" in text
    assert "| 8 KiB | 32 pieces of 1 MiB | 50 | 49..51 | 30 | 125 | 10 | 2000 |" in text
    page_ = whole({"gpu-x.json": found})
    assert "### Small copies beside streamed weights (CUDA0)" in page_ and "(pictures/gpu-x-copies.svg)" in page_
    pytest.importorskip("matplotlib")
    drawn = {path.name: path.read_text(encoding="utf-8") for path in write_plots({"gpu-x.json": found}, tmp_path)}
    assert "behind 32 pieces of 1 MiB" in drawn["gpu-x-copies.svg"]


def test_pipes_cannot_break_a_table() -> None:
    assert table(("a",), [("x|y",)])[2] == "| x\\|y |"


def test_the_least_bound_of_a_cells_arms_is_told() -> None:
    arms = [
        row(arm, 4.0, bound={"ttft_s": ttft_s, "tpot_s": 0.02}) for arm, ttft_s in (("stock-fit", 0.3), ("split", 0.2))
    ]
    (text,) = [line for line in tables.ab_tables(document(rows=[*arms, row("stock-ngl", 3.0)])) if line.startswith("×")]
    assert "No placement takes less than TTFT 200 ms, TPOT 20 ms." in text
    assert "No placement" not in "\n".join(tables.ab_tables(document()))


def test_a_model_is_about_as_large_as_its_file() -> None:
    assert FULL.mixtral.n_bytes == pytest.approx(26.3e9, rel=0.02)


#
# the page that is there
#


def test_docs_gpu_is_what_the_results_give() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == current(ROOT), "run scripts/gpu_run --report"


def test_the_rehearsals_are_there_and_small() -> None:
    documents = read_documents(ROOT)
    assert {found["device"].split(":")[0] for found in documents.values()} >= {"Vulkan0", "rpc-worker"}
    for name, found in documents.items():
        assert (ROOT / "docs" / "benchmarks" / name).stat().st_size < 400_000
        text = json.dumps(found)
        assert "/root/" not in text and "/home/" not in text and str(ROOT) not in text
