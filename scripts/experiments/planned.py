"""Models as planning knows them, by their shape: neither weights nor native code are needed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from make_model import write_shape
from model_shapes import KNOWN

from oallama.core.types import ModelInfo, Operator
from oallama.cost.graph import Graph, build_graph
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators


@dataclass(frozen=True)
class Planned:
    """A model, its operators and its graph."""

    info: ModelInfo
    operators: tuple[Operator, ...]
    graph: Graph

    @property
    def n_bytes(self) -> int:
        """Of the operators."""
        return sum(operator.bytes for operator in self.operators)


@cache
def planned(name: str, type_name: str = "Q4_0", n_layer: int | None = None) -> Planned:
    """A known shape with all matrices of one type, by a file that has headers only. n_layer: so many of its layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(Path(folder) / f"{name}.gguf", KNOWN[name].with_layers(n_layer), type_name, empty=True)
        gguf = read_gguf(path)
        info, found = model_info(gguf), tuple(operators(gguf))
        return Planned(info, found, build_graph(info, found, [tensor.name for tensor in gguf.tensors]))
