"""Blocks whose attention is on the device: they live there. What crosses for them, and that logits are stock's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from e2e.logits import QUANTISED_NMSE, TOKENS, engine_of, nmse, stock_logits
from e2e.split_cases import ffn, split_case, streaming_case, written
from seeds import crossed

from oallama.core.types import Operator
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.model.memory import probe_memory

pytestmark = pytest.mark.usefixtures("prober")

DEVICES = ("rpc-worker", "emulated:vram=2GiB,scale=1,values=real")
DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "phi3", "minicpm3", "gpt2")
EXPERTS = ("llama-moe", "qwen3moe", "qwen2moe")
N_UBATCH = 64
F32 = 4
BOUNDS = {"F16": 1e-6, "Q4_0": QUANTISED_NMSE}


def beside_the_ffns(operator: Operator) -> bool:
    """Whole on the device: all that is no FFN, and routers."""
    return not is_ffn(operator)


@pytest.mark.parametrize(
    ("model", "device"),
    crossed([*((arch, "F16") for arch in (*DENSE, *EXPERTS)), ("llama", "Q4_0"), ("qwen3moe", "Q4_0")], DEVICES),
)
def test_a_block_computes_the_same_where_its_neighbours_are(model: tuple[str, str], device: str, models: Path) -> None:
    arch, weight_type = model
    path = written(models, arch, weight_type=weight_type)
    with engine_of(split_case(path, device, ffn(0.5), whole=beside_the_ffns)) as engine:
        found = engine.logits(TOKENS)
        assert nmse(found, stock_logits(path, TOKENS, n_ubatch=N_UBATCH)) <= BOUNDS[weight_type]


@pytest.mark.parametrize("device", DEVICES)
def test_what_crosses_for_a_token(device: str, models: Path) -> None:
    """The input of each block comes to the host once, and what the host has made of it goes back once."""
    case = split_case(written(models, "llama", weight_type="Q4_0"), device, ffn(0.5), whole=beside_the_ffns)
    backend = load_bridge().split()
    with engine_of(case) as engine:
        engine.logits(TOKENS[:2])
        before = backend.stats()
        engine.logits(TOKENS[:1])
        done = backend.stats() - before
    bytes_of_x = case.model.n_embd * F32
    assert (done.bytes_out, done.bytes_in) == (case.model.n_layer * bytes_of_x, case.model.n_layer * bytes_of_x)
    assert done.n_phases == case.model.n_layer


def test_a_load_whose_device_takes_no_such_blocks_says_so(models: Path) -> None:
    """And computes the same; where the plan was made for that, there is nothing to say."""
    path = written(models, "llama", weight_type="F16")
    case = split_case(path, f"{DEVICES[1]},buffers=address", ffn(0.5), whole=beside_the_ffns)
    wanted = stock_logits(path, TOKENS, n_ubatch=N_UBATCH)
    for residents in (True, False):
        with engine_of(replace(case, plan=replace(case.plan, residents=residents))) as engine:
            assert nmse(engine.logits(TOKENS), wanted) <= BOUNDS["F16"]
            said = [warning for warning in engine.warnings if warning.startswith("not as planned: blocks cannot live")]
            assert len(said) == residents, engine.warnings


def test_a_dry_load_makes_the_splits_of_the_real_one(models: Path) -> None:
    """Of a layer: the device's, ours, the device's; and nothing on the CPU between them."""
    case = split_case(written(models, "llama", weight_type="Q4_0"), "rpc-worker", ffn(0.5), whole=beside_the_ffns)
    assert case.request.split_text.count(" resident\n") == 3 * case.model.n_layer
    assert case.probed.n_splits_decode == 2 * case.model.n_layer + 2, "and the embedding on the CPU"
    on_host = probe_memory(replace(case.request, split_text=case.request.split_text.replace(" resident", "")))
    assert on_host.on_device("compute") < case.probed.on_device("compute"), "results of the blocks are there too"


@pytest.mark.parametrize(("device", "arch"), crossed(DEVICES, ["llama", "qwen3moe"]))
def test_streamed_parts_and_tokens(device: str, arch: str, models: Path) -> None:
    """CG, and CG' for some tokens of a prompt."""
    path = written(models, arch, weight_type="F16")
    whole = split_case(path, device, ffn(0.5), whole=beside_the_ffns)
    case = streaming_case(path, device, lambda _: (0.25, 0.25), "CPU", token_assignment=((32, 0), (64, 20)))
    streamed = {p.name: p for p in case.plan.operators}
    placements = tuple(
        streamed[o.name] if is_ffn(o) else p for o, p in zip(whole.operators, whole.plan.operators, strict=True)
    )
    record = replace(
        whole.plan,
        operators=placements,
        token_assignment=((32, 0), (64, 20)),
        memory=replace(whole.plan.memory, staging=16 << 20),
    )
    with engine_of(replace(whole, plan=record)) as engine:
        assert nmse(engine.logits(TOKENS), stock_logits(path, TOKENS, n_ubatch=N_UBATCH)) <= BOUNDS["F16"]
