"""The scheduler model of cost/graph.py against what llama.cpp logs: the number of graph splits of a placement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from e2e.forced import written
from e2e.logits import ARCHITECTURES

from oallama.cost.graph import device_copies
from oallama.model.memory import no_alloc_memory
from oallama.placer import Placer
from oallama.planner.placement import Placement

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

N_PLACEMENTS = 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_predicted_splits_are_those_llama_cpp_makes(arch: str, models: Path) -> None:
    placer = Placer.load(written(models, arch), device="rpc-worker", threads=1, n_ctx=256, n_ubatch=64)
    graph, workload, rng = placer.graph, placer.workload(8, 8), random.Random(arch)
    found, expected = [], []
    for share in rng.sample((0.0, 0.2, 0.5, 0.8, 1.0), N_PLACEMENTS):
        first = rng.choice((0, 0, 1, graph.n_layer))
        on_device = [layer >= first and rng.random() < share for layer in graph.operator_layer]
        found.append(device_copies(graph, on_device, first).splits)
        settings = placer.no_alloc_loads.settings(workload, Placement.whole(on_device, first), placer.attention)
        expected.append(no_alloc_memory(settings).n_splits_decode)
    assert found == expected
