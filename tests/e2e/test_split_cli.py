"""`oallama run` and `doctor` with the split backend, from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.split_cases import Share, ffn, split_case
from gguf_factory import write_gguf

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "oallama")


def saved(folder: Path, device: str, share: Share) -> Path:
    """A plan file for a small model of that folder."""
    path = folder / "model.gguf"
    case = split_case(path if path.is_file() else write_gguf(path, "llama", weight_type="Q4_0"), device, share)
    case.plan.save(folder / "plan.json")
    return folder / "plan.json"


def run(plan: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "run", "once upon", "--plan", str(plan), "-n", "6", "--temp", "0", "-t", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd=ROOT)


@pytest.mark.parametrize("device", ["cpu-pair", pytest.param("rpc-worker", marks=pytest.mark.thorough)])
def test_run_reports_what_the_split_backend_did(device: str, tmp_path: Path) -> None:
    plan = saved(tmp_path, device, ffn(0.5))
    done = run(plan, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert made["device"] == ("cpu-pair" if device == "cpu-pair" else "RPC0")
    split = made["split"]
    assert split["n_decoded"] == made["n_gen"] - 1 == 5
    assert split["decode"]["n_graphs"] == 2 * 5, "two layers with an FFN each"
    assert split["prompt"]["n_graphs"] == 2
    assert set(split["per_token"]) == {"launch_s", "host_s", "wait_s", "join_s", "total_s"}
    assert split["decode"]["bytes_in"] > 0 and split["decode"]["bytes_out"] > 0
    memory = split["memory"]
    placed = json.loads(plan.read_text(encoding="utf-8"))["memory"]
    assert memory["device_weights"] == placed["weights_gpu"] > 0
    assert made["memory"]["device_bytes"] == memory["device_weights"] + memory["device_compute"]
    assert made["memory"]["host_bytes"] > memory["host_weights"] + memory["host_compute"]
