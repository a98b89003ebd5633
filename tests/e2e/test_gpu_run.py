"""scripts/gpu_run on this machine: the rehearsal at the smallest scale, resumed, and the page made from its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_steps.main import main as gpu_steps  # noqa: E402
from gpu_steps.report import NOT_YET, is_gpu, page  # noqa: E402

DEVICE = "rpc-worker:1"


def gpu_run(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        ROOT / "scripts" / "gpu_run",
        "--device",
        DEVICE,
        "--scale",
        "small",
        "-t",
        "1",
        "--work",
        work,
        *arguments,
    ]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280)


def results(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "results.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first call that has time for its first two steps."""
    work = tmp_path_factory.mktemp("gpu") / "work"
    only = ("--only", "machine", "--only", "correctness-split", "--only", "timeline")
    done = gpu_run(work, *only, "--budget", "40", "--out", str(work.parent / "out"))
    assert done.returncode == 0, done.stderr
    assert "left for another call: timeline" in done.stderr
    return work


def test_what_was_found_is_there_at_once_and_in_both_places(rehearsed: Path) -> None:
    found = results(rehearsed)
    assert found == json.loads((rehearsed.parent / "out" / "results.json").read_text(encoding="utf-8"))
    cases = found["steps"]["correctness-split"]["data"]
    assert len(cases) == 10 and {case["verdict"] for case in cases} == {"ok"}
    assert {"F32", "Q4_0", "Q4_K"} <= {case["type"] for case in cases}
    assert all(case["bytes_in"] > 0 for case in cases)


def test_a_second_call_goes_on(rehearsed: Path) -> None:
    before = results(rehearsed)["steps"]
    done = gpu_run(rehearsed, "--only", "machine", "--only", "correctness-split", "--only", "timeline")
    assert done.returncode == 0, done.stderr
    found = results(rehearsed)
    assert len(found["calls"]) == 2
    for name in ("machine", "correctness-split"):
        assert found["steps"][name] == before[name], "what is done is not done again"
    rows = found["steps"]["timeline"]["data"]
    assert rows[0]["what"] == "plan" and rows[0]["plan"] == "split"
    stages = next(row for row in rows if row["what"] == "stages")
    assert stages["tpot_s"] > 0 and len(stages["samples"]["ttft_s"]) == 5
    traces = {row["plan"]: row["token"]["sums"] for row in rows if row["what"] == "trace"}
    assert traces["split"]["host_s"] > 0 and traces["split"]["bytes_copied"] == 0
    streamed = next(row for row in rows if row["what"] == "stages" and row["plan"] == "streamed")
    assert streamed["decode"]["bytes_streamed"] > 0


def test_the_page_calls_a_rehearsal_one(rehearsed: Path) -> None:
    document = results(rehearsed)
    assert not is_gpu(document)
    text = page("{{state}}\n{{papers}}\n{{results}}\n", {"gpu-rehearsal.json": document}, None, None)
    assert NOT_YET in text and "Rehearsed: rpc-worker:1" in text and "## Measured" not in text
    assert "| split | 10 of 10 | 5 |" in text


def test_results_name_nobody(rehearsed: Path) -> None:
    text = (rehearsed / "results.json").read_text(encoding="utf-8")
    assert str(ROOT) not in text and str(rehearsed) not in text and str(Path.home()) + "/" not in text


def test_a_listing_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_steps(["--device", "CUDA0", "--list", "--work", str(tmp_path / "w")]) == 0
    assert "to do" in capsys.readouterr().out and not (tmp_path / "w" / "results.json").exists()


def test_small_copies_are_timed_beside_streamed_ones(rehearsed: Path) -> None:
    done = gpu_run(rehearsed, "--only", "copy-queue")
    assert done.returncode == 0, done.stderr
    rows = results(rehearsed)["steps"]["copy-queue"]["data"]
    assert {(row["small_bytes"], row["piece_bytes"]) for row in rows} == {
        (small, piece) for small in (8 << 10, 16 << 10) for piece in (0, 256 << 10, 1 << 20, 4 << 20, 32 << 20)
    }
    assert all(len(row["samples"]) == 41 and min(small for _, small, _ in row["samples"]) > 0 for row in rows)
    assert all(not row["pinned"] and row["late"] is None for row in rows)
