"""Models of experts with the split backend: each side weights and adds up what it has of the experts' results, and only
the sums are joined. Logits against stock llama.cpp, and the bytes that come back from the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import EXACT_NMSE, QUANTISED_NMSE, nmse
from e2e.placed import placed
from e2e.plugin_runs import loaded, logits_of, logits_of_sequences, with_plugin
from e2e.split_cases import ffn, split_placements, written

from ggml_bridge.split import SplitStats
from oallama.cost.blocks import is_ffn, split_blocks
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.plan.split import slice_counts

pytestmark = pytest.mark.usefixtures("prober")

ARCHITECTURES = ("llama-moe", "qwen3moe", "qwen2moe", "deepseek2", "deepseek2-fused", "granitemoe", "gpt-oss")
DEVICES = ("cpu-pair", "emulated:vram=2GiB,scale=1,values=real")
TRAINED = Path(__file__).parents[2] / "models" / "oallama-stories-moe-q4_0.gguf"
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 300, 64)]  # one micro-batch


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with open_device(request.param) as opened:
        yield opened.name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("arch", "n_used"), [*((arch, 2) for arch in ARCHITECTURES), ("llama-moe", 1), ("llama-moe", 8), ("qwen3moe", 5)]
)
def test_experts_compute_the_same(arch: str, n_used: int, device: str, models: Path) -> None:
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
