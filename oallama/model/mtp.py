"""A model's block that predicts further tokens (MTP), as a draft model of a single layer.

llama.cpp runs it as a draft model in a second context over the same weights (`--spec-type draft-mtp`), and it is priced
so. It shares the model's embedding and output unless it has its own.
"""

from __future__ import annotations

from dataclasses import replace

from oallama.core.errors import UsageError
from oallama.model.gguf_file import GgufArray, GgufFile, MetadataEntry, TensorInfo
from oallama.model.hyperparameters import number

ARCHITECTURES = frozenset(
    {"bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next", "hy_v3",
     "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "step35"}
)  # fmt: skip
"""Architectures whose MTP layer llama.cpp can run (b11549, src/models). Of other architectures it loads the block
without running it."""

NO_BLOCK = "no block that predicts further tokens (MTP)"

_OWN = {"nextn.shared_head_head": "output", "nextn.shared_head_norm": "output_norm"}


def n_mtp_layers(gguf: GgufFile) -> int:
    """Return how many of the model's blocks llama.cpp can draft with."""
    blocks = number(gguf, "nextn_predict_layers")
    first = number(gguf, "block_count") - blocks
    needed = (f"blk.{first}.nextn.eh_proj.weight", "token_embd.weight", "output_norm.weight")
    is_complete = gguf.arch in ARCHITECTURES and all(name in gguf.tensor_by_name for name in needed)
    return blocks if is_complete else 0


def mtp_model(gguf: GgufFile) -> GgufFile:
    """Return the MTP layer as a model. Raises UsageError for a model without such a block, and for several of them:
    llama.cpp aborts on some such models (qwen35), and runs the blocks one after the other in the rest."""
    n_blocks = n_mtp_layers(gguf)
    if n_blocks != 1:
        problem = f"{n_blocks} blocks that predict further tokens (MTP); one is supported" if n_blocks else NO_BLOCK
        raise UsageError(f"{gguf.path} has {problem}; leave --spec mtp out, or use a draft model (-md)")
    n_layer = number(gguf, "block_count")
    layer = n_layer - number(gguf, "nextn_predict_layers")
    block = f"blk.{layer}."
    named: dict[str, TensorInfo] = {}
    for tensor in gguf.tensors:
        role, _, suffix = tensor.name.removeprefix(block).rpartition(".")
        if not tensor.name.startswith("blk."):
            named.setdefault(tensor.name, tensor)
        elif tensor.name.startswith(block):
            name = f"{_OWN[role]}.{suffix}" if role in _OWN else f"blk.0.{tensor.name.removeprefix(block)}"
            named[name] = replace(tensor, name=name)
    alone = {f"{gguf.arch}.block_count": 1, f"{gguf.arch}.nextn_predict_layers": 0}
    entries = {key: _of_layer(entry, alone.get(key), layer, n_layer) for key, entry in gguf.entries.items()}
    raw = f"mtp {gguf.fingerprint}".encode()
    return replace(gguf, entries=entries, tensors=tuple(named.values()), raw=raw)


def _of_layer(entry: MetadataEntry, value: int | None, layer: int, n_layer: int) -> MetadataEntry:
    """The entry of one layer, of one that has a value for each. value: another; None: as it is."""
    if value is not None:
        return replace(entry, value=value)
    is_each = isinstance(entry.value, GgufArray) and entry.value.length == n_layer and entry.value.type != "string"
    return replace(entry, value=entry.value[layer], type=entry.value.type) if is_each else entry
