"""A plan that splits operators, in the pinned llama.cpp's own programs: exported, pasted into a shell, read back."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.logits import assert_greedy
from e2e.stock import RpcServer, environment, llama_server, needs_programs, program, rpc_server
from e2e.stock_plans import MODEL, split_plan
from processes import here

from ggml_bridge.library import LLAMA_CPP_BUILD, find_plugin
from oallama.core.types import PLAIN_BUFT, PLAIN_LAYOUT
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.plan.plan import Plan

PROMPT = "Once upon a time"


pytestmark = needs_programs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcServer]:
    with rpc_server(tmp_path_factory.mktemp("rpc")) as made:
        yield made


@pytest.fixture(scope="module")
def plan_file(server: RpcServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan beside the plugin's own file of it, in a folder whose name a shell would take apart."""
    path = tmp_path_factory.mktemp("a plan") / "plan.json"
    split_plan(path, f"rpc://{server.endpoint}")
    here("export", path, "--to", "plugin", "-o", path.with_suffix(".oallama"))
    return path


def shell(line: str, *more: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What a user does with an exported line: paste it into a shell, with more options at its end."""
    command = ["bash", "-c", f"{line.strip()} {shlex.join(more)}"]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, env=environment()
    )


def test_the_programs_are_of_the_version_the_plugin_was_written_for() -> None:
    done = subprocess.run([program("llama-bench"), "--version"], capture_output=True, text=True, check=True)
    assert f"(build {LLAMA_CPP_BUILD}, commit b{LLAMA_CPP_BUILD})" in done.stdout + done.stderr


def test_a_line_for_a_plan_that_splits_comes_with_the_plugins_file_of_that_plan(tmp_path: Path) -> None:
    plan, text = tmp_path / "plan.json", tmp_path / "plan.oallama"
    split_plan(plan, "rpc://127.0.0.1:1")
    done = here("export", plan, "--to", "llama-server")
    assert f"OALLAMA_PLAN={text} llama-server -m " in done.stdout and f"wrote {text}" in done.stderr
    assert text.read_text(encoding="utf-8") == here("export", plan, "--to", "plugin").stdout


def test_the_plugins_file_replaces_neither_the_plan_nor_the_command_line(tmp_path: Path) -> None:
    plan, same = tmp_path / "plan.json", tmp_path / "plan.oallama"
    written = split_plan(plan, "rpc://127.0.0.1:1")
    assert f"would replace {same}" in here("export", plan, "--to", "llama-cli", "-o", same, code=2).stderr
    assert not same.exists()
    written.save(same)
    assert f"would replace {same}" in here("export", same, "--to", "llama-cli", code=2).stderr
    assert Plan.load(same) == written


def test_llama_bench_runs_the_plan_and_the_device_holds_its_half(plan_file: Path, server: RpcServer) -> None:
    before = len(server.allocated())
    done = shell(here("export", plan_file, "--to", "llama-bench").stdout, "-r", "1", "-t", "1", "-o", "json", "-v")
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in results] == [(32, 0), (0, 8)]
    backends = [set(row["backends"].split(",")) for row in results]
    assert backends == [{"OALLAMA", "RPC"}] * 2
    assert all(row["avg_ts"] > 0 for row in results)
    split = [op for op in operators(read_gguf(MODEL)) if is_ffn(op)]
    overridden = re.findall(r"tensor (\S+) .* buffer type overridden to OALLAMA_Split", done.stderr)
    assert set(overridden) == {op.name for op in split}
    halves = sum(op.bytes for op in split) // 2
    assert halves in server.allocated()[before:], "the GG halves are one buffer of just their size"


def test_llama_server_says_the_same_with_the_plan_as_on_the_cpu_alone(plan_file: Path, tmp_path: Path) -> None:
    with llama_server(here("export", plan_file, "--to", "llama-server").stdout.strip(), tmp_path / "log") as server:
        assert_greedy(server.complete(prompt=PROMPT, n_predict=16), MODEL, PROMPT, 16)


def test_llama_cli_runs_the_plan(plan_file: Path) -> None:
    line = here("export", plan_file, "--to", "llama-cli").stdout
    done = shell(line, "-p", PROMPT, "-n", "8", "--temp", "0", "-t", "1", "-st", "--simple-io")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Generation:" in done.stdout and PROMPT in done.stdout


def test_every_operation_of_llama_cpp_can_be_offered_to_the_backend() -> None:
    """None of them is its own while the weights are elsewhere; it must say so without dying."""
    environ = environment(GGML_BACKEND_PATH=str(find_plugin()))
    command = [program("test-backend-ops"), "support", "-b", "OALLAMA"]
    offered = subprocess.run([*command, "--output", "csv"], capture_output=True, text=True, timeout=120, env=environ)
    assert offered.returncode == 0, offered.stderr[-2000:]
    command = [program("test-backend-ops"), "test", "-b", "OALLAMA", "-o", "MUL_MAT"]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert tested.returncode == 0 and "not supported [OALLAMA]" in tested.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "which cannot be read"),
        ("oallama-plan 2\n", "plan of version 1"),
        ("oallama-plan 1\ndevice RPC0\ntensor blk.0.ffn_up.weight Q4_0 256x512x1 rows 250 0 262 CPU\n", "line 3"),
    ],
    ids=["missing", "version", "cut"],
)
def test_a_bad_plan_file_is_one_sentence_and_no_crash(
    text: str | None, complaint: str, server: RpcServer, tmp_path: Path
) -> None:
    file = tmp_path / "bad.oallama"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    settings = environment(GGML_BACKEND_PATH=str(find_plugin()), OALLAMA_PLAN=str(file))
    command = [program("llama-bench"), "-m", str(MODEL), "--rpc", server.endpoint, "-ot", "ffn=OALLAMA_Split"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("oallama: ")]
    assert len(said) == 1 and complaint in said[0]


def test_overrides_name_each_layout_of_the_cpu() -> None:
    """Also plain memory, by a name of its own, for `CPU` is whichever layout the CPU prefers. It is the mapped file, as
    llama.cpp's own plain memory is; without a second mapping where the file is read."""
    layouts = load_bridge().cpu_layouts()
    names = {layout: PLAIN_BUFT if layout == PLAIN_LAYOUT else layout for layout in layouts}
    asked = dict(zip(layouts, range(len(layouts)), strict=True))  # the layer whose FFN has it
    overrides = ";".join(
        rf"blk\.{layer}\.ffn_(gate|up|down)\.weight={names[layout]}" for layout, layer in asked.items()
    )
    for mode, buffer in (("auto", "CPU_Mapped"), ("none", "CPU")):
        command = [program("llama-bench"), "-m", str(MODEL), "-p", "8", "-n", "1", "-r", "1", "-ngl", "0", "-v"]
        settings = environment(GGML_BACKEND_PATH=str(find_plugin()))
        done = subprocess.run([*command, "-lm", mode, "-ot", overrides], capture_output=True, text=True, timeout=120,
                              env=settings)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found = re.findall(r"tensor blk\.(\d+)\.ffn_(?:gate|up|down)\.weight .* overridden to (\S+)", done.stderr)
        assert set(found) == {(str(layer), names[layout]) for layout, layer in asked.items()}
        held = set(re.findall(r"(\S+) model buffer size =", done.stderr))
        assert held == {buffer, *layouts} - ({PLAIN_LAYOUT} if mode == "auto" else set())


def test_a_device_that_is_not_there_fails_the_load_in_one_sentence(plan_file: Path) -> None:
    settings = environment(GGML_BACKEND_PATH=str(find_plugin()), OALLAMA_PLAN=str(plan_file.with_suffix(".oallama")))
    command = [program("llama-bench"), "-m", str(MODEL), "-p", "8", "-n", "0", "-ngl", "0", "-v"]
    command += ["-ot", r"ffn_(up|gate|down)\.weight=OALLAMA_Split"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings)
    assert done.returncode == 1
    assert "device RPC0 is not here" in done.stderr
