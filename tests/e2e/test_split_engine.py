"""The engine with plans that split operators: memory as it says, statistics, several at once, nothing leaked."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e.forced import N_UBATCH, Where, attention, ffn, forced
from e2e.logits import TOKENS, assert_stock, placed_logits, stock_logits
from e2e.script import said
from gguf_factory import write_gguf, write_llama_shape
from processes import here

from oallama.core.types import SPLIT_LAYOUT
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge

pytestmark = pytest.mark.usefixtures("prober")

of_glibc = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted on Linux only")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Every test frees what it loaded, on the host and on the device."""
    before = load_bridge().split().memory()
    yield
    gc.collect()
    assert load_bridge().split().memory() == before


@pytest.mark.parametrize("device", ["cpu-pair", "rpc-worker"])
def test_its_memory_is_what_the_plan_says(device: str, q4_0: Path) -> None:
    case = forced(q4_0, device, ffn(0.5))
    operators, memory = case.placer.operators, case.plan.memory
    slices = sum(round(p.gg * o.bytes) for p, o in zip(case.plan.operators, operators, strict=True))
    weights, context, compute = case.placer.dry_loads.on_host(case.plan.workload, case.placer.attention)
    with case.llama() as llama:
        found, held = llama.memory, load_bridge().split().memory()
        assert found.planned_device_bytes == slices > 0
        there = [buffer for buffer in found.buffers if not buffer.in_host_memory]
        assert [(b.buft, b.model, b.context, b.compute) for b in there] == [
            (SPLIT_LAYOUT, slices, 0, held.device_compute)
        ]
        assert found.device_bytes == slices + held.device_compute > slices
        assert held.device_weights == slices
        assert held.host_weights + slices == sum(o.bytes for o in operators if is_ffn(o))
        assert sum(b.model for b in found.buffers) == weights == memory.weights_gpu + memory.weights_host
        assert sum(b.context for b in found.buffers) == context
        of_llama = sum(b.compute for b in found.buffers if b.buft != SPLIT_LAYOUT)
        activations = 2 * 4 * N_UBATCH * case.placer.model.n_embd  # what a block takes and gives cannot share memory
        assert compute <= of_llama <= compute + activations
        placed_logits(llama, TOKENS)
        assert load_bridge().split().memory().device_compute == held.device_compute, "nothing comes with computing"
        assert load_bridge().split().memory().host_compute == held.host_compute


def test_staging_of_the_plan_is_an_upper_bound(f16: Path) -> None:
    case = forced(f16, "cpu-pair", ffn(0.5))
    staging, weights = 64 << 20, case.plan.memory.weights_gpu
    with case.with_ledger(staging=staging).engine() as engine:
        assert engine.warnings == ()
        assert engine.memory.device_bytes < engine.memory.planned_device_bytes == weights + staging
    with case.with_ledger(staging=staging, weights_gpu=weights + (2 << 20)).engine() as engine:
        assert len(engine.warnings) == 1 and "plan again" in engine.warnings[0]


def test_whole_and_split_operators_together(f16: Path) -> None:
    """OATO's operators, norms and KV on the worker by llama.cpp itself, slices of the others there too."""
    case = forced(f16, "rpc-worker", ffn(0.5), whole=attention)
    with case.llama() as llama:
        assert_stock(placed_logits(llama, TOKENS), f16, TOKENS)
        assert llama.warnings == ()
        there = [buffer for buffer in llama.memory.buffers if not buffer.in_host_memory]
        of_llama = [buffer for buffer in there if buffer.buft != SPLIT_LAYOUT]
    assert sum(buffer.model for buffer in there) == case.plan.memory.weights_gpu
    assert sum(buffer.context for buffer in of_llama) == case.plan.memory.kv > 0
    assert sum(buffer.compute for buffer in of_llama) == case.plan.memory.compute > 0


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [None, attention])
def test_a_context_of_thousands_of_tokens(whole: Where | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", weight_type="F16", n_ctx=8192)
    tokens = [1 + i * 37 % 300 for i in range(5000)]
    with forced(path, "rpc-worker", ffn(0.5), whole=whole, n_ctx=6144).llama() as llama:
        assert llama.warnings == ()
        assert_stock(placed_logits(llama, tokens), path, tokens, n_ctx=6144)


def test_cpu_slices_lie_in_the_named_layout_or_the_best(q4_0: Path) -> None:
    """One that this CPU lacks is said, and replaced."""
    layouts = load_bridge().cpu_layouts()
    for named in (None, "CPU_NEXT_YEAR", *layouts):
        with forced(q4_0, "cpu-pair", ffn(0.5), layout=named).engine() as engine:
            assert [named in warning for warning in engine.warnings] == [True] * (named == "CPU_NEXT_YEAR")
            assert {slice.layout for slice in engine._split.plan.slices()} == {
                named if named in layouts else layouts[0]
            }


def test_statistics_are_those_of_the_last_generation(f16: Path) -> None:
    prompt = [1 + i for i in range(100)]  # two micro-batches
    with forced(f16, "cpu-pair", ffn(0.5)).engine() as engine:
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


def test_run_reports_what_the_split_backend_did(q4_0: Path, tmp_path: Path) -> None:
    case, plan = forced(q4_0, "rpc-worker", ffn(0.5)), tmp_path / "plan.json"
    case.plan.save(plan)
    done = here("run", "once upon", "--plan", plan, "-n", 6, "--temp", 0, "-t", 1, "--json")
    made = json.loads(done.stdout)
    assert done.stderr == "" and made["device"].startswith("RPC")
    split = made["split"]
    assert split["n_decoded"] == made["n_gen"] - 1 == 5
    assert split["decode"]["n_graphs"] == 2 * 5, "two layers with an FFN each"
    assert split["prompt"]["n_graphs"] == 2
    assert set(split["per_token"]) == {"launch_s", "host_s", "wait_s", "join_s", "total_s"}
    assert split["decode"]["bytes_in"] > 0 and split["decode"]["bytes_out"] > 0
    memory = split["memory"]
    assert memory["device_weights"] == case.plan.memory.weights_gpu > 0
    assert made["memory"]["device_bytes"] == memory["device_weights"] + memory["device_compute"]
    assert made["memory"]["host_bytes"] > memory["host_weights"] + memory["host_compute"]


def test_a_plan_that_splits_nothing_computes_as_stock_where_the_backend_is_loaded(q4_0: Path) -> None:
    load_bridge().split()
    with forced(q4_0).engine() as engine:
        assert np.array_equal(engine.logits(TOKENS), stock_logits(q4_0, TOKENS))
        engine.generate("once", max_tokens=2)
        assert engine.split_stats is None


UNLOADED = """
with forced(model, device, whole=attention if device != "none" else None).engine() as engine:
    engine.generate("once", max_tokens=2)
    print(int("ggml-oallama" in Path("/proc/self/maps").read_text()))
"""


@of_glibc
@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_plan_that_splits_nothing_does_not_load_the_backend(device: str, f16: Path) -> None:
    assert said(UNLOADED, f16, device) == [[0]]


def test_engines_with_several_plans_at_once(f16: Path, q4_0: Path) -> None:
    cases = [forced(path, "cpu-pair", ffn(gg)) for path, gg in ((f16, 0.25), (q4_0, 0.75), (f16, 0.5))]
    alone = []
    for case in cases:
        with case.llama() as llama:
            alone.append(placed_logits(llama, TOKENS))
    with cases[0].engine() as first, cases[1].engine() as second, cases[2].engine() as third:
        for _ in range(2):
            for engine, wanted in zip((first, second, third), alone, strict=True):
                assert np.array_equal(engine.logits(TOKENS), wanted)
    assert not np.array_equal(alone[0], alone[2]), "the cuts differ, so the comparison says something"


#
# what a process holds
#

LEAK = """
n = int(words[0])
case = forced(model, device, ffn(0.5))
for round in range(n):
    with case.engine() as engine:
        engine.generate("once", max_tokens=2, temperature=0)
        held = load_bridge().split().memory()
        assert held.host_weights and held.device_weights and held.device_compute and held.n_programs, held
    held = load_bridge().split().memory()
    assert not any(getattr(held, name) for name in held.__slots__), held
    if round in (n // 2 - 1, n - 1):
        print(*held_now())
"""


@of_glibc
@pytest.mark.parametrize(
    ("device", "n"), [("cpu-pair", 100), pytest.param("rpc-worker", 24, marks=pytest.mark.thorough)]
)
def test_loading_and_freeing_again_and_again_leaks_nothing(device: str, n: int, q4_0: Path) -> None:
    """A load has 2 MiB of weights and buffers: one of them that stays would show."""
    before, after = said(LEAK, q4_0, device, n)
    allocated, anonymous, mapped_models, descriptors, threads, children = after
    assert allocated - before[0] < 1 << 20
    assert anonymous - before[1] < 2 << 20
    assert (mapped_models, descriptors, threads, children) == (0, before[3], 1, 0)


BATCHES = """
from e2e.logits import placed_logits
with forced(model, device, everything(0.5)).llama() as llama:
    placed_logits(llama, range(5, 69))
    allocated, n_programs = held_now()[0], load_bridge().split().memory().n_programs
    for n_tokens in range(1, 64):
        placed_logits(llama, range(5, 5 + n_tokens))
    print(held_now()[0] - allocated, load_bridge().split().memory().n_programs - n_programs)
"""


@of_glibc
def test_batches_of_many_sizes_take_little_memory(q4_0: Path) -> None:
    """A server's batches are of ever new sizes, for each of which the split back end keeps programs."""
    ((allocated, n_programs),) = said(BATCHES, q4_0, "cpu-pair")
    assert n_programs >= 63 * 4  # of two blocks in each of two layers at the least
    assert allocated < n_programs * 10_000  # some 70,000 each, where they had room for all that they might need


PEAK = """
case = forced(model, device, ffn(0.5))
load_bridge().split()
import oallama.run.placed_llama
def status(key): return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) << 10
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS:")
with case.engine() as engine:
    rest = sum(buffer.context + buffer.compute for buffer in engine.memory.buffers)
    print(status("VmHWM:") - before - rest, max(operator.bytes for operator in case.placer.operators))
"""


@of_glibc
@pytest.mark.parametrize("weight_type", ["Q4_0", "F16"])
def test_peak_memory_at_load_is_the_file_and_one_tensor(weight_type: str, tmp_path: Path) -> None:
    """Host and device slices together are the file, here in one process; weights are not mapped beside that."""
    path = write_llama_shape(tmp_path / "model.gguf", 12, 1024, 4096, 8, 2, 300, weight_type)
    ((peak, tensor),) = said(PEAK, path, "cpu-pair")
    assert peak <= 1.05 * path.stat().st_size + tensor
