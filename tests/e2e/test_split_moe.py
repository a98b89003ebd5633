"""Experts in the split back end: hot ones whole on the device and the others on the host, or all cut in parts, of which
each side weights and adds up its own. Logits against stock llama.cpp for whatever tokens are routed to, and the bytes
that are held and come back against the plan's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import EXACT_NMSE, QUANTISED_NMSE, attention, engine_of, nmse, stock_logits
from e2e.placed import Placed, Where, placed
from e2e.plugin_runs import loaded, logits_of, logits_of_sequences, with_plugin
from e2e.split_cases import ffn, split_placements, with_ledger, with_whole, written

from ggml_bridge.split import SplitStats
from oallama.core.errors import PlanError
from oallama.core.types import Operator, OperatorPlacement
from oallama.cost.blocks import F32, ffn_block, hot_weights, is_biased_ffn, is_ffn, split_blocks
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.plan.split import slice_counts

pytestmark = pytest.mark.usefixtures("prober")

ARCHITECTURES = ("llama-moe", "qwen3moe", "qwen2moe", "deepseek2", "deepseek2-fused", "granitemoe", "gpt-oss")
EMULATED = "emulated:vram=2GiB,scale=1,values=real"
SETS = ((0,), (1, 2, 5), (0, 1, 2, 3, 4, 6, 7), tuple(range(8)))  # of the 8 experts of tiny models
TRAINED = Path(__file__).parents[2] / "models" / "oallama-stories-moe-q4_0.gguf"
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 300, 64)]  # one micro-batch


@pytest.fixture(scope="module", params=("cpu-pair", EMULATED))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with open_device(request.param) as opened:
        yield opened.name


def hot_placements(case: Placed, hot: Sequence[int]) -> tuple[OperatorPlacement, ...]:
    """Everything on the host, these experts of every layer on the device too."""
    return tuple(
        OperatorPlacement(name=o.name, gg=0.0, cg=0.0, cc=1.0, hot_experts=tuple(hot) if o.op == "MUL_MAT_ID" else ())
        for o in case.operators
    )


def hot_staging(case: Placed, n_hot: int) -> int:
    """Activations of the largest FFN of experts of which the device has so many, and the biases that are sent."""
    operators, most = case.operators, 0
    for layer in {operator.layer for operator in operators if operator.op == "MUL_MAT_ID"}:
        members = [i for i, o in enumerate(operators) if o.op == "MUL_MAT_ID" and o.layer == layer]
        if is_biased_ffn([operators[i] for i in members]):
            block = ffn_block(operators, members)
        else:
            (block,) = split_blocks(operators, [int(i in members) for i in range(len(operators))])
        n_used = operators[members[0]].n_expert_used
        own = block.with_rows(min(n_used, n_hot), n_used)
        most = max(most, block.biases * n_hot * F32 + own.staging_bytes(own.extent, case.request.n_ubatch))
    return most


def hot_case(path: Path, device: str, hot: Sequence[int], whole: Where | None = None) -> Placed:
    """`path` with hot experts, its ledger filled. Operators of `whole` go to the device, and with them norms and KV."""
    case = placed(path)
    placements = with_whole(case, hot_placements(case, hot), whole)
    weights = hot_weights(case.operators, [p.hot_experts for p in placements])
    return with_ledger(case, device, placements, whole, weights, 0, staging=hot_staging(case, len(hot)))


@pytest.mark.parametrize(
    ("arch", "n_used"), [*((arch, 2) for arch in ARCHITECTURES), ("llama-moe", 1), ("llama-moe", 8), ("qwen3moe", 5)]
)
def test_hot_experts_compute_the_same(arch: str, n_used: int, device: str, models: Path) -> None:
    case = placed(written(models, arch, n_expert_used=n_used))
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with loaded(Path(case.model.path)) as context:
        decode, prompt = logits_of_sequences(context, [PROMPT[:12]]), logits_of(context, PROMPT)
    for hot in SETS:
        for sum_bytes in (0, 1 << 40):
            with with_plugin(case, hot_placements(case, hot), given, device, sum_bytes=sum_bytes) as context:
                assert nmse(logits_of_sequences(context, [PROMPT[:12]]), decode) <= EXACT_NMSE, hot
                assert nmse(logits_of(context, PROMPT), prompt) <= EXACT_NMSE, hot


def attention_and_routers(operator: Operator) -> bool:
    return attention(operator) or operator.role == "ffn_gate_inp"


@pytest.mark.parametrize("whole", [None, attention, attention_and_routers])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_the_device_holds_what_the_plan_says(arch: str, whole: Where | None, models: Path) -> None:
    """Also where the router is on the device, and ids come from there."""
    path = written(models, arch, n_expert_used=2)
    case = hot_case(path, EMULATED, (1, 2, 5), whole)
    experts = [operator for operator in case.operators if operator.op == "MUL_MAT_ID"]
    before = load_bridge().split().memory()  # engines whose device was lost keep theirs
    with engine_of(case) as engine:
        held = load_bridge().split().memory()
        assert engine.warnings == ()
        assert held.device_weights - before.device_weights == sum(operator.bytes // 8 * 3 for operator in experts)
        host_weights = held.host_weights - before.host_weights
        assert host_weights == sum(operator.bytes for operator in experts), "the host keeps all of them"
        assert held.device_compute - before.device_compute <= case.plan.memory.staging
        assert engine.plan == case.plan
        assert nmse(engine.logits(PROMPT), stock_logits(path, PROMPT, n_ubatch=64)) <= EXACT_NMSE
        assert load_bridge().split().memory() == held, "nothing comes with computing"


@pytest.mark.parametrize(
    ("hot", "cc", "said"), [((2, 1), 1.0, "ascending"), ((8,), 1.0, "8 experts"), ((1,), 0.0, "cc must be 1")]
)
def test_hot_experts_that_cannot_be_are_refused(hot: tuple[int, ...], cc: float, said: str, models: Path) -> None:
    case = placed(written(models, "qwen3moe", n_expert_used=2))
    operators = tuple(
        replace(p, gg=1 - cc, cc=cc, hot_experts=hot) if p.name.endswith("up_exps.weight") else p
        for p in hot_placements(case, (1,))
    )
    with pytest.raises(PlanError, match=said):
        replace(case.plan, operators=operators).check(case.model, case.operators)


#
# experts that are split
#


@pytest.mark.parametrize(
    ("arch", "n_used"), [*((arch, 2) for arch in ARCHITECTURES), ("llama-moe", 1), ("llama-moe", 8), ("qwen3moe", 5)]
)
def test_split_experts_compute_the_same(arch: str, n_used: int, device: str, models: Path) -> None:
    case = placed(written(models, arch, n_expert_used=n_used))
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with loaded(Path(case.model.path)) as context:
        decode, prompt = logits_of_sequences(context, [PROMPT[:12]]), logits_of(context, PROMPT)
    with with_plugin(case, split_placements(case.operators, ffn(0.5)), given, device) as context:
        assert nmse(logits_of_sequences(context, [PROMPT[:12]]), decode) <= EXACT_NMSE
        assert nmse(logits_of(context, PROMPT), prompt) <= EXACT_NMSE


def test_a_trained_model_of_experts_computes_the_same(device: str) -> None:
    """Its routing is real: skewed, and other experts in each layer. Token by token, and a prompt at once."""
    case = placed(TRAINED)
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with loaded(TRAINED) as context:
        decode, prompt = logits_of_sequences(context, [PROMPT[:24]]), logits_of(context, PROMPT)
    with with_plugin(case, split_placements(case.operators, ffn(0.5)), given, device) as context:
        assert nmse(logits_of_sequences(context, [PROMPT[:24]]), decode) <= QUANTISED_NMSE
        assert nmse(logits_of(context, PROMPT), prompt) <= QUANTISED_NMSE


@pytest.mark.parametrize("n_used", [1, 2, 8])
@pytest.mark.parametrize("n_tokens", [1, 64])
def test_as_many_bytes_come_back_as_are_priced(n_tokens: int, n_used: int, device: str, models: Path) -> None:
    """With 8 experts the sum of 64 tokens is worth it, else it is not."""
    case = placed(written(models, "qwen3moe", n_expert_used=n_used))
    placements = split_placements(case.operators, ffn(0.5))
    pairs = list(zip(case.operators, placements, strict=True))
    gg = [slice_counts(o, p)[2] if is_ffn(o) else 0 for o, p in pairs]
    blocks = [block for block in split_blocks(case.operators, gg) if len(block.operators) == 3]
    assert len(blocks) == 2, "a block of experts in each layer"
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with with_plugin(case, placements, given, device, sum_bytes=None) as context:
        done = _stats_of(context, n_tokens)
    elements = gg[blocks[0].operators[0]]
    assert done.bytes_out == sum(block.download_bytes(elements, n_tokens) for block in blocks)
    assert done.bytes_in == sum(block.upload_bytes(elements, n_tokens) for block in blocks)
    results = n_tokens * case.model.n_embd * 4 * len(blocks)
    assert done.bytes_out == (results if n_tokens * n_used == 512 else results * n_used)


def _stats_of(context: object, n_tokens: int) -> SplitStats:
    before = load_bridge().split().stats()
    logits_of(context, PROMPT[:n_tokens])
    return load_bridge().split().stats() - before
