"""Hostile files whose container is sound and whose model is not: hyperparameters, vocabulary, types, shapes."""

from __future__ import annotations

import math
from typing import Any

from gguf_factory.raw import GGML_IDS, RawGguf, RawTensor, u32, u64

_Q = "blk.0.attn_q.weight"


def _u32(key: str, value: int) -> Any:
    return lambda g: g.set(f"llama.{key}", value)


def _f32(key: str, value: float) -> Any:
    return lambda g: g.set(f"llama.{key}", value, "float32")


def _tokens(g: RawGguf, change: dict[int, str | bytes]) -> None:
    tokens: list[Any] = [f"t{i}" for i in range(264)]
    for i, token in change.items():
        tokens[i] = token
    g.set_array("tokenizer.ggml.tokens", "string", tokens)


def _byte_token(g: RawGguf) -> None:
    g.set("tokenizer.ggml.model", "plamo2", "string")
    _tokens(g, {7: "<0x-1>"})
    g.set_array("tokenizer.ggml.token_type", "int32", [6 if i == 7 else 1 for i in range(264)])


def _experts(g: RawGguf, n_expert: int, used: int, extents: int, **more: int) -> None:
    """Turn the FFN into experts, whose tensors hold `extents` of them."""
    g.set("llama.expert_count", n_expert)
    g.set("llama.expert_used_count", used)
    for key, value in more.items():
        g.set(f"llama.{key}", value)
    g.tensors.append(RawTensor(b"blk.0.ffn_gate_inp.weight", [64, n_expert], 0, bytes(4 * 64 * n_expert)))
    for role in ("gate", "up", "down"):
        g.remove(f"blk.0.ffn_{role}.weight")
        data = bytes(4 * 64 * 64 * extents)
        g.tensors.append(RawTensor(f"blk.0.ffn_{role}_exps.weight".encode(), [64, 64, extents], 0, data))


def _only(g: RawGguf, *names: str) -> None:
    g.tensors = [tensor for tensor in g.tensors if tensor.name.decode() in names]


def _extra_block(g: RawGguf) -> None:
    g.tensors.append(RawTensor(b"blk.9.attn_q.weight", [64, 64], 0, bytes(4 * 64 * 64)))


def _wrapping_heads(g: RawGguf) -> None:
    """2^16 heads 2^16 + 1 wide make 2^32 + 2^16, which is 2^16 to a uint32."""
    g.set("llama.attention.head_count", 2**16)
    g.set("llama.attention.key_length", 2**16 + 1)
    g.set("llama.attention.value_length", 2**16 + 1)


CASES = {
    "no architecture": ("lack 'general.architecture'", lambda g: g.drop("general.architecture")),
    "architecture a number": ("of type uint32 instead of string", lambda g: g.set("general.architecture", 1)),
    "architecture a format string": (
        "names no architecture",
        lambda g: g.set("general.architecture", "%s%n", "string"),
    ),
    "architecture a path": ("names no architecture", lambda g: g.set("general.architecture", "../x", "string")),
    "projector": ("a vision or audio projector", lambda g: g.set("general.architecture", "clip", "string")),
    "adapter": ("of type 'adapter'", lambda g: g.set("general.type", "adapter", "string")),
    "name a number": ("'general.name' is of type uint32", lambda g: g.set("general.name", 3)),
    "chat template a number": ("'tokenizer.chat_template' is of type", lambda g: g.set("tokenizer.chat_template", 3)),
    "no blocks": ("'llama.block_count' is 0, not within 1", _u32("block_count", 0)),
    "513 blocks": ("'llama.block_count' is 513", _u32("block_count", 513)),
    "2^32-1 blocks": ("'llama.block_count' is 4294967295", _u32("block_count", 2**32 - 1)),
    "block count missing": ("lack 'llama.block_count'", lambda g: g.drop("llama.block_count")),
    "block count as uint64": ("of type uint64 instead of uint32", lambda g: g.set("llama.block_count", 1, "uint64")),
    "block count as string": ("of type string instead of uint32", lambda g: g.set("llama.block_count", "1", "string")),
    "a block without tensors": ("block 1 has no tensors", _u32("block_count", 2)),
    "a tensor beyond the blocks": ("beyond the 1 blocks", _extra_block),
    "only blocks that predict ahead": ("which leaves none", _u32("nextn_predict_layers", 1)),
    "more dense blocks than blocks": ("more leading dense blocks", _u32("leading_dense_block_count", 2)),
    "embedding 0": ("'llama.embedding_length' is 0", _u32("embedding_length", 0)),
    "embedding 2^31": ("'llama.embedding_length' is 2147483648", _u32("embedding_length", 2**31)),
    "embedding missing": ("lack 'llama.embedding_length'", lambda g: g.drop("llama.embedding_length")),
    "embedding another width": ("token_embd.weight has shape (64, 264)", _u32("embedding_length", 128)),
    "context 0": ("'llama.context_length' is 0", _u32("context_length", 0)),
    "context 2^32-1": ("'llama.context_length' is 4294967295", _u32("context_length", 2**32 - 1)),
    "heads 0": ("the metadata state no heads", _u32("attention.head_count", 0)),
    "heads missing": ("the metadata state no heads", lambda g: g.drop("llama.attention.head_count")),
    "heads 2^32-1": ("'llama.attention.head_count' is 4294967295", _u32("attention.head_count", 2**32 - 1)),
    "KV heads that do not divide": ("which does not divide", _u32("attention.head_count_kv", 3)),
    "heads for each of three layers": (
        "has 3 elements for 1 layers",
        lambda g: g.set_array("llama.attention.head_count", "uint32", [2, 2, 2]),
    ),
    "heads below zero": (
        "is -1, not within 0",
        lambda g: g.set_array("llama.attention.head_count", "int32", [-1]),
    ),
    "heads as strings": (
        "of type array[string] instead of uint32",
        lambda g: g.set_array("llama.attention.head_count", "string", ["2"]),
    ),
    "heads times width that wrap": ("more than llama.cpp can count", _wrapping_heads),
    "head width 0": ("2 heads in an embedding of 64 have no width", _u32("attention.key_length", 0)),
    "head wider than the tensors": (
        "where the hyperparameters demand",
        lambda g: (g.set("llama.attention.key_length", 64), g.set("llama.attention.value_length", 64)),
    ),
    "keys wider than values": ("which llama does not allow", _u32("attention.value_length", 64)),
    "FFN 0": ("where the hyperparameters demand", _u32("feed_forward_length", 0)),
    "FFN 2^32-1": ("'llama.feed_forward_length' is 4294967295", _u32("feed_forward_length", 2**32 - 1)),
    "epsilon not a number": ("is not a number", _f32("attention.layer_norm_rms_epsilon", math.nan)),
    "epsilon below zero": ("not within 0 to 1", _f32("attention.layer_norm_rms_epsilon", -1.0)),
    "epsilon missing": ("lack 'llama.attention.layer", lambda g: g.drop("llama.attention.layer_norm_rms_epsilon")),
    "epsilon an integer": ("instead of float32", _u32("attention.layer_norm_rms_epsilon", 1)),
    "rope base 0": ("instead of a positive number", _f32("rope.freq_base", 0.0)),
    "rope base infinite": ("instead of a positive number", _f32("rope.freq_base", math.inf)),
    "rope scaling unknown": (
        "the rope scaling type is 'quadratic'",
        lambda g: g.set("llama.rope.scaling.type", "quadratic", "string"),
    ),
    "rope wider than a head": ("must be an even part", _u32("rope.dimension_count", 64)),
    "rope of nothing": ("must be an even part", _u32("rope.dimension_count", 0)),
    "rope odd": ("must be an even part", _u32("rope.dimension_count", 31)),
    "experts used of none": ("2 of 0 experts are used", _u32("expert_used_count", 2)),
    "experts none used": ("0 of 4 experts are used", lambda g: _experts(g, 4, 0, 4)),
    "experts more used than there": ("5 of 4 experts are used", lambda g: _experts(g, 4, 5, 4)),
    "1025 experts": ("'llama.expert_count' is 1025", lambda g: _experts(g, 1025, 2, 1)),
    "experts fewer in the tensors": ("does not hold 4 experts", lambda g: _experts(g, 4, 2, 1)),
    "experts in odd groups": ("4 experts in 3 groups", lambda g: _experts(g, 4, 2, 4, expert_group_count=3)),
    "expert groups none used": ("in 2 groups, 0 of them used", lambda g: _experts(g, 4, 2, 4, expert_group_count=2)),
    # vocabulary: CVE-2025-49847, -52566, llama.cpp#25508, #25969
    "no tokenizer": ("lack the tokenizer model", lambda g: g.drop("tokenizer.ggml.model")),
    "no tokens": ("the file has no vocabulary", lambda g: g.drop("tokenizer.ggml.tokens")),
    "tokens numbers": ("instead of array[string]", lambda g: g.set_array("tokenizer.ggml.tokens", "uint32", [1] * 264)),
    "token twice": ("'same', is in the vocabulary twice", lambda g: _tokens(g, {3: "same", 5: "same"})),
    "token twice up to a zero": ("is in the vocabulary twice", lambda g: _tokens(g, {3: b"a\0b", 5: b"a\0c"})),
    "token empty and spelled out": ("is in the vocabulary twice", lambda g: _tokens(g, {3: "", 5: "[EMPTY_3]"})),
    "byte token below zero": ("instead of <0x00> to <0xFF>", _byte_token),
    "scores too few": (
        "tokenizer.ggml.scores has 1 elements for 264 tokens",
        lambda g: g.set_array("tokenizer.ggml.scores", "float32", [0.0]),
    ),
    "scores bytes": (
        "tokenizer.ggml.scores is of type array[uint8]",
        lambda g: g.set_array("tokenizer.ggml.scores", "uint8", [0] * 264),
    ),
    "token types too few": (
        "tokenizer.ggml.token_type has 3 elements",
        lambda g: g.set_array("tokenizer.ggml.token_type", "int32", [1, 1, 1]),
    ),
    "token types a scalar": (
        "tokenizer.ggml.token_type is of type uint32",
        lambda g: g.set("tokenizer.ggml.token_type", 1),
    ),
    "merges numbers": (
        "tokenizer.ggml.merges is of type array[uint32]",
        lambda g: g.set_array("tokenizer.ggml.merges", "uint32", [1]),
    ),
    "special token outside": ("is 264, outside the vocabulary", lambda g: g.set("tokenizer.ggml.eos_token_id", 264)),
    "special token -1": ("is 4294967295, outside", lambda g: g.set("tokenizer.ggml.bos_token_id", 2**32 - 1)),
    "special token a string": (
        "is of type string instead of uint32",
        lambda g: g.set("tokenizer.ggml.padding_token_id", "<pad>", "string"),
    ),
    "vocabulary larger than the embedding": (
        "token_embd.weight has shape (64, 264) instead of (64, 300)",
        lambda g: (
            g.set_array("tokenizer.ggml.tokens", "string", [f"t{i}" for i in range(300)]),
            g.drop("tokenizer.ggml.token_type"),
        ),
    ),
    "dummy vocabulary of 2^31": (
        "token_embd.weight has shape",
        lambda g: (
            g.set("tokenizer.ggml.model", "none", "string"),
            g.drop("tokenizer.ggml.tokens"),
            g.set("llama.vocab_size", 2**31 - 1),
        ),
    ),
    # weights: CVE-2026-53923, and types without a kernel
    "no tensors": ("the file has no tensors", lambda g: g.tensors.clear()),
    "no embedding": ("lacks token_embd.weight", lambda g: g.remove("token_embd.weight")),
    "weights I8": ("is of type I8, which llama.cpp cannot", lambda g: g.retype(_Q, "I8", 1)),
    "weights I16": ("is of type I16, which llama.cpp cannot", lambda g: g.retype(_Q, "I16", 2)),
    "weights I32": ("is of type I32, which llama.cpp cannot", lambda g: g.retype(_Q, "I32", 4)),
    "weights I64": ("is of type I64, which llama.cpp cannot", lambda g: g.retype(_Q, "I64", 8)),
    "weights F64": ("is of type F64, which llama.cpp cannot", lambda g: g.retype(_Q, "F64", 8)),
    "weights Q8_1": ("is of type Q8_1, which llama.cpp cannot", lambda g: g.retype(_Q, "Q8_1", 36 / 32)),
    "embedding F64": ("is of type F64", lambda g: g.retype("token_embd.weight", "F64", 8)),
    "norm F16": ("which llama.cpp can only use as F32", lambda g: g.retype("output_norm.weight", "F16", 2)),
    "norm Q4_0": ("can only use as F32", lambda g: g.retype("blk.0.attn_norm.weight", "Q4_0", 18 / 32)),
    "bias F16": (
        "can only use as F32",
        lambda g: g.tensors.append(RawTensor(b"blk.0.attn_q.bias", [64], GGML_IDS["F16"], bytes(128))),
    ),
    "bias of another width": (
        "where the hyperparameters demand (64,)",
        lambda g: g.tensors.append(RawTensor(b"blk.0.attn_q.bias", [32], 0, bytes(128))),
    ),
    "query another shape": ("where the hyperparameters demand (64, 64)", lambda g: g.reshape(_Q, 64, 32)),
    "query with a third dimension": ("where the hyperparameters demand", lambda g: g.reshape(_Q, 64, 64, 2)),
    "key another shape": ("demand (64, 32)", lambda g: g.reshape("blk.0.attn_k.weight", 64, 64)),
    "down another shape": ("demand (64, 64)", lambda g: g.reshape("blk.0.ffn_down.weight", 32, 64)),
    "output another vocabulary": ("demand (64, 264)", lambda g: g.reshape("output.weight", 64, 32)),
    "embedding a vector": ("token_embd.weight has shape", lambda g: g.reshape("token_embd.weight", 64 * 264)),
    "only an embedding": ("block 0 has no tensors", lambda g: _only(g, "token_embd.weight", "output_norm.weight")),
    # names: what is there is not what it is called
    "a norm missing": ("lacks tensor 'blk.0.attn_norm.weight'", lambda g: g.remove("blk.0.attn_norm.weight")),
    "the output norm missing": ("lacks tensor 'output_norm.weight'", lambda g: g.remove("output_norm.weight")),
    "a key misspelt": (
        "is 'blk.0.attn_kk.weight' meant to be it?",
        lambda g: g.change("blk.0.attn_k.weight", name=b"blk.0.attn_kk.weight"),
    ),
    "up misspelt": (
        "lacks tensor 'blk.0.ffn_up.weight'",
        lambda g: g.change("blk.0.ffn_up.weight", name=b"blk.0.ffn_pu.weight"),
    ),
    "a weight with a bias's name": (
        "lacks tensor 'blk.0.attn_output.weight'",
        lambda g: g.change("blk.0.attn_output.weight", name=b"blk.0.attn_output.weights"),
    ),
    "a norm of another length": ("demand (64,)", lambda g: g.reshape("blk.0.ffn_norm.weight", 32)),
    "the output norm of another length": ("demand (64,)", lambda g: g.reshape("output_norm.weight", 32)),
    "rope factors of another length": (
        "demand (16,)",
        lambda g: g.tensors.append(RawTensor(b"rope_freqs.weight", [32], 0, bytes(128))),
    ),
    # templates are text until they are rendered, but their length is checked like any string's
    "chat template without end": (
        "bytes, more than the file has left",
        lambda g: g.set_raw(b"tokenizer.chat_template", u32(8) + u64(2**50)),
    ),
}
