"""A long prompt in larger micro-batches than stock llama.cpp's: planned, paid for, loaded, and computed alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.logits import QUANTISED_NMSE, nmse, stock_logits
from gguf_factory import write_llama_shape

from oallama.core.units import KIB
from oallama.device.load_params import load_bridge
from oallama.placer import Placer
from oallama.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("prober")

DEVICE = "emulated:vram=1GiB,scale=1,values=real"
N_PROMPT, N_CTX = 1024, 1280
TOKENS = [1 + i * 37 % 900 for i in range(N_PROMPT)]
SHARE, SLACK = 0.02, 64 * KIB  # as in test_ledger.py


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are large beside its activations, so that streaming them takes most of the time."""
    return write_llama_shape(tmp_path_factory.mktemp("model") / "model.gguf", 3, 256, 8192, 4, 2, 1000, "Q4_0")


def placer_of(model: Path, n_ubatch: int | None = None) -> Placer:
    return Placer.load(
        model, device=DEVICE, gpu_weights=0.1, threads=1, profile=slow_cpu_fast_card(model, 1e9, 1e11),
        flash_attn="on", n_ubatch=n_ubatch, n_ctx=N_CTX,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["scheinfer", pytest.param("oato", marks=pytest.mark.thorough)])
def test_a_long_prompt_that_streams_gets_a_larger_micro_batch(policy: str, model: Path) -> None:
    """By the split back end's streaming, and by llama.cpp's own."""
    placer = placer_of(model)
    plan = placer.plan(policy, n_prompt=N_PROMPT, n_gen=1)
    memory = plan.memory
    assert plan.workload.n_ubatch == N_PROMPT
    assert plan.notes[0].startswith(f"micro-batch raised from 512 to {N_PROMPT} tokens")
    assert any(placement.cg for placement in plan.operators) is (policy == "scheinfer")
    fixed = placer_of(model, n_ubatch=512).plan(policy, n_prompt=N_PROMPT, n_gen=1)
    assert fixed.workload.n_ubatch == placer.plan(policy, N_PROMPT, 1, n_ubatch=512).workload.n_ubatch == 512
    assert plan.predicted is not None and fixed.predicted is not None
    assert plan.predicted.total_s < fixed.predicted.total_s
    assert memory.compute > fixed.memory.compute and memory.spare >= 0
    with placer.engine(Plan.from_json(plan.to_json()), progress=False) as engine:
        held = load_bridge().emulated().stats().device_bytes
        assert engine.llama.context_params.n_ubatch == N_PROMPT
        assert nmse(engine.logits(TOKENS), stock_logits(model, TOKENS, n_ctx=N_CTX)) <= QUANTISED_NMSE
    assert abs(memory.limit - memory.spare - held) <= max(SHARE * held, SLACK)
