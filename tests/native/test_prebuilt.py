"""The plug-in in a llama.cpp that nobody here built: node-llama-cpp's libraries, from npm, whose ggml has API 2 of back
ends. The pinned llama.cpp has API 3."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from native_helpers import ROOT, RunHere

from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.stores.default_model import default_model

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"  # llama.cpp v0.5.0, ggml 0.25.1, API 2, back ends as libraries
N_THREADS = 4  # llama.cpp's default
BATCHES = [[1], [1 + i for i in range(5)], [3 + 7 * i for i in range(40)], [2]]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="the package is for Linux"),
]


@pytest.fixture(scope="module")
def prebuilt() -> Path:
    """The package's libraries; fetched once and kept in the build folder."""
    kept = ROOT / "build" / "prebuilt"
    libraries = kept / "package" / "bins" / "linux-x64"
    if not libraries.is_dir():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not there: the plug-in was not tried in a llama.cpp that was built elsewhere")
        kept.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([npm, "pack", PACKAGE], cwd=kept, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip("no npm registry answers: the plug-in was not tried in a llama.cpp that was built elsewhere")
        with tarfile.open(kept / done.stdout.split()[-1]) as archive:
            archive.extractall(kept)
    return libraries


def half_of_each_ffn(model: Path) -> str:
    """The text of a plan that cuts every FFN in the middle."""
    lines = ["oallama-plan 1", "device Emulated0"]
    for op in operators(read_gguf(model)):
        if op.role in ("ffn_gate", "ffn_up", "ffn_down"):
            k, n, _ = op.shape
            axis, extent = ("cols", k) if op.role == "ffn_down" else ("rows", n)
            cc = extent // 2 // 256 * 256
            lines.append(f"tensor {op.name} {op.type} {k}x{n}x1 {axis} {cc} 0 {extent - cc} CPU")
    return "\n".join(lines) + "\n"


def test_a_forced_split_gives_the_librarys_own_logits_with_threads_that_stay(
    prebuilt: Path, run_here: RunHere, tmp_path: Path
) -> None:
    model = Path(default_model())
    plan = tmp_path / "half.oallama"
    plan.write_text(half_of_each_ffn(model))
    case = {"folder": str(prebuilt), "model": str(model), "batches": BATCHES}
    own = run_here("prebuilt_cases", {**case, "plan": None})
    split = run_here("prebuilt_cases", {**case, "plan": str(plan)})
    assert own["version"] == split["version"] == "0.25.1"
    assert split["n_graphs"] >= len(BATCHES) and own["n_graphs"] == 0
    # this ggml has no OpenMP: its own threads go with each graph, those of the split back end stay
    [kept] = {tuple(ids) for ids in split["threads"]}
    assert len(kept) == len(own["threads"][-1]) + N_THREADS - 1
    for expected, found in zip(np.array(own["logits"]), np.array(split["logits"]), strict=True):
        assert np.sum((found - expected) ** 2) <= 5e-4 * np.sum(expected**2)
