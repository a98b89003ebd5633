"""`--policy scheinfer` from plan to logits: on a local worker process, and with plans that stream whatever pays.

The profile is described, a slow CPU and a fast link, so that streaming a tiny model pays whatever machine the tests run
on, and however busy it is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import TOKENS, engine_of, nmse, stock_logits
from e2e.placed import Placed
from e2e.split_cases import streaming_case
from gguf_factory import write_gguf
from processes import here
from seeds import crossed

from oallama.core.errors import PlanError
from oallama.core.profile import Profile
from oallama.core.types import SPLIT_LAYOUT, StreamSettings
from oallama.cost.blocks import takes_n_g
from oallama.model.cut import cut_extent, cut_granularity
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts
from oallama.profile.store import profile_to_json

pytestmark = pytest.mark.usefixtures("prober")

DEVICES = ("cpu-pair", "rpc-worker", "emulated:vram=2GiB,scale=1,values=real")
WORKER = "rpc-worker:1"
N_UBATCH = 64  # of placed()
EXACT_NMSE, QUANTISED_NMSE = 1e-6, 1e-3  # those of test_split_logits.py


@pytest.fixture(scope="module")
def model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(scope="module")
def planned(model: Path, worker_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command said, and where the plan is. No weight may stay on the device, so that all that helps is
    streaming."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "profile.json").write_text(json.dumps(profile_to_json(worker_profile)), encoding="utf-8")
    common = ("plan", model, "--policy", "scheinfer", "--device", WORKER, "--threads", 1, "-p", 64, "-n", 4)
    limits = ("--vram", "64MiB", "--gpu-weights", "0%", "-ub", 64)
    done = here(*common, *limits, "--profile", folder / "profile.json", "-o", folder / "plan.json")
    assert done.stdout == ""
    return done.stderr, folder / "plan.json"


def test_the_plan_streams_and_says_so(model: Path, planned: tuple[str, Path]) -> None:
    said, path = planned
    plan, placer = Plan.load(path), Placer.load(model, device="none")
    plan.check(placer.model, placer.operators)
    assert plan.policy == "scheinfer"
    streaming = plan.streaming
    assert streaming is not None
    assert streaming.piece_bytes > 0 and streaming.link_bytes_per_s > 0 and streaming.ring_bytes > 0
    assert replace(streaming, piece_bytes=0, link_bytes_per_s=0, ring_bytes=0) == StreamSettings()
    streamed = 0
    for operator, placement in zip(placer.operators, plan.operators, strict=True):
        cc, cg, gg = slice_counts(operator, placement)
        assert gg == 0
        assert cc % cut_granularity(operator) == 0
        streamed += operator.bytes * cg // cut_extent(operator)
    assert streamed > 0
    memory = plan.memory
    assert memory.staging > streamed / placer.model.n_layer
    assert memory.weights_gpu + memory.kv + memory.compute + memory.staging + memory.spare == memory.limit
    assert "no pinned host memory" in said
    assert "streamed" in said


def test_the_plan_runs_as_planned(model: Path, planned: tuple[str, Path]) -> None:
    placer = Placer.load(model, device=WORKER, threads=1)
    plan = Plan.load(planned[1])
    with placer.engine(plan) as engine:
        assert engine.warnings == ()
        assert engine.plan == plan
        assert nmse(engine.logits(TOKENS), stock_logits(model, TOKENS, n_ubatch=64)) <= QUANTISED_NMSE
        assert engine.memory.device_bytes <= engine.memory.planned_device_bytes
        generation = engine.generate([1 + i for i in range(64)], max_tokens=3, temperature=0)
        assert generation.n_gen == 3
        done = engine.split_stats
        assert done is not None and done.prompt.bytes_streamed > 0 and done.decode.bytes_streamed > 0


def test_the_command_runs_it_with_either_way_of_copying(model: Path, planned: tuple[str, Path]) -> None:
    common = ("run", model, "-p", "hello", "-n", "4", "--temp", "0", "--json", "--plan", planned[1])
    made = [json.loads(here(*common, "--device", WORKER, "--prefetch", way).stdout) for way in ("ahead", "layer")]
    assert made[0]["tokens"] == made[1]["tokens"] and made[0]["policy"] == "scheinfer"
    assert all(run["split"]["decode"]["bytes_streamed"] > 0 for run in made)


#
# plans that stream whatever pays
#


def logits_of(case: Placed) -> np.ndarray:
    with engine_of(case, probed=None) as engine:
        assert [w for w in engine.warnings if "plan again" not in w] == [], "the ledger is not theirs"
        assert engine.plan.operators == case.plan.operators
        return engine.logits(TOKENS)


@pytest.mark.parametrize(("n_slots", "device", "prefetch"), crossed([1, 2, 4], DEVICES, ["ahead", "layer"]))
def test_forced_streaming_computes_the_same(device: str, prefetch: str, n_slots: int, f16: Path) -> None:
    settings = StreamSettings(n_slots, prefetch)  # type: ignore[arg-type]
    case = streaming_case(f16, device, lambda operator: (0.25, 0.25), streaming=settings)
    assert nmse(logits_of(case), stock_logits(f16, TOKENS, n_ubatch=N_UBATCH)) <= EXACT_NMSE


@pytest.mark.parametrize(
    ("table", "device", "cut"),
    crossed(
        [((64, 0),), ((1, 0), (64, 1)), ((2, 1), (64, 32)), ((1, 1), (64, 64))],
        DEVICES,
        [(0.25, 0.25), (0.0, 0.0), (0.25, 0.0)],
    ),
)
def test_assigned_tokens_compute_the_same(
    device: str, table: tuple[tuple[int, int], ...], cut: tuple[float, float], f16: Path
) -> None:
    """Also of operators that are all CC, which only n_g gives to the device."""
    case = streaming_case(f16, device, lambda operator: cut, "CPU", token_assignment=table)
    assert nmse(logits_of(case), stock_logits(f16, TOKENS, n_ubatch=N_UBATCH)) <= EXACT_NMSE


@pytest.mark.parametrize("device", DEVICES)
def test_a_repacked_layout_is_kept_twice_for_n_g(device: str, q4_0: Path) -> None:
    twice = StreamSettings(kept_twice=True)
    case = streaming_case(
        q4_0, device, lambda operator: (0.25, 0.0), "CPU_REPACK", token_assignment=((1, 0), (64, 32)), streaming=twice
    )
    once = replace(case, plan=replace(case.plan, streaming=StreamSettings()))
    wanted = stock_logits(q4_0, TOKENS, n_ubatch=N_UBATCH)
    host_bytes = []
    for each in (case, once):
        with engine_of(each, probed=None) as engine:
            assert nmse(engine.logits(TOKENS), wanted) <= QUANTISED_NMSE
            held = [b for b in engine.memory.buffers if b.buft == SPLIT_LAYOUT and b.in_host_memory]
            host_bytes.append(sum(buffer.model for buffer in held))
    cc = sum(round(p.cc * o.bytes) for o, p in zip(case.operators, case.plan.operators, strict=True) if takes_n_g(o))
    assert host_bytes[0] - host_bytes[1] == cc


@pytest.mark.parametrize("device", DEVICES)
def test_experts_are_streamed(device: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "moe.gguf", "qwen3moe", weight_type="F16")
    case = streaming_case(path, device, lambda operator: (0.0, 0.5), token_assignment=((1, 0), (64, 16)))
    assert nmse(logits_of(case), stock_logits(path, TOKENS, n_ubatch=N_UBATCH)) <= EXACT_NMSE


def test_what_streams_needs_a_device(f16: Path) -> None:
    case = streaming_case(f16, "none", lambda operator: (0.0, 0.5))
    with pytest.raises(PlanError, match="needs device"):
        logits_of(case)
