"""A property of whole models: whatever part of each operator is CC, CG and GG, llama.cpp's logits are stock's, within
what the order of sums can change (test_split_logits.py says how much), and the same again when the model is loaded
anew: so a seed gives one text under any plan, as it does under stock llama.cpp.

Every kind of sub-graph and every type, with a tight bound: tests/native/split_test_random.cpp. This is what llama.cpp
makes of it. A model of experts gets weights of floating point: quantised ones may send a token to another expert.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import ARCHITECTURES, EXACT_NMSE, QUANTISED_NMSE, movable, nmse
from e2e.placed import Placed, placed
from e2e.plugin_runs import loaded, logits_of, with_plugin
from e2e.split_cases import block_of, split_placements, written
from make_model import HALF_SCALES
from seeds import SEEDS

from oallama.core.types import OperatorPlacement
from oallama.device.opening import open_device
from oallama.model.cut import cut_extent, cut_granularity

pytestmark = pytest.mark.usefixtures("prober")

N = 8  # models of each seed and device
FLOAT = ("F32", "F16")
QUANTISED = ("BF16", *HALF_SCALES, "IQ1_M", "MXFP4")  # BF16 rounds activations as coarsely: 1.3e-6 was seen
OF_EXPERTS = ("llama-moe", "qwen3moe")


@pytest.fixture(scope="module", params=["cpu-pair", "emulated:vram=2GiB,scale=1,values=real"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with open_device(request.param) as opened:
        yield opened.name


def random_placements(case: Placed, rng: random.Random) -> tuple[OperatorPlacement, ...]:
    """Each block of operators: whole on either side, or cut anywhere; any part of what is not CC is streamed."""
    shares: dict[object, float] = {}
    for operator in case.operators:
        shares.setdefault(block_of(operator), rng.choice((0.0, 1.0, rng.random(), rng.random())))
    there = split_placements(case.operators, lambda o: shares[block_of(o)] if movable(o) else None)
    streamed = {block: rng.choice((0.0, 1.0, rng.random())) for block in shares}
    made = []
    for operator, placement in zip(case.operators, there, strict=True):
        extent = cut_extent(operator)
        rest = round(placement.gg * extent)
        gg = min(rest, round((1 - streamed[block_of(operator)]) * rest / 256) * 256)  # a multiple of every granularity
        assert 256 % cut_granularity(operator) == 0
        made.append(replace(placement, gg=gg / extent, cg=(rest - gg) / extent))
    return tuple(made)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_plan_computes_what_stock_does(seed: str, device: str, tmp_path: Path) -> None:
    for i in range(N):
        rng = random.Random(f"{SEEDS[seed]}/{i}")
        arch = rng.choice(ARCHITECTURES)
        weight_type = rng.choice(FLOAT if arch in OF_EXPERTS else (*FLOAT, *QUANTISED))
        case = placed(written(tmp_path, arch, weight_type=weight_type))
        tokens = [rng.randrange(300) for _ in range(rng.randint(1, 150))]
        placements = random_placements(case, rng)
        given = [operator.name for operator in case.operators if movable(operator)]
        told = f"seed {SEEDS[seed]}, model {i}: {arch}, {weight_type}, {len(tokens)} tokens"
        with loaded(Path(case.model.path)) as context:
            wanted = logits_of(context, tokens)
        found = []
        for _ in range(2):
            with with_plugin(case, placements, given, device) as context:
                found.append(logits_of(context, tokens))
        bound = EXACT_NMSE if weight_type in FLOAT else QUANTISED_NMSE
        assert nmse(found[0], wanted) <= bound, told
        assert np.array_equal(*found), told
