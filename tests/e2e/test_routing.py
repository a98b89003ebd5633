"""The emulated device following a file of routing, read back from its run: `routing=FILE` must give the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.cores import needs_a_core
from gguf_factory import write_gguf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from make_model import write_shape
from model_shapes import llama
from routing import RoutingDraw, Row, draw, write_routing, zipf_shares

ROOT = Path(__file__).resolve().parents[2]
N_LAYER, N_EXPERT, N_USED = 3, 8, 2
TIMED = "emulated:scale=1,vram=1GiB,values=drawn"
REAL = "emulated:scale=1,vram=1GiB,values=real"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return write_gguf(path, "llama-moe", n_layer=N_LAYER, n_expert_used=N_USED)


def recorded(model: Path, device: str, **run: object) -> dict[int, list[Row]]:
    """The rows of a short run in a process of its own: two prompts and six tokens behind each."""
    asked = {"model": str(model), "prompts": ["once upon a time there was", "the end"], "device": device, "n_gen": 6,
             "temperature": 0.0, **run}  # fmt: skip
    command = [sys.executable, "-m", "e2e.recorded_routing", json.dumps(asked)]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **paths})
    assert done.returncode == 0, done.stderr
    return {int(layer): [tuple(row) for row in rows] for layer, rows in json.loads(done.stdout).items()}


@needs_a_core
def test_the_emulated_device_follows_a_file_and_begins_again_behind_its_end(model: Path, tmp_path: Path) -> None:
    """Each layer's tokens in their order, over several graphs; rows of 7 end in the middle of a prompt."""
    path = tmp_path / "routing.txt"
    routing = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 0.5), N_USED, 7))
    write_routing(path, routing, "three layers")
    found = recorded(model, f"{TIMED},routing={path}")
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
    host = (r"ffn_gate_inp", r"ffn_.*_exps", r"blk\.1\.")
    found = recorded(model, f"{TIMED},routing={path}", on_cpu=host)
    for layer, rows in found.items():
        assert len(rows) > 14
        assert (rows == [routing[layer][i % 7] for i in range(len(rows))]) == (layer != 1)


@needs_a_core
def test_what_a_file_does_not_say_is_drawn_distinct(model: Path, tmp_path: Path) -> None:
    """Layer 0: one expert of two, and one that the model lacks; layer 1: more than are used; layer 2: nothing."""
    path = tmp_path / "routing.txt"
    path.write_text("# remark\n0 5 99\n1 7 3 1\n")
    found = recorded(model, f"{TIMED},routing={path}")
    assert {row[0] for row in found[0]} == {5} and len({row[1] for row in found[0]}) > 1
    assert set(found[1]) == {(7, 3)}
    assert all(len(set(row)) == N_USED and max(row) < N_EXPERT for rows in found.values() for row in rows)
    assert len(set(found[2])) > 3


def test_a_recording_is_of_the_model_and_not_of_where_it_runs(model: Path) -> None:
    on_cpu, on_device = (recorded(model, device) for device in ("none", REAL))
    assert on_cpu == on_device
    parts = [recorded(model, "none", phase=phase) for phase in ("prompt", "decode")]
    for layer, rows in on_cpu.items():
        assert len(rows) == sum(len(part[layer]) for part in parts)
        assert len(parts[1][layer]) <= 12
