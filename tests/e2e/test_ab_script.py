"""scripts/ab from outside: a matrix is measured, stopped, continued and reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gguf_factory import write_llama_shape

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ab"


def ab(*arguments: object, code: int = 0) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_matrix_is_measured_once_and_reported(tmp_path: Path) -> None:
    model = write_llama_shape(tmp_path / "m.gguf", 2, 256, 256, 4, 2, 300)
    toml, out = tmp_path / "trial.toml", tmp_path / "out"
    toml.write_text(
        f"""
        name = "trial"
        [options]
        arms = ["stock-cpu", "cpu"]
        device = "none"
        threads = 1
        flash_attn = "on"
        repetitions = 6
        [[models]]
        name = "tiny"
        path = {json.dumps(str(model))}
        [[models]]
        name = "gone"
        path = "models/gone.gguf"
        [[workloads]]
        pg = [16, 4]
        """
    )
    assert ab(toml, "--out", out, "--list").count("to do") == 2
    assert "no cell has huge in its name" in ab(toml, "--out", out, "--only", "huge", code=2)
    said = ab(toml, "--out", out, code=1)
    assert "there is no model file" in said
    report = json.loads((out / "report.json").read_text())
    assert [(cell["model"], bool(cell["rows"])) for cell in report["cells"]] == [("tiny", True), ("gone", False)]
    (total, *_) = report["against_stock"]
    assert (total["arm"], total["stock"], total["same"]) == ("cpu", "stock-cpu", True)
    assert "tiny" in (out / "report.html").read_text()

    def cell() -> dict[str, object]:
        steps: dict[str, dict[str, object]] = json.loads((out / "results.json").read_text())["steps"]
        return steps["tiny-free-pp16_tg4"]

    before = cell()
    assert before["state"] == "done"
    assert "done" in ab(toml, "--out", out, "--list")
    ab(toml, "--out", out, "--only", "tiny")
    assert cell() == before
    assert ab(toml, "--out", out, "--report-only").count("report.") == 3


def test_what_is_no_matrix_is_one_line(tmp_path: Path) -> None:
    toml = tmp_path / "bad.toml"
    toml.write_text('name = "bad"\n')
    said = ab(toml, code=2)
    assert said.startswith("ab: ")
    assert said.count("\n") == 1
