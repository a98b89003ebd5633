"""Hyperparameters from a validated GGUF's metadata, and the ModelInfo with them."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import ModelInfo
from oallama.model.gguf_file import GgufArray, GgufFile


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The numbers that determine tensor shapes. Tuples have one value per layer."""

    n_layer: int  # all blocks of the file
    n_layer_nextn: int  # those of the blocks, at the end, that only predict further tokens (MTP; not run in a decode)
    n_embd: int
    n_ctx_train: int
    n_vocab: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_ff_exp: tuple[int, ...]  # of one routed expert; 0: the file does not say
    n_expert: int
    n_expert_used: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int


def number(gguf: GgufFile, key: str, default: int = 0) -> int:
    """The integer under `<arch>.<key>`, or `default`."""
    value = gguf.metadata.get(f"{gguf.arch}.{key}")
    return value if isinstance(value, int) else default


def per_layer(gguf: GgufFile, key: str, n_layer: int) -> tuple[int, ...]:
    """Return the integers under `<arch>.<key>`, one per layer; a single value is repeated."""
    value = gguf.metadata.get(f"{gguf.arch}.{key}")
    if isinstance(value, GgufArray):
        return tuple(int(v) for v in value.values)
    return (value if isinstance(value, int) else 0,) * n_layer


def vocabulary_size(gguf: GgufFile) -> int:
    """Number of tokens: the tokenizer's, else `<arch>.vocab_size`, else the rows of the embedding."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return len(tokens)
    embedding = gguf.tensor_by_name.get("token_embd.weight")
    rows = embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0
    return number(gguf, "vocab_size", rows)


def hyperparameters(gguf: GgufFile) -> Hyperparameters:
    """Read them as llama.cpp does: n_head_kv defaults to n_head, the head width to n_embd / n_head."""
    n_layer = number(gguf, "block_count")
    n_embd = number(gguf, "embedding_length")
    n_head = per_layer(gguf, "attention.head_count", n_layer)
    head = n_embd // max(n_head) if max(n_head, default=0) else 0
    has_kv = f"{gguf.arch}.attention.head_count_kv" in gguf.metadata
    return Hyperparameters(
        n_layer=n_layer,
        n_layer_nextn=number(gguf, "nextn_predict_layers"),
        n_embd=n_embd,
        n_ctx_train=number(gguf, "context_length"),
        n_vocab=vocabulary_size(gguf),
        n_head=n_head,
        n_head_kv=per_layer(gguf, "attention.head_count_kv", n_layer) if has_kv else n_head,
        n_ff=per_layer(gguf, "feed_forward_length", n_layer),
        n_ff_exp=per_layer(gguf, "expert_feed_forward_length", n_layer),
        n_expert=number(gguf, "expert_count"),
        n_expert_used=per_layer(gguf, "expert_used_count", n_layer),
        n_embd_head_k=number(gguf, "attention.key_length", head),
        n_embd_head_v=number(gguf, "attention.value_length", head),
    )


def model_info(gguf: GgufFile) -> ModelInfo:
    """Return the hyperparameters as core.types.ModelInfo. n_ff of a model with experts only is a single expert's."""
    h = hyperparameters(gguf)
    name, template = (gguf.metadata.get(key) for key in ("general.name", "tokenizer.chat_template"))
    return ModelInfo(
        path=gguf.path,
        arch=gguf.arch,
        name=name if isinstance(name, str) else "",
        n_layer=h.n_layer,
        n_embd=h.n_embd,
        n_ff=max(ff or exp for ff, exp in zip(h.n_ff, h.n_ff_exp, strict=True)),
        n_head=max(h.n_head),
        n_head_kv=max(h.n_head_kv),
        n_embd_head_k=h.n_embd_head_k,
        n_embd_head_v=h.n_embd_head_v,
        n_expert=h.n_expert,
        n_expert_used=max(h.n_expert_used),
        n_vocab=h.n_vocab,
        n_ctx_train=h.n_ctx_train,
        file_bytes=gguf.file_bytes,
        fingerprint=gguf.fingerprint,
        files=gguf.files,
        has_vocabulary=gguf.metadata.get("tokenizer.ggml.model", "none") != "none",
        chat_template=template if isinstance(template, str) and template else None,
    )
