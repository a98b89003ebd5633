"""Blocks whose attention is on the device: they live there. What crosses for them, and that logits are stock's."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import REAL
from e2e.forced import Forced, ffn, forced, written
from e2e.logits import TOKENS, assert_stock, placed_logits
from e2e.plugin_runs import counted
from seeds import crossed

from oallama.cost.blocks import is_ffn
from oallama.model.memory import no_alloc_memory

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

DEVICES = ("rpc-worker", REAL)
DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "phi3", "minicpm3", "gpt2")
EXPERTS = ("llama-moe", "qwen3moe", "qwen2moe")
F32 = 4


def beside_the_ffns(path: Path, device: str, gg: float = 0.5, cg: float = 0.0, **options: object) -> Forced:
    """Whole on the device: all that is no FFN, and routers."""
    return forced(path, device, ffn(gg, cg), whole=lambda operator: not is_ffn(operator), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "device"),
    crossed([*((arch, "F16") for arch in (*DENSE, *EXPERTS)), ("llama", "Q4_0"), ("qwen3moe", "Q4_0")], DEVICES),
)
def test_a_block_computes_the_same_where_its_neighbours_are(model: tuple[str, str], device: str, models: Path) -> None:
    arch, weight_type = model
    path = written(models, arch, weight_type=weight_type)
    with beside_the_ffns(path, device).llama() as llama:
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)


@pytest.mark.parametrize(("device", "arch"), crossed(DEVICES, ["llama", "qwen3moe"]))
def test_streamed_parts_and_tokens(device: str, arch: str, models: Path) -> None:
    """CG, and CG' for some tokens of a prompt."""
    path = written(models, arch, weight_type="F16")
    case = beside_the_ffns(path, device, 0.25, 0.25, layout="CPU", token_assignment=((32, 0), (64, 20)))
    with case.with_breakdown(staging=16 << 20).llama() as llama:
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)


@pytest.mark.parametrize("device", DEVICES)
def test_what_crosses_for_a_token(device: str, models: Path) -> None:
    """The input of each block comes to the host once, and what the host has made of it goes back once."""
    case = beside_the_ffns(written(models, "llama", weight_type="Q4_0"), device)
    with case.llama() as llama:
        placed_logits(llama, TOKENS[:2])
        with counted() as done:
            placed_logits(llama, TOKENS[:1])
    n_layer, bytes_of_x = case.placer.model.n_layer, case.placer.model.n_embd * F32
    assert (done[0].bytes_out, done[0].bytes_in) == (n_layer * bytes_of_x, n_layer * bytes_of_x)
    assert done[0].n_segments == n_layer


def test_a_load_whose_device_takes_no_such_blocks_says_so(models: Path) -> None:
    """And computes the same; where the plan was made for that, there is nothing to say."""
    path = written(models, "llama", weight_type="F16")
    case = beside_the_ffns(path, f"{REAL},buffers=address")
    for residents in (True, False):
        with case.changed(residents=residents).llama() as llama:
            assert_stock(placed_logits(llama, TOKENS), path, TOKENS)
            said = [warning for warning in llama.warnings if warning.startswith("not as planned: blocks cannot live")]
            assert len(said) == residents, llama.warnings


def test_a_no_alloc_load_makes_the_splits_of_the_real_one(models: Path) -> None:
    """Of a layer: the device's, ours, the device's; and nothing on the CPU between them."""
    path = written(models, "llama", weight_type="Q4_0")
    there, on_host = (beside_the_ffns(path, "rpc-worker", residents=residents) for residents in (True, False))
    dry, plan = there.placer.no_alloc_loads, there.plan
    settings = dry.settings(plan.workload, there.placer.placed(plan), there.placer.attention)
    assert settings.split_texts[0].count(" resident\n") == 3 * there.placer.model.n_layer
    assert no_alloc_memory(settings).n_splits_decode == 2 * there.placer.model.n_layer + 2, (
        "and the embedding on the CPU"
    )
    assert on_host.plan.memory.compute < plan.memory.compute, "results of the blocks are there too"
