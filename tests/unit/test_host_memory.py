"""Models that the host's memory cannot hold are refused before they are loaded; files that are mostly holes stand for
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gguf_factory import write_gguf
from gguf_factory.raw import RawTensor, tiny_llama

from oallama.cli.served import host_left
from oallama.core.errors import DoesNotFit
from oallama.device.host_memory import host_free_bytes
from oallama.placer import Placer


def sparse_llama(path: Path, n_ff: int, type_id: int = 1) -> Path:
    """One layer whose FFN takes 3 * 64 * n_ff F16 weights, of which nothing is written."""
    g = tiny_llama()
    g.set("llama.feed_forward_length", n_ff)
    names = [tensor.name for tensor in g.tensors if b".ffn_" in tensor.name and b"norm" not in tensor.name]
    for name in names:
        g.remove(name.decode())
    end = sum(len(g.pad(tensor.data)) for tensor in g.tensors)
    for name in names:
        shape = [n_ff, 64] if b"down" in name else [64, n_ff]
        g.tensors.append(RawTensor(name, shape, type_id, offset=end))
        end += 2 * 64 * n_ff
    path.write_bytes(g.encode())
    os.truncate(path, len(g.head()) + end)
    return path


def too_long(n_bytes: int) -> int:
    """The n_ff of a file of twice so many bytes."""
    return (2 * n_bytes // (3 * 2 * 64) + 63) // 64 * 64


def test_a_model_beyond_the_host_s_memory_is_refused(tmp_path: Path) -> None:
    path = sparse_llama(tmp_path / "model.gguf", too_long(psutil.virtual_memory().total))
    done = subprocess.run(
        [sys.executable, "-m", "oallama", "run", str(path), "hi", "-n", "1", "--device", "none"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OALLAMA_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "GiB on the host but only" in done.stderr
    assert "use a smaller or more quantized model" in done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "warning",
        "oallama",
    ]  # of its context, and this


def test_an_engine_for_a_plan_of_a_file_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama")
    placer = Placer.load(path, device="none", threads=1)
    plan = placer.plan("cpu", workload=placer.workload(8, 8), measure=False)
    other = Placer.load(path, device="none", threads=1)
    with other.engine(plan, progress=False) as engine:
        needed = engine.memory.host_bytes
    monkeypatch.setattr("oallama.run.engine.host_memory_bytes", lambda: needed // 2)
    with pytest.raises(DoesNotFit) as caught:
        other.engine(plan, progress=False)
    assert caught.value.available == needed // 2 < caught.value.required


def test_experts_that_a_token_does_not_use_may_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", n_expert=16, n_ff=1024)
    placer = Placer.load(path, device="none", threads=1)
    idle = sum(round((1 - op.active_fraction) * op.bytes) for op in placer.operators)
    assert idle > 1 << 20
    with placer.engine(placer.plan("cpu", workload=placer.workload(8, 8), measure=False), progress=False) as engine:
        needed = engine.memory.host_bytes
    monkeypatch.setattr("oallama.device.host_memory.host_memory_bytes", lambda: needed - idle // 2)
    placer.plan("cpu", workload=placer.workload(8, 8), measure=False)
    monkeypatch.setattr("oallama.device.host_memory.host_memory_bytes", lambda: needed - 2 * idle)
    with pytest.raises(DoesNotFit):
        placer.plan("cpu", workload=placer.workload(8, 8), measure=False)


def test_what_a_container_has_left_is_its_limit_less_what_is_used_and_no_page_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("100000\n")
    (folder / "memory.current").write_text("60000\n")
    (folder / "memory.stat").write_text("anon 30000\nactive_file 9000\ninactive_file 1000\n")
    assert host_free_bytes(tmp_path) == 50000
    (folder / "memory.current").write_text("900000\n")
    assert host_free_bytes(tmp_path) == 0
    (folder / "memory.max").write_text("max\n")
    assert host_free_bytes(tmp_path) > 100000


def test_what_the_host_has_left_beside_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placer = Placer.load(write_gguf(tmp_path / "model.gguf", "llama"), device="none", threads=1)
    plan = placer.plan("cpu", workload=placer.workload(8, 8), measure=False)
    with placer.engine(plan, progress=False) as engine:
        needed = engine.memory.host_bytes
    free = 100 * needed
    monkeypatch.setattr("oallama.device.host_memory.host_free_bytes", lambda: free)
    assert host_left(placer, plan) == int(0.9 * free) - needed
    free = needed
    assert host_left(placer, plan) == 0
