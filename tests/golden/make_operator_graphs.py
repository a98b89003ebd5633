"""Makes operator_graphs.json: what the graphs of many architectures read, as traced from real decodes.

The models come from llama.cpp's own tests, which write a tiny one of every architecture it knows (`test-llama-archs -o
DIRECTORY`, built from the sources of llama-cpp-python 0.3.36):

    PYTHONPATH=tests python tests/golden/make_operator_graphs.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from operator_trace import tracing

from ggml_bridge.errors import ChildDied, ChildTimeout
from oallama.core.errors import ModelFileError
from oallama.model.gguf_reader import read_gguf

KEYS = ("block_count", "nextn_predict_layers", "attention.sliding_window", "use_parallel_residual")
"""The hyperparameters that the order depends on."""


if __name__ == "__main__":
    directory, graphs = sys.argv[1], {}
    for path in sorted(Path(directory).glob("*.gguf")):
        try:
            gguf = read_gguf(path)
            with tracing() as trace:
                traced = [name for name, *_ in trace(path)]
        except (ModelFileError, ChildDied, ChildTimeout, ValueError) as error:
            print(error, file=sys.stderr)
            continue
        names = [tensor.name for tensor in gguf.tensors]
        metadata = {key: gguf.metadata[f"{gguf.arch}.{key}"] for key in KEYS if f"{gguf.arch}.{key}" in gguf.metadata}
        graph = [names.index(name) for name in traced]
        graphs[path.stem] = {"arch": gguf.arch, "metadata": metadata, "tensors": names, "graph": graph}
    lines = [f"{json.dumps(name)}: {json.dumps(graph, separators=(',', ':'))}" for name, graph in graphs.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (Path(__file__).parent / "operator_graphs.json").write_text(text)
