"""A ggml back end of the user's, by --backend and GGML_BACKEND_PATH: TEST0 in a library of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.stock import environment, needs_programs
from e2e.stock_plans import split_plan
from gguf_factory import write_llama_shape
from native_helpers import build_native
from seeds import ALL

import ggml_bridge
from ggml_bridge.library import find_built, find_plugin
from oallama.device.user_backend import VARIABLE
from oallama.stores.default_model import default_model

pytestmark = pytest.mark.timeout(1200)  # building


@pytest.fixture(scope="module")
def library(bridge: ggml_bridge.Bridge) -> Path:
    return build_native("ggml-test", bridge.libraries.folder).with_name("libggml-test.so")


def run(*arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oallama", *map(str, arguments)]
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)


def device_names(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return {device["name"]: device["backend"] for device in json.loads(done.stdout)["devices"]}


def test_its_device_is_listed(library: Path) -> None:
    assert device_names(run("devices", "--json")) == {"CPU": "CPU"}
    expected = {"CPU": "CPU", "TEST0": "TEST"}
    assert device_names(run("devices", "--backend", library, "--json")) == expected
    assert device_names(run("devices", "--json", **{VARIABLE: library})) == expected


def test_it_computes(library: Path) -> None:
    prompt, n = "Once upon a time", 4
    words = ["run", default_model(), prompt, "-n", n, "--temp", 0, "--tune", "never", "--json"]
    done = run(*words, "--backend", library, "--device", "TEST0")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there["device"] == "TEST0"
    assert there["memory"]["device_bytes"] > 0
    llama = ggml_bridge.load().libraries.llama_cpp.Llama(str(default_model()), n_threads=1, verbose=False)
    stock = llama.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
    llama.close()
    assert there["text"] == stock


def test_every_arm_of_a_comparison_may_use_it(library: Path, tmp_path: Path) -> None:
    model = write_llama_shape(tmp_path / "model.gguf", 1, 256, 256, 2, 2, 300)
    arms = "stock-cpu,stock-fit" + ",stock-ngl" * ALL  # which times the machine first
    arguments = ["-p", "16", "-n", "0", "-r", "2", "--arms", arms, "-o", "json", "--no-progress"]
    done = run("bench", model, *arguments, "--device", "TEST0", "--backend", library)
    assert done.returncode == 0, done.stderr
    assert "TEST0" in done.stdout


@needs_programs
def test_a_plan_that_splits_runs_beside_it_in_stock_programs(library: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    split_plan(plan, "TEST0")
    assert run("export", plan, "--to", "plugin", "-o", plan.with_suffix(".oallama")).returncode == 0
    line = run("export", plan, "--to", "llama-bench", "--backend", library).stdout.strip()
    assert f"OALLAMA_EXTRA_BACKENDS={library} " in line
    done = subprocess.run(
        ["bash", "-c", f"{line} -r 1 -t 1 -o json"], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all({"OALLAMA", "TEST"} <= set(row["backends"].split(",")) for row in json.loads(done.stdout))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda folder: folder / "missing.so", "no such file"),
        (lambda folder: folder, "no such file"),
        (lambda folder: write(folder / "text.so"), "is not a back end for this ggml"),
        (lambda folder: find_built("ggml_bridge"), "is not a back end for this ggml"),
    ],
    ids=["missing", "a folder", "no library", "another library"],
)
def test_a_wrong_file_is_one_sentence(wrong, says: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = run("devices", "--backend", wrong(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_our_own_plugin_in_the_variable_is_left_to_us() -> None:
    assert device_names(run("devices", "--json", **{VARIABLE: find_plugin()})) == {"CPU": "CPU"}


def write(path: Path) -> Path:
    path.write_text("no library")
    return path
