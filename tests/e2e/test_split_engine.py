"""Models loaded with plans that split operators: memory as it says, statistics, several at once, nothing leaked."""

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
from oallama.run.plugin_report import PluginReport

pytestmark = pytest.mark.usefixtures("no_alloc_loader", "kept_engines")

of_glibc = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted on Linux only")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Every test frees what it loaded, on the host and on the device."""
    before = load_bridge().split().memory()
    yield
    gc.collect()
    assert load_bridge().split().memory() == before


def test_its_memory_is_what_the_plan_says(q4_0: Path) -> None:
    case = forced(q4_0, "rpc-worker", ffn(0.5))
    operators, memory = case.placer.operators, case.plan.memory
    slices = sum(round(p.gg * o.bytes) for p, o in zip(case.plan.operators, operators, strict=True))
    weights, context, compute = case.placer.no_alloc_loads.on_host(case.plan.workload, case.placer.attention)
    with case.llama() as llama:
        found, held = llama.memory, load_bridge().split().memory()
        assert found.planned_device_bytes == slices > 0
        there = [buffer for buffer in llama.buffers if not buffer.in_host_memory]
        assert [(b.buft, b.model, b.context, b.compute) for b in there] == [
            (SPLIT_LAYOUT, slices, 0, held.device_compute)
        ]
        assert found.device_bytes == slices + held.device_compute > slices
        assert held.device_weights == slices
        assert held.host_weights + slices == sum(o.bytes for o in operators if is_ffn(o))
        assert sum(b.model for b in llama.buffers) == weights == memory.weights_gpu + memory.weights_host
        assert sum(b.context for b in llama.buffers) == context
        of_llama = sum(b.compute for b in llama.buffers if b.buft != SPLIT_LAYOUT)
        activations = 2 * 4 * N_UBATCH * case.placer.model.n_embd  # what a block takes and gives cannot share memory
        assert compute <= of_llama <= compute + activations
        placed_logits(llama, TOKENS)
        assert load_bridge().split().memory().device_compute == held.device_compute, "nothing comes with computing"
        assert load_bridge().split().memory().host_compute == held.host_compute


def test_staging_of_the_plan_is_an_upper_bound(f16: Path) -> None:
    case = forced(f16, "cpu-pair", ffn(0.5))
    staging, weights = 64 << 20, case.plan.memory.weights_gpu
    with case.with_breakdown(staging=staging).llama() as llama:
        assert llama.warnings == ()
        assert llama.memory.device_bytes < llama.memory.planned_device_bytes == weights + staging
    with case.with_breakdown(staging=staging, weights_gpu=weights + (2 << 20)).llama() as llama:
        assert len(llama.warnings) == 1 and "plan again" in llama.warnings[0]


def test_whole_and_split_operators_together(f16: Path) -> None:
    """OATO's operators, norms and KV on the worker by llama.cpp itself, slices of the others there too."""
    case = forced(f16, "rpc-worker", ffn(0.5), whole=attention)
    with case.llama() as llama:
        assert_stock(placed_logits(llama, TOKENS), f16, TOKENS)
        assert llama.warnings == ()
        there = [buffer for buffer in llama.buffers if not buffer.in_host_memory]
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
        with forced(q4_0, "cpu-pair", ffn(0.5), layout=named).llama() as llama:
            assert [named in warning for warning in llama.warnings] == [True] * (named == "CPU_NEXT_YEAR")
            assert llama.split is not None
            assert {slice.layout for slice in llama.split.plan.slices()} == {named if named in layouts else layouts[0]}


def test_counts_are_those_since_the_load(f16: Path) -> None:
    """A prompt's last layer computes its last token alone, which counts with tokens one by one."""
    prompt = [1 + i for i in range(100)]  # two micro-batches
    with forced(f16, "rpc-worker:1", ffn(0.5), layout="CPU_NEXT_YEAR").engine() as engine:
        assert [("CPU_NEXT_YEAR" in warning) for warning in engine.warnings] == [True]
        layouts = {placement.layout for placement in engine.plan.operators if 0 < placement.gg < 1}
        assert layouts <= set(load_bridge().cpu_layouts())
        n_layer, reports = engine.model.n_layer, [engine.split_report()]

        def counted() -> PluginReport:
            """The counts since the last call."""
            reports.append(engine.split_report())
            before, after = reports[-2:]
            assert before is not None and after is not None
            return after.since(before)

        assert counted().stats.n_graphs == 0
        answer = engine.generate(prompt, max_tokens=9, temperature=1.0)
        n_decoded, first = len(answer.tokens) - (answer.end == "limit"), counted()
        assert first.stats.n_graphs - first.single.n_graphs == 2 * n_layer - 1
        assert first.single.n_graphs == first.single.n_segments == n_layer * n_decoded + 1
        parts_s = first.single.launch_s + first.single.host_s + first.single.wait_s + first.single.join_s
        assert 0 < parts_s <= first.single.total_s * 1.001
        assert first.stats.total_s < answer.ttft_s + n_decoded * answer.tpot_s
        known = [*prompt, *answer.tokens]
        list(engine.stream([*known, 5, 6, 7], max_tokens=3, temperature=1.0, reuse=True))
        again = counted()
        assert again.stats.n_graphs - again.single.n_graphs == n_layer - 1
        engine.generate(prompt, max_tokens=1)
        last = counted()
        assert last.single.n_graphs == 1 and last.stats.n_built == last.single.n_built
        assert (last.memory.device_weights, last.memory.host_weights > 0, last.memory.device_compute > 0) == (
            engine.plan.memory.weights_gpu, True, True
        )  # fmt: skip


def test_run_reports_what_the_split_backend_did(q4_0: Path, tmp_path: Path) -> None:
    case, plan = forced(q4_0, "rpc-worker", ffn(0.5)), tmp_path / "plan.json"
    case.plan.save(plan)
    done = here("run", "once upon", "--plan", plan, "--device", "rpc-worker", "-n", 6, "--temp", 0, "-t", 1, "--json")
    made = json.loads(done.stdout)
    assert done.stderr == "" and made["device"].startswith("RPC")
    split = made["split"]
    assert split["n_decoded"] == made["n_gen"] - 1 == 5
    assert split["decode"]["n_graphs"] == 2 * 5 + 1, "two layers with an FFN each, and the prompt's last token in one"
    assert split["prompt"]["n_graphs"] == 1
    assert set(split["per_token"]) == {"launch_s", "host_s", "wait_s", "join_s", "total_s"}
    assert split["decode"]["bytes_in"] > 0 and split["decode"]["bytes_out"] > 0
    memory = split["memory"]
    assert memory["device_weights"] == case.plan.memory.weights_gpu > 0
    assert made["memory"]["device_bytes"] == memory["device_weights"] + memory["device_compute"]
    assert made["memory"]["host_bytes"] > memory["host_weights"] + memory["host_compute"]


def test_a_plan_that_splits_nothing_computes_as_stock_where_the_backend_is_loaded(q4_0: Path) -> None:
    load_bridge().split()
    with forced(q4_0).llama() as llama:
        assert np.array_equal(placed_logits(llama, TOKENS), stock_logits(q4_0, TOKENS))
        assert llama.split is None


UNLOADED = """
from e2e.logits import placed_logits
with forced(model, device, whole=attention if device != "none" else None).llama() as llama:
    placed_logits(llama, [5, 6, 7])
    print(int("ggml-oallama" in Path("/proc/self/maps").read_text()))
"""


@of_glibc
@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_plan_that_splits_nothing_does_not_load_the_backend(device: str, f16: Path) -> None:
    assert said(UNLOADED, f16, device) == [[0]]


def test_several_plans_at_once(f16: Path, q4_0: Path) -> None:
    each = ((f16, 0.25), (q4_0, 0.75), (f16, 0.5))
    cases = [forced(path, f"rpc-worker:{n}", ffn(gg)) for n, (path, gg) in enumerate(each, 1)]
    alone = []
    for case in cases:
        with case.llama() as llama:
            alone.append(placed_logits(llama, TOKENS))
    with cases[0].llama() as first, cases[1].llama() as second, cases[2].llama() as third:
        for _ in range(2):
            for llama, wanted in zip((first, second, third), alone, strict=True):
                assert np.array_equal(placed_logits(llama, TOKENS), wanted)
    assert not np.array_equal(alone[0], alone[2]), "the cuts differ, so the comparison says something"


#
# what a process holds
#

LEAK = """
from e2e.logits import placed_logits
n = int(words[0])
case = forced(model, device, ffn(0.5))
for round in range(n):
    with case.llama() as llama:
        placed_logits(llama, [5, 6, 7])
        llama.eval([8])
        held = load_bridge().split().memory()
        assert held.host_weights and held.device_weights and held.device_compute and held.n_programs, held
    held = load_bridge().split().memory()
    assert not any(getattr(held, name) for name in held.__slots__), held
    if round in (n // 2 - 1, n - 1):
        print(*held_now())
"""


@of_glibc
@pytest.mark.parametrize(
    ("device", "n"), [("cpu-pair", 24), pytest.param("rpc-worker", 24, marks=pytest.mark.thorough)]
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
with case.llama(logits_all=False) as llama:
    rest = sum(buffer.context + buffer.compute for buffer in llama.buffers)
    print(status("VmHWM:") - before - rest, max(operator.bytes for operator in case.placer.operators))
"""


@of_glibc
@pytest.mark.parametrize("weight_type", ["Q4_0", "F16"])
def test_peak_memory_at_load_is_the_file_and_one_tensor(weight_type: str, tmp_path: Path) -> None:
    """Host and device slices together are the file, here in one process; weights are not mapped beside that."""
    path = write_llama_shape(tmp_path / "model.gguf", 12, 1024, 4096, 8, 2, 300, weight_type)
    ((peak, tensor),) = said(PEAK, path, "cpu-pair")
    assert peak <= 1.05 * path.stat().st_size + tensor
