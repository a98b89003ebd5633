"""The memory breakdown adds up to what the file holds and what the cache must hold, loaded or only simulated."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from e2e.plugin_runs import loaded
from gguf import GGUFReader, ReaderTensor
from gguf_factory import write_gguf

import ggml_bridge
from ggml_bridge.llama_context import memory_breakdown

N_CTX, N_LAYER, N_EMBD_KV, F16_BYTES = 256, 2, 128, 2
LOAD_MODE_NONE = 0  # llama_load_mode


PADDING = 1 << 14  # of tensors in a buffer


def in_a_layout(bridge: ggml_bridge.Bridge, tensor: ReaderTensor) -> bool:
    """Whether llama.cpp takes a weight to another layout than the plain one. The embedding is read by rows."""
    extra, shape = bridge.cpu_layouts()[:-1], [int(n) for n in tensor.shape]
    multiplied = len(shape) == 2 and tensor.name != "token_embd.weight"
    return multiplied and any(bridge.layout_takes(layout, tensor.tensor_type.name, *shape) for layout in extra)


def context_of(path: Path, no_alloc: bool) -> AbstractContextManager[Any]:
    """A context of the model, loaded or only simulated."""
    return loaded(path, **({"no_alloc": True, "load_mode": LOAD_MODE_NONE} if no_alloc else {}))


@pytest.mark.parametrize("no_alloc", [False, True])
@pytest.mark.parametrize("weight_type", ["F16", "Q4_0"])
def test_adds_up(bridge: ggml_bridge.Bridge, tmp_path: Path, weight_type: str, no_alloc: bool) -> None:
    path = write_gguf(tmp_path / "llama.gguf", "llama", weight_type=weight_type)
    with context_of(path, no_alloc) as context:
        rows = memory_breakdown(bridge, context, [] if no_alloc else None)
    tensors = GGUFReader(path).tensors
    weights = sum(int(tensor.n_bytes) for tensor in tensors)
    kv = 2 * N_CTX * N_LAYER * N_EMBD_KV * F16_BYTES
    held = {row.buft: row.model for row in rows if row.model}
    if no_alloc:
        assert weights <= sum(held.values()) <= weights + PADDING
    else:
        # A mapping counts with all from the first plain tensor to the last, also what has been copied
        copied = {tensor.name for tensor in tensors if in_a_layout(bridge, tensor)}
        plain = [tensor for tensor in tensors if tensor.name not in copied]
        begin = min(int(tensor.data_offset) for tensor in plain)
        end = max(int(tensor.data_offset + tensor.n_bytes) for tensor in plain)
        assert abs(held.pop("CPU_Mapped") - (end - begin)) <= PADDING
        copies = sum(int(tensor.n_bytes) for tensor in tensors if tensor.name in copied)
        assert copies <= sum(held.values()) <= copies + PADDING
    assert sum(row.context for row in rows) == pytest.approx(kv, abs=1 << 16)
    assert sum(row.compute for row in rows) > 0
    assert {row.device for row in rows if row.total} == {"CPU"}
    assert {row.buft for row in rows if row.total} <= {*bridge.cpu_layouts(), "CPU_Mapped"}
    assert all(row.total == row.model + row.context + row.compute for row in rows)
    assert [row.is_host for row in rows if row.buft == "CPU"] == [True]


@pytest.mark.parametrize("with_split_backend", [False, True])
def test_simulated_is_the_same_as_real(bridge: ggml_bridge.Bridge, tmp_path: Path, with_split_backend: bool) -> None:
    """Also where two back ends of ours are in every context, whose buffers are the CPU's."""
    path = write_gguf(tmp_path / "llama.gguf", "llama", weight_type="Q4_0")
    if with_split_backend:
        bridge.split()
    with context_of(path, False) as context:
        real = memory_breakdown(bridge, context)
    with context_of(path, True) as context:
        simulated = memory_breakdown(bridge, context, [])
        uncorrected = memory_breakdown(bridge, context)
    assert sum(row.context for row in real) == sum(row.context for row in simulated)
    assert sum(row.compute for row in real) == sum(row.compute for row in simulated)
    if with_split_backend:
        assert sum(row.compute for row in uncorrected) == 3 * sum(row.compute for row in real)


def test_devices_must_exist(bridge: ggml_bridge.Bridge, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "llama.gguf", "llama", weight_type="F16")
    with context_of(path, True) as context, pytest.raises(ValueError, match="no ggml device is called GPU9"):
        memory_breakdown(bridge, context, ["GPU9"])


def test_needs_a_context(bridge: ggml_bridge.Bridge) -> None:
    with pytest.raises(ValueError, match="a context"):
        memory_breakdown(bridge, 0)
