"""The plug-in in a llama.cpp that nobody here built: node-llama-cpp's libraries, from npm. And in the pinned one, whose
ggml is given API 3 of back ends, which no package has yet: two slots more in the vtables of buffer types."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from native_helpers import ROOT, RunHere

from ggml_bridge.library import LLAMA_CPP_PYTHON_VERSION, library_folder
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.setup.build import cmake_build, fetch_source
from oallama.setup.console import Console, SetupError
from oallama.stores.default_model import default_model

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"  # llama.cpp v0.5.0, ggml 0.25.1, API 2, back ends as libraries
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


@pytest.fixture(scope="module")
def api3() -> Path:
    """The pinned llama.cpp's libraries, with a ggml of API 3; compiled once and kept in the build folder."""
    work = ROOT / "build" / f"api3-{LLAMA_CPP_PYTHON_VERSION}"
    libraries = work / "lib"
    if not libraries.is_dir():
        shutil.rmtree(work, ignore_errors=True)
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # set-up's cmake
        console = Console(sys.stderr, work / "setup.log")
        console.open_log()
        with console.step("API 3", "compiling ggml") as step:
            try:
                sources = fetch_source(console, step, work, Path(sys.executable), env) / "ggml"
            except SetupError as error:
                pytest.skip(f"the plug-in was not tried with API 3: {error}")
            (sources / "ggml.pc.in").touch()  # the package lacks it
            give_api_3(sources / "src")
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF"]
            cmake_build(console, step, sources, work / "build", options, 2, ["ggml"], env, "ggml")
        draft = work / "draft"
        draft.mkdir()
        for path in (*(work / "build").rglob("libggml*.so.0"), library_folder() / "libllama.so.0"):
            shutil.copy(path, draft)
        draft.rename(libraries)
        shutil.rmtree(work / "source")
    return libraries


def give_api_3(sources: Path) -> None:
    """Change ggml's sources as llama.cpp did in October 2026, as far as back ends see it."""
    header = sources / "ggml-backend-impl.h"
    text = header.read_text().replace("GGML_BACKEND_API_VERSION 2", "GGML_BACKEND_API_VERSION 3")
    more = "(ggml_backend_buffer_type_t buft, struct ggml_tensor ** tensors, int n_tensors);\n"
    for slot, type in (("alloc_buffer", "ggml_backend_buffer_t"), ("get_alloc_size", "size_t")):
        text, n = re.subn(rf"(\(\*{slot}\)[^;]*;\n)", rf"\g<1>        {type} (*{slot}_n){more}", text)
        assert n == 1
    header.write_text(text)
    for path in sources.rglob("*.cpp"):
        slots = re.compile(r"(/\*\s*\.(?:alloc_buffer|get_alloc_size)\s*=\s*\*/[^\n]*\n)")
        path.write_text(slots.sub(r"\1 nullptr,\n", path.read_text()))


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


@pytest.mark.parametrize(("where", "version"), [("prebuilt", "0.25.1"), ("api3", "0.25.3")])
def test_a_forced_split_gives_the_librarys_own_logits(
    where: str, version: str, run_here: RunHere, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = Path(default_model())
    plan = tmp_path / "half.oallama"
    plan.write_text(half_of_each_ffn(model))
    case = {"folder": str(request.getfixturevalue(where)), "model": str(model), "batches": BATCHES}
    own = run_here("prebuilt_cases", {**case, "plan": None})
    split = run_here("prebuilt_cases", {**case, "plan": str(plan)})
    assert own["version"] == split["version"] == version
    assert split["n_graphs"] >= len(BATCHES) and own["n_graphs"] == 0
    for expected, found in zip(np.array(own["logits"]), np.array(split["logits"]), strict=True):
        assert np.sum((found - expected) ** 2) <= 5e-4 * np.sum(expected**2)
