"""The scheduler model of cost/graph.py against what llama.cpp logs: the number of graph splits of a placement."""

from __future__ import annotations

import random
from pathlib import Path

import gguf_factory
import pytest
from e2e.placed import probe

from oallama.core.types import OperatorPlacement
from oallama.cost.graph import build_graph, crossings
from oallama.device.load_params import LoadSettings
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.plan.patterns import host_patterns

pytestmark = pytest.mark.usefixtures("prober")

N_PLACEMENTS = 2
EXACT = ("llama", "llama-tied", "llama-moe", "qwen2", "qwen3", "qwen3moe", "gemma2", "phi3", "minicpm3", "gpt2")


@pytest.mark.parametrize("arch", EXACT)
def test_predicted_splits_are_those_llama_cpp_makes(arch: str, tmp_path: Path) -> None:
    path = gguf_factory.write_gguf(tmp_path / f"{arch}.gguf", arch)
    gguf = read_gguf(path)
    model, ops = model_info(gguf), operators(gguf)
    graph = build_graph(model, ops, [tensor.name for tensor in gguf.tensors])
    rng = random.Random(arch)
    found, expected = [], []
    for share in rng.sample((0.0, 0.2, 0.5, 0.8, 1.0), N_PLACEMENTS):
        first = rng.choice((0, 0, 1, model.n_layer))
        on_device = [graph.operator_layer[i] >= first and rng.random() < share for i in range(len(ops))]
        placements = [
            OperatorPlacement(name=op.name, gg=float(there), cg=0.0, cc=float(not there))
            for op, there in zip(ops, on_device, strict=True)
        ]
        probed = probe(
            LoadSettings(
                path=str(path),
                device="rpc-worker",
                n_ctx=256,
                n_ubatch=64,
                n_gpu_layers=model.n_layer + 1 - first,
                host_patterns=host_patterns(ops, placements, [tensor.name for tensor in gguf.tensors]),
                n_threads=1,
            )
        )
        found.append(crossings(graph, on_device, first).splits)
        expected.append(probed.n_splits_decode)
    assert found == expected
