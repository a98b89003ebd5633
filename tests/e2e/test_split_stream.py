"""Plans that stream what a test asks for: slices, and the CC of some tokens of a prompt, which the device computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from devices import REAL
from e2e.forced import Forced, ffn, forced, written
from e2e.logits import TOKENS, assert_stock, placed_logits
from e2e.plugin_runs import counted
from seeds import crossed

from oallama.core.errors import PlanError
from oallama.core.types import SPLIT_LAYOUT, StreamSettings
from oallama.cost.blocks import takes_n_g
from oallama.device.load_params import load_bridge

DEVICES = ("rpc-worker", REAL)


def logits_of(case: Forced) -> np.ndarray:
    with case.llama() as llama:
        assert [w for w in llama.warnings if "plan again" not in w] == [], "the ledger is not theirs"
        assert llama.plan.operators == case.plan.operators
        return placed_logits(llama, TOKENS)


@pytest.mark.parametrize(("n_slots", "device", "prefetch"), crossed([1, 2, 4], DEVICES, ["ahead", "layer"]))
def test_forced_streaming_computes_the_same(device: str, prefetch: str, n_slots: int, f16: Path) -> None:
    settings = StreamSettings(n_slots, prefetch)  # type: ignore[arg-type]
    case = forced(f16, device, ffn(0.25, 0.25), streaming=settings)
    assert_stock(logits_of(case), f16, TOKENS)


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
    case = forced(f16, device, ffn(*cut), layout="CPU", token_assignment=table)
    assert_stock(logits_of(case), f16, TOKENS)


@pytest.mark.parametrize("device", DEVICES)
def test_a_repacked_layout_is_kept_twice_for_n_g(device: str, q4_0: Path) -> None:
    if "CPU_REPACK" not in load_bridge().cpu_layouts():
        pytest.skip("the CPU repacks nothing")
    host_bytes, cc = [], 0
    for kept_twice in (True, False):
        case = forced(
            q4_0, device, ffn(0.25), layout="CPU_REPACK", token_assignment=((1, 0), (64, 32)),
            streaming=StreamSettings(kept_twice=kept_twice),
        )  # fmt: skip
        pairs = zip(case.placer.operators, case.plan.operators, strict=True)
        cc = sum(round(p.cc * o.bytes) for o, p in pairs if takes_n_g(o))
        with case.llama() as llama:
            assert_stock(placed_logits(llama, TOKENS), q4_0, TOKENS)
            held = [b for b in llama.buffers if b.buft == SPLIT_LAYOUT and b.in_host_memory]
            host_bytes.append(sum(buffer.model for buffer in held))
    assert host_bytes[0] - host_bytes[1] == cc


@pytest.mark.parametrize("device", DEVICES)
def test_experts_are_streamed(device: str, models: Path) -> None:
    path = written(models, "qwen3moe", weight_type="F16")
    case = forced(path, device, ffn(0.0, 0.5), token_assignment=((1, 0), (64, 16)))
    assert_stock(logits_of(case), path, TOKENS)


def test_experts_that_are_copied_ahead_are_those_that_prompts_use(models: Path) -> None:
    """As many bytes as where nothing is copied before its router has run, once prompts like it have been computed."""
    path, tokens = written(models, "qwen3moe", weight_type="F16", n_expert_used=2, n_layer=5), TOKENS[:4]
    copied = []
    for prefetch in ("layer", "ahead"):
        case = forced(path, REAL, ffn(0.0, 0.5), streaming=StreamSettings(prefetch=prefetch))  # type: ignore[arg-type]
        with case.llama() as llama:
            for _ in range(4):
                assert_stock(placed_logits(llama, tokens), path, tokens)
            with counted() as done:
                placed_logits(llama, tokens)
        copied.append(done[0].bytes_streamed)
    whole = sum(o.bytes * p.cg for o, p in zip(case.placer.operators, case.plan.operators, strict=True))
    assert 0 < copied[0] == copied[1] < whole


def test_what_streams_needs_a_device(f16: Path) -> None:
    case = forced(f16, share=ffn(0.0, 0.5), probe=False)
    for load in (case.engine, case.llama):
        with pytest.raises(PlanError, match="needs device"):
            load()
