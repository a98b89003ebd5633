"""AMX's layout: what stock llama.cpp does with it, and that no weight of three dimensions comes into it on any way of
loading. On a CPU with AMX these are AMX's own kernels; elsewhere a layout that stock llama.cpp treats alike."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e.logits import BETWEEN_LAYOUTS, EXACT_NMSE, QUANTISED_NMSE
from e2e.stock import needs_programs
from gguf_factory import write_gguf
from layouts import with_amx
from processes import COMMAND, PATIENCE_S, ROOT, until
from seeds import crossed

import ggml_bridge
from ggml_bridge.child import run_in_child

pytestmark = pytest.mark.timeout(1200)  # building

MATRICES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Types that AMX has kernels for (ggml-cpu/amx/amx.cpp)."""
MODELS, TYPES = ["deepseek2", "deepseek2-fused"], ["F16", "Q4_0"]


@pytest.fixture(scope="module")
def amx() -> dict[str, str]:
    return with_amx()


@pytest.fixture(scope="module")
def ask(amx: dict[str, str]) -> Any:
    """A case of amx_cases, in a process that has the layout."""
    environment = {**amx, "PYTHONPATH": str(ROOT / "tests")}
    return lambda case, **details: run_in_child(
        "e2e.amx_cases", {"case": case, **details}, env=environment, timeout_s=300.0
    )


@pytest.fixture(scope="module")
def run(amx: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command line there, and what it prints."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*words: object, code: int = 0) -> str:
        environment = {**os.environ, **amx, "OALLAMA_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    return run


@functools.cache
def written(folder: Path, arch: str, weight_type: str) -> Path:
    return write_gguf(folder / f"{arch}-{weight_type}.gguf", arch, weight_type=weight_type)


@pytest.fixture(scope="module")
def deepseek(models: Path) -> Path:
    return written(models, "deepseek2", "Q4_0")


def test_the_rule_is_the_shapes(ask: Any) -> None:
    """llama.cpp takes single matrices and several, and only the single ones are right."""
    rules = ask("rules")
    taken = {name for name, (takes, _) in rules.items() if takes}
    for type_name in ("F32", "BF16", "IQ2_XXS", "MXFP4", *MATRICES):
        for kind in ("MUL_MAT", "3-D MUL_MAT", "MUL_MAT_ID"):
            takes, may = rules[f"AMX {type_name} {kind}"]
            assert takes == (type_name in MATRICES and kind != "MUL_MAT_ID"), (type_name, kind)
            assert may == (takes and kind == "MUL_MAT"), (type_name, kind)
    others = {name: rule for name, rule in rules.items() if not name.startswith("AMX ")}
    assert all(takes == may for takes, may in others.values())
    assert "CPU Q4_0 3-D MUL_MAT" in taken


def test_stock_llama_cpp_fails_on_such_a_model(ask: Any, deepseek: Path) -> None:
    """Once it does not, layouts of that ggml may be trusted again (multiplies_right in split/util.h)."""
    with pytest.raises(ggml_bridge.ChildDied):
        ask("stock", path=str(deepseek), no_repack=False)
    ask("stock", path=str(deepseek), no_repack=True)


def check(found: dict[str, Any], weight_type: str, on_device: bool = False) -> None:
    """The logits are stock's, told which weights to keep plain; and with all of them plain as nearly as those are."""
    bound = EXACT_NMSE if weight_type == "F16" else QUANTISED_NMSE
    assert found["plain"] <= max(bound, BETWEEN_LAYOUTS * found["between"])
    if on_device:  # which multiplies as plain memory does
        bound = max(bound, BETWEEN_LAYOUTS * found["between"])
    assert found["told"] <= bound
    assert found["no_repack"] and found["as_planned"]


@pytest.mark.parametrize(("arch", "weight_type"), crossed(MODELS, TYPES))
def test_a_model_on_the_cpu_alone(ask: Any, models: Path, arch: str, weight_type: str) -> None:
    path = str(written(models, arch, weight_type))
    found = ask("engine", path=path, device="none", attention_there=False)
    check(found, weight_type)
    assert found["held"]["AMX"] > 0 and found["held"]["CPU_Mapped"] > 0


@pytest.mark.parametrize(("attention_there", "weight_type"), crossed([False, True], TYPES))
def test_a_placed_model(ask: Any, models: Path, attention_there: bool, weight_type: str) -> None:
    """Attention on the host is where the weights in question are."""
    path = str(written(models, "deepseek2", weight_type))
    found = ask("engine", path=path, device="rpc-worker:1", attention_there=attention_there)
    check(found, weight_type, on_device=True)


def test_what_amx_keeps_beside_weights_is_counted(ask: Any, models: Path) -> None:
    """A sum of each block of 32 of Q8_0, of 34 bytes: by a plan for whole weights, and by a load for slices as well."""
    path = str(written(models, "llama", "Q8_0"))
    sliced = ask("memory", path=path)
    assert abs(sliced["held"] - sliced["planned"] - sliced["slices"] * 4 / 34) <= 1 << 12


@pytest.mark.thorough  # of llama-server test_it_is_served is one, too
def test_a_run(run: Any, deepseek: Path) -> None:
    answer = json.loads(
        run("run", deepseek, "hello", "-n", 4, "--temp", 0, "--device", "none", "--tune", "never", "--json")
    )
    assert 1 <= answer["n_gen"] <= 4


@pytest.fixture(scope="module")
def profiled(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a model's profile there, with few sizes of batches."""

    @functools.cache
    def profiled(path: Path) -> Path:
        file = tmp_path_factory.mktemp("profile") / "profile.json"
        file.write_text(run("profile", path, "--device", "none", "--tokens", "1,8", "--json"), encoding="utf-8")
        return file

    return profiled


def test_a_profile_has_no_time_of_it(profiled: Any, deepseek: Path) -> None:
    profile = json.loads(profiled(deepseek).read_text(encoding="utf-8"))
    matrices = {case["layout"] for case in profile["cases"] if case["op"] == "MUL_MAT" and case["shape"][2] > 1}
    assert matrices == {"CPU"}
    assert {case["layout"] for case in profile["cases"] if case["op"] == "MUL_MAT"} >= {"AMX", "CPU"}
    assert profile["skipped"] == [] and "broken_layouts" not in profile["fingerprint"]


@pytest.mark.parametrize("target", ["llama-server", "llama-bench"])
def test_a_stock_program_is_told_to_leave_weights_plain(
    run: Any, profiled: Any, deepseek: Path, models: Path, target: str
) -> None:
    """By the plug-in's name for plain memory."""
    llama = written(models, "llama", "Q4_0")
    for path, plain in ((deepseek, True), (llama, False)):
        plan = models / f"{path.stem}.json"
        run("plan", path, "--device", "none", "--policy", "cpu", "--profile", profiled(path), "-o", plan)
        line = run("export", plan, "--to", target)
        assert ("=OALLAMA_CPU" in line) == plain, line
        assert ("libggml-oallama" in line) == plain


@needs_programs
@pytest.mark.parametrize("arch", ["deepseek2", pytest.param("lfm2", marks=pytest.mark.thorough)])
def test_it_is_served(amx: dict[str, str], arch: str, models: Path, tmp_path: Path) -> None:
    """So are models whose layers have a state, for several requests at once: inputs have three dimensions then."""
    log = tmp_path / "log"
    command = [
        *COMMAND,
        "serve",
        str(written(models, arch, "Q4_0")),
        "--port",
        "0",
        "--device",
        "none",
        "--tune",
        "never",
    ]
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **amx}) as process,
    ):
        try:
            until(lambda: process.poll() is not None or b"serving at" in log.read_bytes())
            said = re.search(r"serving at (http://\S+)/v1", log.read_text())
            assert said, log.read_text()
            (server,) = psutil.Process(process.pid).children()
            assert any(word.endswith(("=OALLAMA_CPU", "=CPU_REPACK")) for word in server.cmdline())

            def ask(n: int) -> httpx.Response:
                asked = {"prompt": f"{n} " * 40, "max_tokens": 40, "ignore_eos": True}
                return httpx.post(f"{said[1]}/v1/completions", json=asked, timeout=PATIENCE_S)

            with ThreadPoolExecutor(4) as pool:
                assert [answer.status_code for answer in pool.map(ask, range(8))] == [200] * 8
            assert psutil.pid_exists(server.pid)
        finally:
            process.terminate()


@pytest.mark.thorough  # a minute and a half; that they are told to leave weights plain is tested above
def test_stock_arms_run_beside_ours(run: Any, deepseek: Path) -> None:
    arms = "stock-cpu,stock-fit,fit"
    rows = run("bench", deepseek, "--arms", arms, "-p", 8, "-n", 0, "-r", 2, "--device", "rpc-worker:1", "-o", "json")
    assert {row["arm"] for row in json.loads(rows)} == set(arms.split(","))
