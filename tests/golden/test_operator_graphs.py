"""The operator list against traced graphs of 123 architectures (make_operator_graphs.py says where they come from)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from operator_trace import adjoining

from oallama.core.types import ModelInfo
from oallama.cost.graph import build_graph, device_copies
from oallama.model.gguf_file import GgufFile, MetadataEntry, TensorInfo
from oallama.model.operators import operators

GRAPHS = json.loads((Path(__file__).parent / "operator_graphs.json").read_text())

ALTERNATIVES = {"hy_v3-moe", "mimo2-moe", "qwen3next-moe", "refact-moe"}
"""Files that hold both of two ways to compute the same, of which the graph takes one; no converted model does."""

REPEATED = {"hrm_text-dense"}
"""Runs its layers several times over: the list names each weight once."""


def gguf_of(graph: dict[str, Any]) -> GgufFile:
    """A model of these tensors, whose shapes do not matter here, but for scales: some graphs pass over them."""
    arch = graph["arch"]
    values = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in graph["metadata"].items()}
    tensors = tuple(
        TensorInfo(name, (256, 256, 2), "F32", 0, 4, "", 0) for name in graph["tensors"] if "scale" not in name
    )
    entries = {key: MetadataEntry(value, "", 0) for key, value in values.items()}
    return GgufFile(entries, tensors, (), b"")


@pytest.mark.parametrize("name", GRAPHS)
def test_the_list_is_what_the_graph_reads(name: str) -> None:
    graph = GRAPHS[name]
    listed = [operator.name for operator in operators(gguf_of(graph))]
    traced = [graph["tensors"][index] for index in graph["graph"]]
    if name in REPEATED:
        traced = list(dict.fromkeys(traced))
    if name in ALTERNATIVES:
        assert set(traced) < set(listed)
        listed = [tensor for tensor in listed if tensor in set(traced)]
    assert listed == traced


@pytest.mark.parametrize("name", [name for name, graph in GRAPHS.items() if "adjoining" in graph])
def test_operators_adjoin_where_the_graph_computes_nothing_between_them(name: str) -> None:
    graph, listed = GRAPHS[name], operators(gguf_of(GRAPHS[name]))
    traced = [(graph["tensors"][index], i in graph["adjoining"]) for i, index in enumerate(graph["graph"])]
    seen = {tensor for tensor, _ in traced}
    assert adjoining((o.name, o.adjoins) for o in listed if o.name in seen) == adjoining(traced)


@pytest.mark.parametrize("name", GRAPHS)
def test_operators_are_in_the_order_of_layers_so_that_a_placement_can_be_priced(name: str) -> None:
    graph = GRAPHS[name]
    n_layer, listed = graph["metadata"]["block_count"], operators(gguf_of(graph))
    info = ModelInfo(
        path="m.gguf", arch=graph["arch"], name="m", n_layer=n_layer, n_embd=256, n_ff=256, n_head=8, n_head_kv=8,
        n_embd_head_k=32, n_embd_head_v=32, n_expert=0, n_expert_used=0, n_vocab=256, n_ctx_train=512, file_bytes=1,
        fingerprint="f" * 64,
    )  # fmt: skip
    made = build_graph(info, listed, graph["tensors"])
    layers = [operator.layer_in(n_layer) for operator in listed]
    assert list(made.operator_layer) == layers == sorted(layers)
    nothing = device_copies(made, [False] * len(listed), n_layer + 1)
    everything = device_copies(made, [True] * len(listed), 0)
    assert (nothing.device_splits, nothing.copies_in, nothing.copies_out) == (0, 0, 0)
    assert everything.device_splits == 1
