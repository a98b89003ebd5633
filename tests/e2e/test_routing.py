"""Recorded and drawn routing: what scripts/routing reads from a run, and the emulated device following a file.

The device is read back with the same recorder: a run with `routing=FILE` must give the file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e.test_emulated import needs_a_core
from gguf_factory import write_gguf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from make_model import write_shape
from model_shapes import llama
from routing.drawn import RoutingDraw, draw, zipf_shares
from routing.table import Row, layer_use, read_routing, write_routing

ROOT = Path(__file__).resolve().parents[2]
MOE = ROOT / "models" / "oallama-stories-moe-q4_0.gguf"
N_LAYER, N_EXPERT, N_USED = 3, 8, 2
TIMED = "emulated:scale=1,vram=1GiB,values=drawn"
REAL = "emulated:scale=1,vram=1GiB,values=real"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return write_gguf(path, "llama-moe", n_layer=N_LAYER, n_expert_used=N_USED)


def recorded(model: Path, folder: Path, device: str, *options: str) -> dict[int, list[Row]]:
    """What the script records of a short run: two prompts and six tokens behind each."""
    prompts, out = folder / "prompts.txt", folder / "out.txt"
    prompts.write_text("once upon a time there was\nthe end\n")
    command = [sys.executable, ROOT / "scripts" / "routing", "record", model, "--prompts", prompts, "-o", out]
    done = subprocess.run(
        [*map(str, command), "--device", device, "-n", "6", "--temp", "0", *options],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_routing(out)


@needs_a_core
def test_the_emulated_device_follows_a_file_and_begins_again_behind_its_end(model: Path, tmp_path: Path) -> None:
    """Each layer's tokens in their order, over several graphs; rows of 7 end in the middle of a prompt."""
    path = tmp_path / "routing.txt"
    routing = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 0.5), N_USED, 7))
    write_routing(path, routing, "three layers")
    found = recorded(model, tmp_path, f"{TIMED},routing={path}")
    assert sorted(found) == list(range(N_LAYER))
    for layer, rows in found.items():
        assert len(rows) > 14, "it went through the file more than twice"
        assert rows == [routing[layer][i % 7] for i in range(len(rows))]


@needs_a_core
def test_routers_on_the_host_follow_the_file_where_an_expert_reads_its_feature(tmp_path: Path) -> None:
    """As in make_model's models. Layer 1's attention is on the host too: nothing is sent, noise decides."""
    path, model = tmp_path / "routing.txt", tmp_path / "made.gguf"
    write_shape(model, llama(3, 256, 512, 4, 4, 300, n_expert=N_EXPERT, n_expert_used=N_USED))
    routing = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 0.5), N_USED, 7))
    write_routing(path, routing, "three layers")
    host = ("--on-cpu", r"ffn_gate_inp", "--on-cpu", r"ffn_.*_exps", "--on-cpu", r"blk\.1\.")
    found = recorded(model, tmp_path, f"{TIMED},routing={path}", *host)
    for layer, rows in found.items():
        assert len(rows) > 14
        assert (rows == [routing[layer][i % 7] for i in range(len(rows))]) == (layer != 1)


@needs_a_core
def test_what_a_file_does_not_say_is_drawn_distinct(model: Path, tmp_path: Path) -> None:
    """Layer 0: one expert of two, and one that the model lacks; layer 1: more than are used; layer 2: nothing."""
    path = tmp_path / "routing.txt"
    path.write_text("# remark\n0 5 99\n1 7 3 1\n")
    found = recorded(model, tmp_path, f"{TIMED},routing={path}")
    assert {row[0] for row in found[0]} == {5} and len({row[1] for row in found[0]}) > 1
    assert set(found[1]) == {(7, 3)}
    assert all(len(set(row)) == N_USED and max(row) < N_EXPERT for rows in found.values() for row in rows)
    assert len(set(found[2])) > 3


def test_a_recording_is_of_the_model_and_not_of_where_it_runs(model: Path, tmp_path: Path) -> None:
    on_cpu, on_device = (recorded(model, tmp_path, device) for device in ("none", REAL))
    assert on_cpu == on_device
    parts = [recorded(model, tmp_path, "none", "--phase", phase) for phase in ("prompt", "decode")]
    for layer, rows in on_cpu.items():
        assert len(rows) == sum(len(part[layer]) for part in parts)
        assert len(parts[1][layer]) <= 12


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense, out = ROOT / "models" / "oallama-stories-q4_0.gguf", tmp_path / "out.txt"
    command = [sys.executable, ROOT / "scripts" / "routing", "record", dense, "--n-prompts", "1", "-n", "2", "-o", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 2 and "has no experts" in done.stderr and not out.exists()


def test_the_shipped_model_routes_as_a_trained_one(tmp_path: Path) -> None:
    """Every expert is used, some far more than others, and a token keeps more of them than chance would."""
    out = tmp_path / "ids.txt"
    command = [sys.executable, ROOT / "scripts" / "routing", "record", MOE, "--n-prompts", "6", "-n", "120", "-o", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for rows in read_routing(out).values():
        use = layer_use(rows, 16)
        assert len({expert for row in rows for expert in row}) == 16
        assert 0.7 < use.entropy < 0.995
