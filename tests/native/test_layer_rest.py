"""The rest of a layer: the very operations that llama.cpp runs, and times that grow with what attention sees."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gguf_factory import write_gguf
from traced import decode, traced

import ggml_bridge

N_LAYER = 2
SHAPE: dict[str, Any] = {
    "n_embd": 256,
    "n_head": 4,
    "n_head_kv": 2,
    "head_dim_k": 64,
    "head_dim_v": 64,
    "n_ff": 512,
}


def traced_ops(path: Path, flash_attn: bool) -> Counter[str]:
    """Operations of one real decode without views, weight mul-mats, look-ups, the input and the final norm."""
    ops: Counter[str] = Counter()

    def on_node(op: str, node: Any, ask: bool) -> bool:
        if ask and not (op == "MUL_MAT" and not node.name.startswith(b"kq")):
            ops[{"SWIGLU": "GLU"}.get(op, op)] += 1
        return False

    with traced(path, on_node, flash_attn_type=int(flash_attn)) as context:
        ops.clear()  # a context runs or reserves graphs while it is made
        decode(context, [1])
    for op in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "GET_ROWS"):
        del ops[op]
    mixed_input = Counter({"DUP": 1, "SET_ROWS": 1})  # of tokens and embeddings in one batch, once a graph
    return ops - Counter({"RMS_NORM": 1, "MUL": 1}) - mixed_input


@pytest.mark.parametrize("flash_attn", [True, False])
def test_operations_are_those_of_a_real_decode(bridge: ggml_bridge.Bridge, tmp_path: Path, flash_attn: bool) -> None:
    path = write_gguf(tmp_path / "llama.gguf", "llama", weight_type="F16")
    with bridge.layer_rest("CPU", 1, 256, **SHAPE, n_layers=N_LAYER, flash_attn=flash_attn) as timer:
        assert Counter(timer.ops) == traced_ops(path, flash_attn)


def thread_s(bridge: ggml_bridge.Bridge, n_kv: int, flash_attn: bool) -> float:
    """Seconds of this thread for some runs: time of others does not count."""
    with bridge.layer_rest("CPU", 1, n_kv, **SHAPE, flash_attn=flash_attn) as timer:
        start = time.thread_time()
        timer.run(25)
        return time.thread_time() - start


@pytest.mark.timed
@pytest.mark.parametrize("flash_attn", [True, False])
def test_attention_costs_by_what_it_sees(bridge: ggml_bridge.Bridge, flash_attn: bool) -> None:
    assert thread_s(bridge, 16384, flash_attn) > 4 * thread_s(bridge, 256, flash_attn)


@pytest.mark.timed
def test_what_is_masked_costs_flash_attention_nothing(bridge: ggml_bridge.Bridge) -> None:
    """llama.cpp shows attention the cache in steps of 256 positions, and masks those that are not there yet."""
    assert thread_s(bridge, 16, True) < 0.9 * thread_s(bridge, 256, True)


@pytest.mark.parametrize(("type_k", "type_v"), [("Q8_0", "F16"), ("Q8_0", "Q4_0"), ("BF16", "BF16")])
def test_other_types_of_the_cache(bridge: ggml_bridge.Bridge, type_k: str, type_v: str) -> None:
    with bridge.layer_rest("CPU", 2, 300, **SHAPE, type_k=type_k, type_v=type_v) as flash:
        assert flash.run(1)[0] > 0
    if type_v == "Q4_0":
        with pytest.raises(ValueError, match="quantised V cache needs flash attention"):
            bridge.layer_rest("CPU", 2, 300, **SHAPE, flash_attn=False, type_k=type_k, type_v=type_v)
        return
    with bridge.layer_rest("CPU", 2, 300, **SHAPE, flash_attn=False, type_k=type_k, type_v=type_v) as plain:
        assert plain.run(1)[0] > 0


def test_no_activation_without_a_feed_forward(bridge: ggml_bridge.Bridge) -> None:
    with bridge.layer_rest("CPU", 1, 256, **{**SHAPE, "n_ff": 0}) as timer:
        assert "GLU" not in timer.ops
        assert timer.run(1)[0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_tokens": 300}, "must hold the tokens of the batch"),
        ({"n_head_kv": 3}, "multiple of the number of KV heads"),
        ({"n_embd": -1}, "must be positive"),
        ({"head_dim_k": 33}, "even head width"),
        ({"n_layers": 65}, "must be 1 to 64"),
        ({"n_kv": 1 << 40}, "larger than a tebielement"),
        ({"type_k": "Q8_0", "head_dim_k": 48}, "multiple of the block size"),
    ],
)
def test_impossible_blocks(bridge: ggml_bridge.Bridge, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.layer_rest("CPU", **{"n_tokens": 1, "n_kv": 256, **SHAPE, **change})
