"""The engine with plans that split operators: memory as it says, plans corrected, devices lost, nothing leaked."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from e2e.logits import (
    EXACT_NMSE,
    QUANTISED_NMSE,
    TOKENS,
    attention,
    engine_of,
    nmse,
    stock_logits,
)
from e2e.placed import Placed, Where, placed, with_ledger
from e2e.split_cases import ffn, split_case
from e2e.what_is_held import ONE_ARENA, nothing_grew
from gguf_factory import write_gguf, write_llama_shape
from processes import PATIENCE_S

from ggml_bridge.rpc import RpcServer, probe
from oallama.core.errors import DeviceError, PlanError
from oallama.core.types import SPLIT_LAYOUT
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.plan.plan import Plan
from oallama.run.engine import Engine

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


def changed(case: Placed, **fields: object) -> Plan:
    return replace(case.plan, **fields)  # type: ignore[arg-type]


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


def test_two_engines_compute_in_two_threads(f16: Path, q4_0: Path) -> None:
    cases = [split_case(f16, "cpu-pair", ffn(0.25)), split_case(q4_0, "cpu-pair", ffn(0.75))]
    with engine_of(cases[0]) as first, engine_of(cases[1]) as second, ThreadPoolExecutor(2) as threads:
        alone = [engine.logits(TOKENS) for engine in (first, second)]
        jobs = [threads.submit(engine.logits, TOKENS) for engine in (first, second)]
        for job, wanted in zip(jobs, alone, strict=True):
            assert np.array_equal(job.result(timeout=60), wanted)


#
# plans that cannot be
#


def test_fractions_off_the_granularity_are_refused(f16: Path) -> None:
    case = split_case(f16, "cpu-pair", ffn(0.5))
    off = tuple(replace(p, gg=p.gg + 1 / 512, cc=p.cc - 1 / 512) if 0 < p.gg < 1 else p for p in case.plan.operators)
    with pytest.raises(PlanError, match="granularity"):
        Engine(case.model, changed(case, operators=off))


def test_a_whole_operator_in_a_layer_on_the_host_is_refused(f16: Path) -> None:
    case = split_case(f16, "rpc-worker", ffn(0.5), whole=attention)
    with pytest.raises(PlanError, match=r"blk\.0\.attn_q\.weight .* n_gpu_layers = 2"):
        Engine(case.model, changed(case, n_gpu_layers=2))


#
# too little memory
#


def limited(server: RpcServer, room_bytes: int) -> None:
    """Let the server have so many bytes more than it has once the last client's are freed."""
    probe(server.endpoint, PATIENCE_S)  # it answers nobody before
    used = psutil.Process(server.pid).memory_info().data
    resource.prlimit(server.pid, resource.RLIMIT_DATA, (used + room_bytes, resource.RLIM_INFINITY))


@pytest.fixture
def small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placed:
    """10 MiB of slices in small tensors, since a server also needs memory for what it receives."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # the server gives back what it frees
    path = write_llama_shape(tmp_path / "model.gguf", 32, 256, 1024, 4, 2, 300, "Q4_K")
    return split_case(path, "rpc-worker", ffn(0.75))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of another process")
@pytest.mark.parametrize("room_bytes", [9 << 20, 4 << 20])
def test_a_device_with_too_little_memory_gets_less(room_bytes: int, small_blocks: Placed) -> None:
    """The first slices that fit are there; the plan that was loaded is shown, computes, and can be used again."""
    case = replace(small_blocks, plan=with_ledger(small_blocks.plan, staging=1 << 20))  # what slices compute in
    with RpcServer() as server:
        spec = f"rpc://{server.endpoint}"
        with engine_of(case, device=spec) as engine:  # so that the server has all that it needs besides
            wanted = engine.logits(TOKENS)
        limited(server, room_bytes)
        with engine_of(case, device=spec) as engine:
            assert any("has no room" in warning for warning in engine.warnings)
            assert {placement.gg for placement in engine.plan.operators} == {0.0, 0.75}
            there = sum(round(p.gg * o.bytes) for p, o in zip(engine.plan.operators, case.operators, strict=True))
            assert there < case.plan.memory.weights_gpu
            assert there == load_bridge().split().memory().device_weights == engine.plan.memory.weights_gpu
            assert engine.plan.predicted is None and engine.plan.fingerprint != case.plan.fingerprint
            assert nmse(engine.logits(TOKENS), wanted) <= QUANTISED_NMSE
            corrected = engine.plan
    Plan.from_json(corrected.to_json()).check(case.model, case.operators)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of another process")
def test_a_device_without_room_to_compute_in_is_an_error(small_blocks: Placed) -> None:
    case = small_blocks
    with RpcServer() as server:
        spec = f"rpc://{server.endpoint}"
        engine_of(case, device=spec).close()
        limited(server, case.plan.memory.weights_gpu + (256 << 10))
        with pytest.raises(DeviceError, match=r"has no room for what the split operators compute in.*-ub"):
            engine_of(case, device=spec)
        assert load_bridge().split().memory().n_weights == 0


OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import psutil
from e2e.split_cases import ffn, split_case
from oallama.core.errors import DeviceError
from oallama.device.load_params import load_bridge
from oallama.core.options import Options
from oallama.run.engine import Engine
case = split_case(Path(sys.argv[2]), "cpu-pair", ffn(0.125))
def load(): return Engine(case.model, case.plan, Options(threads=1), probed=True, progress=False)
load().close()
before = load_bridge().split().memory()
soft = psutil.Process().memory_info().data + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))
try:
    load()
    print("loaded")
except DeviceError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(load_bridge().split().memory() == before)
with load() as engine:
    print(engine.generate("once", max_tokens=2, temperature=0).n_gen)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts otherwise elsewhere")
def test_a_host_with_too_little_memory_is_an_error_and_all_is_freed(tmp_path: Path) -> None:
    path = write_llama_shape(tmp_path / "model.gguf", 4, 1024, 8192, 8, 2, 300, "Q4_0")
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", OUT_OF_MEMORY, tests, str(path), str(40 << 20)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    first, *rest = done.stdout.splitlines()
    assert "the model cannot be loaded as planned: host memory has no room for" in first, done.stderr
    assert rest == ["True", "2"]


#
# leaks
#


INTERRUPTED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.split_cases import ffn, split_case
from oallama.device.load_params import load_bridge
from oallama.core.options import Options
from oallama.run.engine import Engine
case = split_case(Path(sys.argv[2]), sys.argv[3], ffn(0.5))
split = load_bridge().split()
try:
    print("ready", flush=True)
    while True:
        with Engine(case.model, case.plan, Options(threads=1), probed=True) as engine:
            for piece in engine.stream("once", max_tokens=10**6, temperature=1.5):
                pass
except KeyboardInterrupt:
    assert not any(getattr(split.memory(), name) for name in split.memory().__slots__), split.memory()
    sys.exit(130)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_ends_cleanly_and_frees_all(device: str, f16: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(Path(__file__).parents[1]), str(f16), device]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


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
    allocated, split = held_now().allocated, load_bridge().split().memory()
    for n_tokens in range(1, 64):
        engine.logits(range(5, 5 + n_tokens))
    now = load_bridge().split().memory()
    print(held_now().allocated - allocated, now.program_bytes - split.program_bytes, now.n_programs - split.n_programs)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
def test_batches_of_many_sizes_take_little_memory(q4_0: Path) -> None:
    """A server's batches are of ever new sizes, for each of which the split back end keeps programs."""
    command = [sys.executable, "-c", BATCHES, str(Path(__file__).parents[1]), str(q4_0)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **ONE_ARENA})
    assert run.returncode == 0, run.stderr
    allocated, told, n_programs = map(int, run.stdout.split())
    assert n_programs >= 63 * 4  # of two blocks in each of two layers at the least
    assert allocated < n_programs * 10_000  # some 70,000 each, where they had room for all that they might need
    assert abs(allocated - told) < 0.25 * told


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
