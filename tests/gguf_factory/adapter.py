"""Writes small random LoRA adapters, as llama-server takes them with --lora."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from oallama.model.gguf_reader import read_gguf


def write_adapter(path: str | Path, model: str | Path, *, rank: int = 4, alpha: float = 8.0, of: str = "blk.") -> Path:
    """An adapter for the matrices of a model whose names begin with `of`; its part of a product is about as large as
    the model's own."""
    base = read_gguf(model)
    writer = gguf.GGUFWriter(str(path), str(base.metadata["general.architecture"]))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    rng = np.random.default_rng(1)
    for tensor in base.tensors:
        if len(tensor.shape) < 2 or not tensor.name.startswith(of) or "norm" in tensor.name:
            continue
        n_in, n_out, *rest = tensor.shape
        for suffix, shape in (("lora_a", (*rest, rank, n_in)), ("lora_b", (*rest, n_out, rank))):
            values = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
            writer.add_tensor(f"{tensor.name}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
