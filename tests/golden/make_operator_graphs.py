"""Makes operator_graphs.json: what the graphs of many architectures read, as traced from real decodes.

The models come from llama.cpp's own tests, which write a tiny one of every architecture it knows (`test-llama-archs -o
DIRECTORY`, built from the sources of the llama.cpp that is installed):

    PYTHONPATH=tests python tests/golden/make_operator_graphs.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from operator_trace import tracing

from ggml_bridge.errors import ChildDied, ChildTimeout
from oallama.core.errors import ModelFileError
from oallama.model.gguf_reader import read_gguf

KEYS = (
    "block_count", "nextn_predict_layers", "leading_dense_block_count", "use_parallel_residual",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.rope_pattern", "rope.scaling.finetuned",
)  # fmt: skip
"""The hyperparameters that the order depends on, and what lies between."""


if __name__ == "__main__":
    directory, graphs = sys.argv[1], {}
    for path in sorted(Path(directory).glob("*.gguf")):
        try:
            gguf = read_gguf(path)
            with tracing() as trace:
                traced = trace(path)
        except (ModelFileError, ChildDied, ChildTimeout, ValueError) as error:
            print(error, file=sys.stderr)
            continue
        names = [tensor.name for tensor in gguf.tensors]
        found = {key: gguf.metadata.get(f"{gguf.arch}.{key}") for key in KEYS}
        metadata = {
            key: list(value) if isinstance(value, Sequence) else value
            for key, value in found.items() if value is not None
        }  # fmt: skip
        graph = [names.index(name) for name, *_ in traced]
        adjoining = [i for i, row in enumerate(traced) if row[4]]
        graphs[path.stem] = {
            "arch": gguf.arch, "metadata": metadata, "tensors": names, "graph": graph, "adjoining": adjoining
        }  # fmt: skip
    lines = [f"{json.dumps(name)}: {json.dumps(graph, separators=(',', ':'))}" for name, graph in graphs.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (Path(__file__).parent / "operator_graphs.json").write_text(text)
