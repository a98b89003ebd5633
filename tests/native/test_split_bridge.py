"""The split backend from Python: plans read and refused, a buffer type for llama.cpp, and memory back to the start.

What it computes is tested in tests/e2e/test_split_*.py with whole models.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from native_helpers import RunHere

import ggml_bridge
from ggml_bridge.library import find_plugin
from ggml_bridge.split import SplitBackend, SplitStats
from oallama.model.gguf_reader import read_gguf

PLAN = """oallama-plan 1
# an FFN
model 0123abcd
device CPU

tensor blk.0.ffn_gate.weight Q4_0 256x512x1 rows 384 0 128 CPU
tensor blk.0.ffn_up.weight Q4_0 256x512x1 rows 384 0 128 CPU
tensor blk.0.ffn_down.weight Q4_K 512x256x1 cols 256 0 256 CPU
tensor blk.1.ffn_up.weight F16 256x1024x1 halves 0 0 512 -
"""


@pytest.fixture(scope="module")
def split(bridge: ggml_bridge.Bridge) -> SplitBackend:
    return bridge.split()


def test_it_is_loaded_once_and_when_asked_for() -> None:
    code = (
        "import ggml_bridge, sys\n"
        "bridge = ggml_bridge.load()\n"
        "print([device.name for device in bridge.devices() if device.backend == 'OALLAMA'])\n"
        "print('ggml-oallama' in open('/proc/self/maps').read() if sys.platform == 'linux' else False)\n"
        "assert bridge.split() is bridge.split()\n"
        "print([device.name for device in bridge.devices() if device.backend == 'OALLAMA'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    named = [f"OALLAMA_{layout}" for layout in ggml_bridge.load().cpu_layouts()]
    residents = ["OALLAMA_Resident", *(f"OALLAMA_Resident{number}" for number in range(1, 6))]
    assert done.stdout.splitlines() == ["[]", "False", str(["OALLAMA", "OALLAMA_Split", *residents, *named])]


def test_its_path_is_the_one_for_stock_binaries(split: SplitBackend) -> None:
    assert split.path == find_plugin() and split.path.is_file()


def test_a_plan_is_read(split: SplitBackend) -> None:
    with split.plan(PLAN) as plan:
        assert plan.problems() == (True, [])
        rows = [(s.name, s.axis, s.loaded, s.cc, s.cg, s.gg, s.layout) for s in plan.slices()]
    assert rows == [
        ("blk.0.ffn_gate.weight", "rows", False, 384, 0, 128, "CPU"),
        ("blk.0.ffn_up.weight", "rows", False, 384, 0, 128, "CPU"),
        ("blk.0.ffn_down.weight", "cols", False, 256, 0, 256, "CPU"),
        ("blk.1.ffn_up.weight", "halves", False, 0, 0, 512, "-"),
    ]


def test_every_plan_has_a_buffer_type_of_its_own(split: SplitBackend) -> None:
    with split.plan(PLAN) as first, split.plan(PLAN) as second:
        assert 0 not in (first.buft, second.buft)
        assert first.buft != second.buft
        assert first.buft == first.buft


def test_a_closed_plan_says_so(split: SplitBackend) -> None:
    plan = split.plan(PLAN)
    plan.close()
    plan.close()
    for ask in (plan.slices, plan.problems, lambda: plan.buft):
        with pytest.raises(ggml_bridge.BridgeError, match="this plan is closed"):
            ask()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("oallama-plan 1", "", "first line must be oallama-plan 1"),
        ("oallama-plan 1", "oallama-plan 2", "first line must be oallama-plan 1"),
        ("device CPU", "device CUDA77", "CUDA77"),
        ("device CPU", "", "names no device"),
        ("device CPU", "device OALLAMA", "split backend itself"),
        ("Q4_K 512x", "Q4_Z 512x", "line 8 .* Q4_Z"),
        ("384 0 128", "384 0 160", "line 6 .* add up"),
        ("384 0 128", "400 0 112", "line 6 .* multiple of 32"),
        ("256 0 256", "128 0 384", "line 8 .* multiple of 256"),
        ("384 0 128", "-1 0 513", "no count"),
        ("512x256x1", "512x256", "not KxNxE"),
        ("rows", "diagonal", "axis diagonal"),
        ("0 0 512 -", "0 0 512 CPU", "line 9"),
        ("0 0 512 -", "0 0 512", "line 9"),
        ("blk.0.ffn_up.weight", "blk.0.ffn_gate.weight", "line 7 .* second time"),
        ("# an FFN", "colour red", "line 2 .* colour"),
        ("# an FFN", "# an \0 FFN", "NUL"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_line(split: SplitBackend, old: str, new: str, message: str) -> None:
    before = split.memory()
    assert old in PLAN
    with pytest.raises(ValueError, match=message) as refused:
        split.plan(PLAN.replace(old, new, 1))
    assert "\n" not in str(refused.value)
    assert split.memory() == before


def test_a_slice_can_be_streamed(split: SplitBackend) -> None:
    with split.plan(PLAN.replace("384 0 128", "256 128 128", 1)) as plan:
        assert (plan.slices()[0].cc, plan.slices()[0].cg, plan.slices()[0].gg) == (256, 128, 128)
    with pytest.raises(ValueError, match="which is no multiple of"):
        split.plan(PLAN.replace("384 0 128", "376 8 128", 1))


def test_nothing_is_held_without_a_model(split: SplitBackend) -> None:
    before = split.memory()  # engines that lost their device keep what they had, in whatever test that was
    for _ in range(100):
        with split.plan(PLAN) as plan:
            plan.slices()
    assert split.memory() == before


def test_statistics_start_at_zero_and_can_be_subtracted(split: SplitBackend) -> None:
    split.reset_stats()
    assert split.stats() == SplitStats()
    later = SplitStats(n_graphs=5, launch_s=0.5, bytes_in=7)
    assert later - SplitStats(n_graphs=2, launch_s=0.25, bytes_in=7) == replace(SplitStats(), n_graphs=3, launch_s=0.25)


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen2moe", "gpt-oss", "deepseek2", "mamba2"])
def test_every_tensor_may_be_in_its_buffers(architecture: str, run_here: RunHere, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture, weight_type="Q4_0")
    request = {"case": "split_everywhere", "path": str(path), "plan": "oallama-plan 1\n", "pattern": "no such tensor"}
    stock = run_here("native_cases", request)
    split = run_here("native_cases", {**request, "pattern": ".*"})
    assert split["status"] == 0 and split["usable"] and split["problems"] == []
    assert split["logits"] == pytest.approx(stock["logits"], rel=1e-3, abs=1e-3)


def test_embeddings_that_cannot_be_read_fail_with_a_sentence(
    bridge: ggml_bridge.Bridge, run_here: RunHere, tmp_path: Path
) -> None:
    if "CPU_REPACK" not in bridge.cpu_layouts():
        pytest.skip("this CPU has no repacked layout")
    path = write_gguf(tmp_path / "tiny.gguf", "llama-tied", weight_type="Q4_0")
    tensor = read_gguf(path).tensor_by_name["token_embd.weight"]
    k, n = tensor.shape[:2]
    line = f"tensor token_embd.weight Q4_0 {k}x{n}x1 rows {n} 0 0 CPU_REPACK\n"
    request = {"case": "split_everywhere", "path": str(path), "plan": "oallama-plan 1\n" + line, "pattern": ".*"}
    done = run_here("native_cases", request)
    assert done["status"] != 0 and not done["usable"]
    assert done["problems"] == ["token_embd.weight is kept in the layout CPU_REPACK, which cannot be read back"]
