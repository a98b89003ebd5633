"""Plans that stream what a test asks for: slices, and the CC of some tokens of a prompt, which the device computes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from e2e.forced import N_UBATCH, Forced, ffn, forced, movable, written
from e2e.logits import REAL, TOKENS, assert_stock, placed_logits
from e2e.plugin_runs import counted
from gguf_factory import write_llama_shape
from make_model import write_shape
from seeds import crossed

from oallama.core.errors import PlanError
from oallama.core.types import SPLIT_LAYOUT, StreamSettings
from oallama.core.units import KIB
from oallama.cost.blocks import split_blocks, takes_n_g
from oallama.cost.slices import BlockContext, BlockType, Cut, Gemms
from oallama.device.load_params import load_bridge
from oallama.model.cut import cut_extent
from oallama.model.shapes import qwen3
from oallama.planner.memory import staging_bytes

DEVICES = ("cpu-pair", "rpc-worker", REAL)


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


def test_experts_that_are_streamed_in_two_parts_take_the_memory_that_is_planned(tmp_path: Path) -> None:
    """CG, and CC for all tokens, each with a result of every expert of a token before these are added up."""
    shape = qwen3(2, 1024, 256, 8, 2, 300, 512, 1e6, head_dim=64, n_expert=16, n_expert_used=8, n_ff_expert=256)
    path = write_shape(tmp_path / "model.gguf", shape, "Q4_0")
    case = forced(path, REAL, ffn(0.25, 0.25), layout="CPU", token_assignment=((1, 0), (N_UBATCH, N_UBATCH)))
    pairs = [(o, p) for o, p in zip(case.placer.operators, case.plan.operators, strict=True) if p.cg]
    block = split_blocks([o for o, _ in pairs], [round(p.gg * shape.n_ff) for _, p in pairs])[0]
    slot = sum(o.bytes * (p.cg + p.cc) for o, p in pairs) / shape.n_layer
    planned = 2 * slot + block.staging_bytes(shape.n_ff // 4, N_UBATCH, 3 * shape.n_ff // 4, 2)
    before = load_bridge().split().memory()
    with case.llama() as llama:
        placed_logits(llama, [1 + i % 290 for i in range(N_UBATCH)])
        assert load_bridge().split().memory().device_compute - before.device_compute <= planned + 16 * KIB


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


@pytest.mark.parametrize("resident", [False, True])
def test_whatever_is_split_takes_the_memory_that_is_planned(resident: bool, q4_0: Path) -> None:
    """Each subset of an FFN's mul-mats, and of attention's, with the others whole on the host or on the device."""
    hidden, heads = ("ffn_gate", "ffn_up", "ffn_down"), ("attn_q", "attn_v", "attn_k")
    subsets = [roles for of in (hidden, heads) for n in (1, 2, 3) for roles in combinations(of, n)]
    for roles in subsets:
        whole = (lambda o, roles=roles: movable(o) and o.role not in roles) if resident else None
        case = forced(
            q4_0, REAL, lambda o, roles=roles: 0.5 if o.role in roles else None, whole=whole, residents=resident
        )
        operators, extents = case.placer.operators, [cut_extent(operator) for operator in case.placer.operators]
        gg = [round(p.gg * n) if p.cc else 0 for p, n in zip(case.plan.operators, extents, strict=True)]
        context = BlockContext(resident=resident)
        blocks = [(b, gg[b.operators[0]]) for b in split_blocks(operators, gg)]
        layers = [(BlockType(b, Gemms(()), context=context), Cut(b.extent - n, 0, n)) for b, n in blocks]
        planned = staging_bytes(layers, StreamSettings(), N_UBATCH, 0)
        before = load_bridge().split().memory()
        with case.llama() as llama:
            assert_stock(placed_logits(llama, TOKENS), q4_0, TOKENS)
            held = load_bridge().split().memory().device_compute - before.device_compute
        assert planned - 1 * KIB <= held <= planned, (roles, held)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("gg", [1 / 16, 1 / 4, 15 / 16])
def test_the_parts_of_an_ffn_take_the_memory_that_is_planned(gg: float, resident: bool, tmp_path: Path) -> None:
    """GG, then CG: what a small part leaves before its result is of no use to the next one."""
    path = write_llama_shape(tmp_path / "wide.gguf", 2, 512, 2048, 8, 4, 2000, "Q4_0")
    whole = (lambda o: movable(o) and not o.role.startswith("ffn")) if resident else None
    case = forced(path, REAL, ffn(gg, 1.0 - gg), whole=whole, residents=resident)
    cuts = [p.cut if p.cg else (0, 0, 0) for p in case.plan.operators]
    blocks = split_blocks(case.placer.operators, [sum(cut) for cut in cuts])
    context = BlockContext(resident=resident)
    layers = [(BlockType(b, Gemms(()), context=context), Cut(*cuts[b.operators[0]])) for b in blocks]
    planned = staging_bytes(layers, StreamSettings(), N_UBATCH, 0)
    before = load_bridge().split().memory()
    with case.llama() as llama:
        placed_logits(llama, TOKENS)
        held = load_bridge().split().memory().device_compute - before.device_compute
    assert abs(held - planned) <= 1 * KIB
