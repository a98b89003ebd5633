"""Splits on a real card against stock llama.cpp on the CPU: half of each FFN on the card (CC and GG), a quarter of it
streamed there (CC, CG, GG), and a part of each batch whose CC the card computes as well (n_g).

Run by scripts/gpu_run; OALLAMA_TEST_GPU names the device. Bounds are for NMSE of logits: a card multiplies F32 with
less (TF32), and unpacks quantised weights where the CPU quantises the activations; in a small model a rounding can send
a token to another expert. A wrong kernel, cut or join gives 0.1 to 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import nmse
from e2e.placed import placed
from e2e.plugin_runs import loaded, logits_of, with_plugin
from e2e.split_cases import ffn, split_placements
from gguf_factory import write_gguf

from oallama.core.types import StreamSettings
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.device.spec import parse_device

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("OALLAMA_TEST_GPU", "CUDA0")
N_TOKENS = 40
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 300, N_TOKENS)]
TOKEN_TABLE = ((1, 0), (8, 4), (N_TOKENS, 24))
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
         "IQ4_XS", "MXFP4")  # fmt: skip
CASES = [*(("llama", kind) for kind in TYPES), ("phi3", "Q8_0"),  # phi3: gate and up in one weight
         *((arch, kind) for arch in ("llama-moe", "qwen3moe") for kind in ("F16", "Q4_0"))]  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """The ggml name of the card."""
    named = DEVICE.split(":")[0]
    if ":" not in DEVICE and not any(each.name == named for each in load_bridge().devices()):
        pytest.skip(f"there is no {named}: scripts/gpu_run runs these on a card")
    with open_device(parse_device(DEVICE)) as opened:
        yield opened.name


def bound(arch: str, weight_type: str) -> float:
    if "moe" in arch:
        return 1e-2
    return 1e-4 if weight_type == "F32" else 1e-3


@pytest.mark.parametrize("mode", ["split", "stream", "tokens"])
@pytest.mark.parametrize(("arch", "weight_type"), CASES)
def test_a_split_gives_the_logits_of_stock(tmp_path: Path, device: str, arch: str, weight_type: str, mode: str) -> None:
    sizes = {} if arch == "phi3" else {"n_ff": 1024}
    case = placed(write_gguf(tmp_path / "case.gguf", arch, weight_type=weight_type, **sizes))
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    placements = split_placements(case.operators, ffn(0.5), "CPU" if mode == "tokens" else None)
    if mode == "stream":
        placements = tuple(replace(p, gg=p.gg / 2, cg=p.gg / 2) if 0 < p.gg < 1 else p for p in placements)
    if mode == "tokens":
        case = replace(case, plan=replace(case.plan, token_assignment=TOKEN_TABLE, streaming=StreamSettings()))
    with loaded(Path(case.model.path)) as context:
        wanted = {n: logits_of(context, TOKENS[:n]) for n in (1, N_TOKENS)}
    split = load_bridge().split()
    before = split.stats()
    with with_plugin(case, placements, given, device) as context:
        found = {n: logits_of(context, TOKENS[:n]) for n in (1, N_TOKENS)}
    done = split.stats() - before
    for n, logits in found.items():
        error = nmse(logits, wanted[n])
        assert error <= bound(arch, weight_type), f"{n} tokens: {error:.2g}"
    assert done.bytes_in > 0, "the device computed nothing"
    assert mode == "split" or done.bytes_streamed > 0, "nothing was streamed"
