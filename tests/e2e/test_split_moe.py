"""Experts in the split back end: hot ones whole on the device and the others on the host, or all cut in parts, of which
each side weights and adds up its own. Logits against stock llama.cpp for whatever tokens are routed to, and the bytes
that are held and come back against the plan's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from devices import REAL
from e2e.forced import Forced, Where, attention, ffn, forced, nothing, written
from e2e.logits import assert_alike, assert_stock, placed_logits
from e2e.plugin_runs import counted, loaded, logits_of, logits_of_sequences, with_plugin

from oallama.core.errors import PlanError
from oallama.core.types import PLAIN_LAYOUT, Operator, StreamSettings
from oallama.cost.blocks import split_blocks
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.plan.split import slice_counts

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

SETS = ((0,), (1, 2, 5), (0, 1, 2, 3, 4, 6, 7), tuple(range(8)))  # of the 8 experts of tiny models
USED = [
    *((arch, 2) for arch in ("qwen2moe", "deepseek2", "deepseek2-fused", "granitemoe", "gpt-oss")),
    ("llama-moe", 1), ("llama-moe", 8), ("qwen3moe", 5),
]  # fmt: skip
TRAINED = Path(__file__).parents[2] / "models" / "oallama-stories-moe-q4_0.gguf"
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 300, 64)]  # one micro-batch


@pytest.fixture(scope="module", params=("CPU", REAL))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.nullcontext() if request.param == "CPU" else open_device(request.param) as opened:
        yield opened.name if opened else "CPU"


@pytest.mark.parametrize(("arch", "n_used"), USED)
def test_hot_and_split_experts_compute_the_same(arch: str, n_used: int, device: str, models: Path) -> None:
    """Token by token, and a prompt at once; results are added up on the device, or one by one on the host."""
    path = written(models, arch, n_expert_used=n_used)
    with loaded(path) as context:
        decode, prompt = logits_of_sequences(context, [PROMPT[:12]]), logits_of(context, PROMPT)
    for hot in ((), *SETS):
        for sum_bytes in (0, 1 << 40):
            share = ffn(0.0 if hot else 0.5)
            with with_plugin(path, device, share, hot=hot, sum_bytes=sum_bytes) as context:
                assert_alike(logits_of_sequences(context, [PROMPT[:12]]), decode, path)
                assert_alike(logits_of(context, PROMPT), prompt, path)


def test_a_trained_model_of_experts_computes_the_same(device: str) -> None:
    """Its routing is real: skewed, and other experts in each layer."""
    with loaded(TRAINED) as context:
        decode, prompt = logits_of_sequences(context, [PROMPT[:24]]), logits_of(context, PROMPT)
    with with_plugin(TRAINED, device, ffn(0.5)) as context:
        assert_alike(logits_of_sequences(context, [PROMPT[:24]]), decode, TRAINED)
        assert_alike(logits_of(context, PROMPT), prompt, TRAINED)


def attention_and_routers(operator: Operator) -> bool:
    return attention(operator) or operator.role == "ffn_gate_inp"


@pytest.mark.parametrize("hot", [(), (0, 3, 6)])
def test_experts_that_a_card_cannot_compute_stay_on_the_host(hot: tuple[int, ...], models: Path) -> None:
    """Mistral-4 reads the input of down's experts in F32, for which CUDA, and what emulates it, has no kernel."""
    path = written(models, "mistral4")
    case = forced(path, REAL, nothing if hot else ffn(0.5), hot=hot).with_breakdown(staging=16 << 20)
    with case.llama() as llama:
        assert_stock(placed_logits(llama, PROMPT), path, PROMPT)
        assert_stock(placed_logits(llama, PROMPT[:1]), path, PROMPT[:1])
        said = [warning for warning in llama.warnings if "cannot multiply by" in warning]
    assert len(said) == 1 and "ffn_down_exps" in said[0], said


@pytest.mark.parametrize("whole", [None, attention, attention_and_routers])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_the_device_holds_what_the_plan_says(arch: str, whole: Where | None, models: Path) -> None:
    """Also where the router is on the device, and ids come from there."""
    path = written(models, arch, n_expert_used=2)
    case = forced(path, REAL, nothing, hot=(0, 3, 6), whole=whole).with_breakdown(staging=16 << 20)
    experts = [operator for operator in case.placer.operators if operator.routed]
    before = load_bridge().split().memory()
    with case.llama() as llama:
        held = load_bridge().split().memory()
        assert held.device_weights - before.device_weights == sum(operator.bytes // 8 * 3 for operator in experts)
        host_weights = held.host_weights - before.host_weights
        assert host_weights == sum(operator.bytes for operator in experts), "the host keeps all of them"
        assert llama.plan == case.plan
        assert_stock(placed_logits(llama, PROMPT), path, PROMPT)
        assert load_bridge().split().memory() == held, "nothing comes with computing"


@pytest.mark.parametrize("whole", [None, attention_and_routers])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_experts_that_follow_the_conversation_compute_the_same(arch: str, whole: Where | None, models: Path) -> None:
    """Token by token behind a prompt, and a prompt again, while experts are exchanged and fetched."""
    path = written(models, arch, n_expert_used=2)
    case = following(path, whole)
    with case.llama() as llama:
        before = load_bridge().split()
        held, done = before.memory(), before.stats()
        for tokens in (PROMPT[:9], PROMPT[:40], PROMPT[20:60], PROMPT):
            assert_stock(placed_logits(llama, tokens), path, tokens)
        llama.reset()
        llama.eval(PROMPT[:20])
        for token in PROMPT[20:60]:
            llama.eval([token])
        assert_stock(llama.scores[:60], path, PROMPT[:60])
        assert_stock(placed_logits(llama, PROMPT), path, PROMPT)
        moved = load_bridge().split().stats() - done
        assert moved.n_fetched + moved.n_exchanged > 0 and moved.bytes_exchanged > 0
        assert moved.n_hits <= moved.n_uses
        assert load_bridge().split().memory().device_weights == held.device_weights


def following(path: Path, whole: Where | None) -> Forced:
    """Hot experts that are exchanged."""
    settings = StreamSettings(piece_bytes=4096, link_bytes_per_s=10**12, exchange="idle")
    return forced(path, REAL, nothing, hot=(0, 3, 6), whole=whole, layout=PLAIN_LAYOUT).changed(streaming=settings)


def test_they_follow_the_answers_of_an_engine(models: Path) -> None:
    with following(written(models, "qwen3moe", n_expert_used=2), None).engine() as engine:
        before = engine.split_report()
        answer = engine.generate(PROMPT[:20], 40, temperature=1.0)
        after = engine.split_report()
        assert before is not None and after is not None and answer.n_gen > 1
        decode = after.single - before.single
        assert decode.n_fetched + decode.n_exchanged > 0 and decode.bytes_exchanged > 0
        assert decode.n_hits <= decode.n_uses
        assert after.memory.device_weights == before.memory.device_weights


@pytest.mark.parametrize(
    ("hot", "gg", "said"), [((2, 1), 0, "ascending"), ((8,), 0, "8 experts"), ((1,), 1, "cc must be 1")]
)
def test_hot_experts_that_cannot_be_are_refused(hot: tuple[int, ...], gg: float, said: str, models: Path) -> None:
    case = forced(written(models, "qwen3moe", n_expert_used=2), share=ffn(gg), hot=hot, probe=False)
    with pytest.raises(PlanError, match=said):
        case.plan.check(case.placer.model, case.placer.operators)


@pytest.mark.parametrize("n_used", [1, 2, 8])
@pytest.mark.parametrize("n_tokens", [1, 64])
def test_as_many_bytes_come_back_as_are_priced(n_tokens: int, n_used: int, device: str, models: Path) -> None:
    """With 8 experts the sum of 64 tokens is worth it, else it is not."""
    path = written(models, "qwen3moe", n_expert_used=n_used)
    case = forced(path, share=ffn(0.5), probe=False)
    operators = case.placer.operators
    gg = [slice_counts(*pair)[2] for pair in zip(operators, case.plan.operators, strict=True)]
    blocks = [block for block in split_blocks(operators, gg) if len(block.operators) == 3]
    assert len(blocks) == 2, "a block of experts in each layer"
    with with_plugin(path, device, ffn(0.5), sum_bytes=None) as context, counted() as done:
        logits_of(context, PROMPT[:n_tokens])
    elements = gg[blocks[0].operators[0]]
    assert done[0].bytes_out == sum(block.download_bytes(elements, n_tokens) for block in blocks)
    assert done[0].bytes_in == sum(block.upload_bytes(elements, n_tokens) for block in blocks)
    results = n_tokens * case.placer.model.n_embd * 4 * len(blocks)
    assert done[0].bytes_out == (results if n_tokens * n_used == 512 else results * n_used)
