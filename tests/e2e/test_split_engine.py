"""The engine with plans that split operators: memory as it says, statistics, several at once, nothing leaked."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import (
    EXACT_NMSE,
    TOKENS,
    attention,
    engine_of,
    nmse,
    stock_logits,
)
from e2e.placed import Where, placed, with_ledger
from e2e.split_cases import ffn, split_case
from e2e.what_is_held import ONE_ARENA, nothing_grew
from gguf_factory import write_gguf, write_llama_shape
from processes import here

from oallama.core.types import SPLIT_LAYOUT
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge

pytestmark = pytest.mark.usefixtures("prober")

DEVICES = ("cpu-pair", "rpc-worker")
N_UBATCH = 64  # of placed()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test frees what it loaded, on the host and on the device. What was lost with its device stays."""
    before = load_bridge().split().memory()
    yield
    gc.collect()
    if "lost" not in request.node.name:
        assert load_bridge().split().memory() == before


#
# what it computes and holds
#


@pytest.mark.parametrize("device", DEVICES)
def test_its_memory_is_what_the_plan_says(device: str, q4_0: Path) -> None:
    case = split_case(q4_0, device, ffn(0.5))
    slices = sum(round(p.gg * o.bytes) for p, o in zip(case.plan.operators, case.operators, strict=True))
    with engine_of(case) as engine:
        memory, held = engine.memory, load_bridge().split().memory()
        assert memory.planned_device_bytes == slices > 0
        there = [buffer for buffer in memory.buffers if not buffer.in_host_memory]
        assert [(b.buft, b.model, b.context, b.compute) for b in there] == [
            (SPLIT_LAYOUT, slices, 0, held.device_compute)
        ]
        assert memory.device_bytes == slices + held.device_compute > slices
        assert held.device_weights == slices
        assert held.host_weights + slices == sum(o.bytes for o in case.operators if is_ffn(o))
        assert sum(b.model for b in memory.buffers) == sum(b.model for b in case.probed.buffers)
        assert sum(b.context for b in memory.buffers) == case.probed.on_host("context")
        of_llama = sum(b.compute for b in memory.buffers if b.buft != SPLIT_LAYOUT)
        activations = 2 * 4 * N_UBATCH * case.model.n_embd  # what a block takes and gives cannot share memory
        assert case.probed.on_host("compute") <= of_llama <= case.probed.on_host("compute") + activations
        engine.logits(TOKENS)
        assert load_bridge().split().memory().device_compute == held.device_compute, "nothing comes with computing"
        assert load_bridge().split().memory().host_compute == held.host_compute


def test_staging_of_the_plan_is_an_upper_bound(f16: Path) -> None:
    case = split_case(f16, "cpu-pair", ffn(0.5))
    staging, weights = 64 << 20, case.plan.memory.weights_gpu
    with engine_of(replace(case, plan=with_ledger(case.plan, staging=staging))) as engine:
        assert engine.warnings == ()
        assert engine.memory.device_bytes < engine.memory.planned_device_bytes == weights + staging
    more = with_ledger(case.plan, staging=staging, weights_gpu=weights + (2 << 20))
    with engine_of(replace(case, plan=more)) as engine:
        assert len(engine.warnings) == 1 and "plan again" in engine.warnings[0]


def test_whole_and_split_operators_together(f16: Path) -> None:
    """OATO's operators, norms and KV on the worker by llama.cpp itself, slices of the others there too."""
    case = split_case(f16, "rpc-worker", ffn(0.5), whole=attention)
    slices = sum(round(p.gg * o.bytes) for p, o in zip(case.plan.operators, case.operators, strict=True) if p.gg < 1)
    with engine_of(case) as engine:
        assert nmse(engine.logits(TOKENS), stock_logits(f16, TOKENS, n_ubatch=N_UBATCH)) <= EXACT_NMSE
        assert engine.warnings == ()
        there = [buffer for buffer in engine.memory.buffers if not buffer.in_host_memory]
        of_llama = [buffer for buffer in there if buffer.buft != SPLIT_LAYOUT]
        for part in ("model", "context", "compute"):
            real = sum(getattr(buffer, part) for buffer in of_llama)
            assert real == case.probed.on_device(part) > 0, part  # type: ignore[arg-type]
        assert sum(buffer.model for buffer in there) == case.probed.on_device("model") + slices


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [None, attention])
def test_a_context_of_thousands_of_tokens(whole: Where | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", weight_type="F16", n_ctx=8192)
    tokens = [1 + i * 37 % 300 for i in range(5000)]
    with engine_of(split_case(path, "rpc-worker", ffn(0.5), whole=whole, n_ctx=6144)) as engine:
        assert engine.warnings == ()
        found = engine.logits(tokens)
    assert nmse(found, stock_logits(path, tokens, n_ctx=6144, n_ubatch=N_UBATCH)) <= EXACT_NMSE


def test_cpu_slices_lie_in_the_named_layout_or_the_best(q4_0: Path) -> None:
    layouts = load_bridge().cpu_layouts()
    for named in (None, *layouts):
        with engine_of(split_case(q4_0, "cpu-pair", ffn(0.5), layout=named)) as engine:
            assert engine.warnings == ()
            assert engine._split is not None
            found = {slice.layout for slice in engine._split.plan.slices()}
            assert found == {named or layouts[0]}


def test_a_layout_this_cpu_lacks_is_said_and_replaced(q4_0: Path) -> None:
    with engine_of(split_case(q4_0, "cpu-pair", ffn(0.5), layout="CPU_NEXT_YEAR")) as engine:
        assert len(engine.warnings) == 1 and "CPU_NEXT_YEAR" in engine.warnings[0]
        split = [placement for placement in engine.plan.operators if 0 < placement.gg < 1]
        assert {placement.layout for placement in split} == {load_bridge().cpu_layouts()[0]}


def test_statistics_are_those_of_the_last_generation(f16: Path) -> None:
    prompt = [1 + i for i in range(100)]  # two micro-batches
    with engine_of(split_case(f16, "cpu-pair", ffn(0.5))) as engine:
        assert engine.split_stats is None
        generation = engine.generate(prompt, max_tokens=9, temperature=1.0)
        first = engine.split_stats
        assert first is not None
        n_layer = engine.model.n_layer
        assert (first.prompt.n_graphs, first.n_decoded) == (2 * n_layer, generation.n_gen - 1)
        assert first.decode.n_graphs == first.decode.n_phases == n_layer * first.n_decoded
        per_token = first.per_token()
        parts = sum(seconds for name, seconds in per_token.items() if name != "total_s")
        assert 0 < parts <= per_token["total_s"] * 1.001 < generation.tpot_s
        known = [*prompt, *generation.tokens]
        list(engine.stream([*known, 5, 6, 7], max_tokens=3, temperature=1.0, reuse=True))
        assert engine.split_stats is not None and engine.split_stats.prompt.n_graphs == n_layer
        engine.generate(prompt, max_tokens=1)
        assert engine.split_stats is not None and engine.split_stats.n_decoded == 0
        assert engine.split_stats.decode.n_graphs == 0 and engine.split_stats.prompt.n_built == 0


@pytest.mark.parametrize("device", ["cpu-pair", pytest.param("rpc-worker", marks=pytest.mark.thorough)])
def test_run_reports_what_the_split_backend_did(device: str, q4_0: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    split_case(q4_0, device, ffn(0.5)).plan.save(plan)
    done = here("run", "once upon", "--plan", plan, "-n", 6, "--temp", 0, "-t", 1, "--json")
    made = json.loads(done.stdout)
    assert (done.stderr, made["device"]) == ("", "cpu-pair" if device == "cpu-pair" else "RPC0")
    split = made["split"]
    assert split["n_decoded"] == made["n_gen"] - 1 == 5
    assert split["decode"]["n_graphs"] == 2 * 5, "two layers with an FFN each"
    assert split["prompt"]["n_graphs"] == 2
    assert set(split["per_token"]) == {"launch_s", "host_s", "wait_s", "join_s", "total_s"}
    assert split["decode"]["bytes_in"] > 0 and split["decode"]["bytes_out"] > 0
    memory = split["memory"]
    assert memory["device_weights"] == json.loads(plan.read_text(encoding="utf-8"))["memory"]["weights_gpu"] > 0
    assert made["memory"]["device_bytes"] == memory["device_weights"] + memory["device_compute"]
    assert made["memory"]["host_bytes"] > memory["host_weights"] + memory["host_compute"]


def test_the_cpu_alone_knows_nothing_of_statistics(f16: Path) -> None:
    with engine_of(placed(f16)) as engine:
        engine.generate("once", max_tokens=2)
        assert engine.split_stats is None


def test_a_plan_that_splits_nothing_computes_as_stock_where_the_backend_is_loaded(q4_0: Path) -> None:
    load_bridge().split()
    with engine_of(placed(q4_0)) as engine:
        assert np.array_equal(engine.logits(TOKENS), stock_logits(q4_0, TOKENS, n_ubatch=N_UBATCH))


UNLOADED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.placed import placed
from oallama.core.options import Options
from oallama.run.engine import Engine
case = placed(Path(sys.argv[2]), sys.argv[3], lambda op: op.role.startswith("attn"))
with Engine(case.model, case.plan, Options(threads=1), probed=True) as engine:
    engine.generate("once", max_tokens=2)
    print("ggml-oallama" in Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps lists loaded libraries on Linux only")
@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_plan_that_splits_nothing_does_not_load_the_backend(device: str, f16: Path) -> None:
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", UNLOADED, tests, str(f16), device]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "False\n"


@pytest.mark.parametrize("device", ["cpu-pair", pytest.param("rpc-worker", marks=pytest.mark.thorough)])
def test_two_engines_with_two_plans_at_once(device: str, f16: Path, q4_0: Path) -> None:
    cases = [split_case(f16, device, ffn(0.25)), split_case(q4_0, device, ffn(0.75)), split_case(f16, device, ffn(0.5))]
    alone = []
    for case in cases:
        with engine_of(case) as engine:
            alone.append(engine.logits(TOKENS))
    with engine_of(cases[0]) as first, engine_of(cases[1]) as second, engine_of(cases[2]) as third:
        for _ in range(2):
            for engine, wanted in zip((first, second, third), alone, strict=True):
                assert np.array_equal(engine.logits(TOKENS), wanted)
    assert not np.array_equal(alone[0], alone[2]), "the cuts differ, so the comparison says something"


#
# leaks
#


LEAK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.split_cases import ffn, split_case
from e2e.what_is_held import say_held
from oallama.device.load_params import load_bridge
from oallama.core.options import Options
from oallama.run.engine import Engine
case = split_case(Path(sys.argv[2]), sys.argv[3], ffn(0.5))
n = int(sys.argv[4])
for round in range(n):
    with Engine(case.model, case.plan, Options(threads=1), probed=True) as engine:
        engine.generate("once", max_tokens=2, temperature=0)
        held = load_bridge().split().memory()
        assert held.host_weights and held.device_weights and held.device_compute and held.n_programs, held
    held = load_bridge().split().memory()
    assert not any(getattr(held, name) for name in held.__slots__), held
    if round in (n // 2 - 1, n - 1):
        say_held()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize(
    ("device", "n"), [("cpu-pair", 100), pytest.param("rpc-worker", 24, marks=pytest.mark.thorough)]
)
def test_loading_and_freeing_again_and_again_leaks_nothing(device: str, n: int, q4_0: Path) -> None:
    """A load has 2 MiB of weights and buffers: one of them that stays would show."""
    nothing_grew(LEAK, q4_0, device, n, timeout_s=280)


BATCHES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.split_cases import everything, split_case
from e2e.what_is_held import held_now
from oallama.device.load_params import load_bridge
from oallama.core.options import Options
from oallama.run.engine import Engine
case = split_case(Path(sys.argv[2]), "cpu-pair", everything(0.5))
with Engine(case.model, case.plan, Options(threads=1), probed=True) as engine:
    engine.logits(range(5, 69))
    allocated, n_programs = held_now().allocated, load_bridge().split().memory().n_programs
    for n_tokens in range(1, 64):
        engine.logits(range(5, 5 + n_tokens))
    print(held_now().allocated - allocated, load_bridge().split().memory().n_programs - n_programs)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
def test_batches_of_many_sizes_take_little_memory(q4_0: Path) -> None:
    """A server's batches are of ever new sizes, for each of which the split back end keeps programs."""
    command = [sys.executable, "-c", BATCHES, str(Path(__file__).parents[1]), str(q4_0)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **ONE_ARENA})
    assert run.returncode == 0, run.stderr
    allocated, n_programs = map(int, run.stdout.split())
    assert n_programs >= 63 * 4  # of two blocks in each of two layers at the least
    assert allocated < n_programs * 10_000  # some 70,000 each, where they had room for all that they might need


PEAK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.split_cases import ffn, split_case
from oallama.device.load_params import load_bridge
from oallama.core.options import Options
from oallama.run.engine import Engine
case = split_case(Path(sys.argv[2]), "cpu-pair", ffn(0.5))
load_bridge().split()
import oallama.run.placed_llama
def status(key): return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) << 10
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS:")
with Engine(case.model, case.plan, Options(threads=1), probed=True, progress=False) as engine:
    rest = sum(buffer.context + buffer.compute for buffer in engine.memory.buffers)
    print(status("VmHWM:") - before - rest, max(operator.bytes for operator in case.operators))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory, mapped files included, is Linux's")
@pytest.mark.parametrize("weight_type", ["Q4_0", "F16"])
def test_peak_memory_at_load_is_the_file_and_one_tensor(weight_type: str, tmp_path: Path) -> None:
    """Host and device slices together are the file, here in one process; weights are not mapped beside that."""
    path = write_llama_shape(tmp_path / "model.gguf", 12, 1024, 4096, 8, 2, 300, weight_type)
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parents[1]), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    peak, tensor = map(int, done.stdout.split())
    assert peak <= 1.05 * path.stat().st_size + tensor
