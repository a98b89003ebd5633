"""The hostile corpus: files made by hand that stock llama.cpp refuses, dies on or hangs on, and what ours must say."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_factory.raw import TYPES, RawGguf, string, tiny_llama, u32, u64

Change = Callable[[RawGguf], Any]

BIG = 2**64 - 1
Q = "blk.0.attn_q.weight"
STRING, ARRAY, UINT32, EMPTY = u32(TYPES["string"]), u32(TYPES["array"]), u32(TYPES["uint32"]), u64(0)


def file(**fields: Any) -> Change:
    """Other fields of the file."""
    return lambda g: vars(g).update(fields)


def value(key: str, value: Any, type: str = "uint32") -> Change:
    """Another value of metadata."""
    return lambda g: g.set(key, value, type)


def no(key: str) -> Change:
    return lambda g: g.metadata.pop(key)


def record(key: Any, value: bytes = UINT32 + u32(1)) -> Change:
    """One more record of metadata, its value with the type in front."""
    return lambda g: g.more.append(string(key) + value)


def tensor(name: str = Q, /, **fields: Any) -> Change:
    """Other fields of a tensor."""
    return lambda g: vars(g.tensor(name)).update(fields)


def without(name: str) -> Change:
    return lambda g: g.tensors.remove(g.tensor(name))


def also(name: str, *shape: int, type: str = "F32") -> Change:
    """One more tensor."""
    return lambda g: g.add(name, *shape, type=type)


def all_of(*changes: Change) -> Change:
    return lambda g: [change(g) for change in changes]


def tokens(*changed: Any, n: int = 264) -> Change:
    """Another vocabulary, with these behind its first token."""
    others = (f"t{i}" for i in range(1 + len(changed), n))
    return value("tokenizer.ggml.tokens", ["t0", *changed, *others], "string")


def experts(n_expert: int, used: int, extents: int, **groups: int) -> Change:
    """Experts in the place of the FFN, whose tensors hold `extents` of them."""
    counts = {"expert_count": n_expert, "expert_used_count": used, **groups}
    names = [f"blk.0.ffn_{role}" for role in ("gate", "up", "down")]
    return all_of(
        *(value(f"llama.{key}", count) for key, count in counts.items()),
        *(without(f"{name}.weight") for name in names),
        *(also(f"{name}_exps.weight", 64, 64, extents) for name in names),
        also("blk.0.ffn_gate_inp.weight", 64, n_expert),
    )


def blocks(n: int) -> Change:
    return value("llama.block_count", n)


def heads(n: Any, type: str = "uint32") -> Change:
    return value("llama.attention.head_count", n, type)


def epsilon(x: float) -> Change:
    return value("llama.attention.layer_norm_rms_epsilon", x, "float32")


CASES: dict[str, tuple[str, Change]] = {
    "empty file": ("the file is empty", lambda g: b""),
    "magic cut": ("not a GGUF file", lambda g: b"GG"),
    "other magic": ("not a GGUF file (it begins with 'GGML')", file(magic=b"GGML")),
    "only the magic": ("the file ends inside the version", lambda g: b"GGUF"),
    "counts cut": ("the file ends inside the metadata count", lambda g: g.encode()[:20]),
    "version 0": ("GGUF version 0 is unknown", file(version=0)),
    "version 1": ("GGUF version 1 is no longer read", file(version=1)),
    "version from the future": ("GGUF version 4 is unknown", file(version=4)),
    "big-endian": ("the file is big-endian", file(version=3 << 24)),
    # CVE-2024-21836, -23605: counts that overflow an allocation
    "tensor count 2^64-1": ("tensors are claimed, more than", file(n_tensors=BIG)),
    "tensor count that wraps times a record": ("tensors are claimed", file(n_tensors=2**64 // 368 + 1)),
    "key count 2^64-1": ("metadata keys are claimed, more than", file(n_kv=BIG)),
    "key count above the file": ("metadata keys are claimed, more than", file(n_kv=10**6)),
    "one key too many": ("the name of tensor 0 claims", lambda g: file(n_kv=len(g.metadata) + 1)(g)),
    "one tensor too many": (
        "which is empty or not plain ASCII",
        lambda g: file(n_tensors=len(g.tensors) + 1)(g),
    ),
    # CVE-2024-21825, -21802, -23496; ggml#24884: strings and keys
    "empty key": ("metadata key 18 is empty", record("")),
    "key length 2^64-1": ("bytes, more than the 65535 allowed", lambda g: g.more.append(u64(BIG) + b"x" * 8)),
    "key of 70000 bytes": ("more than the 65535 allowed", record("k" * 70000)),
    "key twice": ("'llama.block_count' occurs twice", record("llama.block_count")),
    "key not UTF-8": ("is not UTF-8", record(b"\xff\xfe")),
    "key with a terminal escape": ("unprintable characters", record("\x1b[2J")),
    "key with a zero": ("unprintable characters", record("a\0b")),
    "value type 13": ("has the unknown value type 13", record("x", u32(13) + bytes(8))),
    "value type 2^32-1": ("has the unknown value type 4294967295", record("x", u32(BIG) + bytes(8))),
    "string length 2^64-1": ("claims 18446744073709551615 bytes", record("x", STRING + u64(BIG))),
    "string longer than the file": ("more than the file has left", record("x", STRING + u64(2**40))),
    "bool of value 2": ("is a bool of value 2", record("x", u32(TYPES["bool"]) + b"\x02")),
    "array of arrays": ("is an array of arrays", record("x", ARRAY + ARRAY + u64(1))),
    "array of an unknown type": ("an array of the unknown type 99", record("x", ARRAY + u32(99) + u64(1))),
    "array of 2^64-1": ("more than the file has left", record("x", ARRAY + UINT32 + u64(BIG))),
    "array count that wraps": ("more than the file has left", record("x", ARRAY + u32(TYPES["uint64"]) + u64(2**61))),
    "string array of 2^61": ("more than the file has left", record("x", ARRAY + STRING + u64(2**61))),
    "string array with an endless string": (
        "a string in the value of 'x' claims",
        record("x", ARRAY + STRING + u64(2) + string("ok") + u64(BIG - 7)),
    ),
    "string array whose lengths wrap to zero": (
        "a string in the value of 'x' claims",
        record("x", ARRAY + STRING + u64(3) + u64(2**64 - 8) + u64(2**64 - 8) + EMPTY),
    ),
    # alignment: GHSA-g4cc-763q-h9h6, llama.cpp#24997
    "alignment 0": ("instead of a power of two", value("general.alignment", 0)),
    "alignment 48": ("instead of a power of two", value("general.alignment", 48)),
    "alignment 2^31": ("instead of a power of two", value("general.alignment", 2**31)),
    "alignment 8": ("less than the 32 ggml needs", all_of(value("general.alignment", 8), file(alignment=8))),
    "alignment as uint64": ("is a uint64 instead", value("general.alignment", 32, "uint64")),
    "alignment as array": ("instead of a uint32", value("general.alignment", [32])),
    # tensor records
    "tensor name empty": ("which is empty or not plain ASCII", tensor(name="")),
    "tensor name of 64 bytes": ("more than the 63 allowed", tensor(name="n" * 64)),
    "tensor name length 2^64-1": ("more than the 63 allowed", tensor(name_length=BIG)),
    "tensor name with a line break": ("not plain ASCII", tensor(name="blk.0\nattn_q")),
    "tensor name with a zero": ("not plain ASCII", tensor(name="blk.0.attn_q.weight\0x")),
    "tensor name with a space": ("not plain ASCII", tensor(name="-ot x=CPU --help")),
    "tensor name not ASCII": ("not plain ASCII", tensor(name="blk.0.ättn_q")),
    "tensor twice": ("occurs twice", tensor(name="blk.0.attn_output.weight")),
    "no dimensions": ("has 0 dimensions", tensor(shape=[])),
    "five dimensions": ("has 5 dimensions", tensor(shape=[64, 64, 1, 1, 1])),
    "2^32-1 dimensions": ("has 4294967295 dimensions", tensor(n_dims=2**32 - 1)),
    "dimension 0": ("has no elements", tensor(shape=[64, 0])),
    "dimension -1": ("larger than 64 bits can count", tensor(shape=[64, BIG])),
    # CVE-2025-53630, CVE-2026-27940, -33298: products and sizes that wrap
    "elements that wrap to 0": ("larger than 64 bits can count", tensor(shape=[2**32, 2**32])),
    "elements that wrap to 4096": ("larger than 64 bits", tensor(shape=[64, 2**58 + 64])),
    "bytes that wrap": ("larger than 64 bits can count", tensor(shape=[2**31, 2**30])),
    "padded size that wraps": ("bytes beyond the end of the file", tensor(shape=[2**61 - 1])),
    "ggml type 43": ("unknown or removed ggml type 43", tensor(type=43)),
    "ggml type removed": ("unknown or removed ggml type 4", tensor(type=4)),
    "ggml type -1": ("unknown or removed ggml type 4294967295", tensor(type=-1)),
    "rows that are no whole blocks": ("not a multiple of Q4_0's block", tensor(shape=[48, 64], type=2)),
    # CVE-2026-7482: data outside the file or over each other
    "offset not aligned": ("not aligned to 32", tensor(offset=67600 + 8)),
    "data over each other": ("overlaps the tensor before it", tensor(offset=0)),
    "data with a gap": ("leaves a gap before it", tensor(offset=2**20)),
    "offset 2^64-32": ("leaves a gap before it", tensor(offset=2**64 - 32)),
    "last byte missing": ("beyond the end of the file", lambda g: g.encode()[:-1]),
    "data missing": ("the file ends before its tensor data", lambda g: g.head()[:-1]),
    "cut in a tensor header": ("the file ends inside the header of tensor", lambda g: g.head()[:-30]),
    "cut in the vocabulary": ("more than the file has left", lambda g: g.head()[:1500]),
    # hyperparameters
    "no architecture": ("lack 'general.architecture'", no("general.architecture")),
    "architecture a number": ("of type uint32 instead of string", value("general.architecture", 1)),
    "architecture a format string": ("not an architecture name", value("general.architecture", "%s%n", "string")),
    "architecture a path": ("not an architecture name", value("general.architecture", "../x", "string")),
    "projector": ("a vision or audio projector", value("general.architecture", "clip", "string")),
    "adapter": ("of type 'adapter'", value("general.type", "adapter", "string")),
    "name a number": ("'general.name' is of type uint32", value("general.name", 3)),
    "chat template a number": ("'tokenizer.chat_template' is of type", value("tokenizer.chat_template", 3)),
    "chat template without end": (
        "bytes, more than the file has left",
        record("tokenizer.chat_template", STRING + u64(2**50)),
    ),
    "no blocks": ("'llama.block_count' is 0, not within 1", blocks(0)),
    "513 blocks": ("'llama.block_count' is 513", blocks(513)),
    "2^32-1 blocks": ("'llama.block_count' is 4294967295", blocks(2**32 - 1)),
    "block count missing": ("lack 'llama.block_count'", no("llama.block_count")),
    "block count as uint64": ("of type uint64 instead of uint32", value("llama.block_count", 1, "uint64")),
    "block count as string": ("of type string instead of uint32", value("llama.block_count", "1", "string")),
    "only blocks that predict ahead": ("no other is left", value("llama.nextn_predict_layers", 1)),
    "embedding 0": ("'llama.embedding_length' is 0", value("llama.embedding_length", 0)),
    "embedding 2^31": ("'llama.embedding_length' is 2147483648", value("llama.embedding_length", 2**31)),
    "embedding missing": ("lack 'llama.embedding_length'", no("llama.embedding_length")),
    "embedding another width": ("token_embd.weight has shape (64, 264)", value("llama.embedding_length", 128)),
    "context 0": ("'llama.context_length' is 0", value("llama.context_length", 0)),
    "context 2^32-1": ("'llama.context_length' is 4294967295", value("llama.context_length", 2**32 - 1)),
    "heads 0": ("the metadata specify no heads", heads(0)),
    "heads missing": ("the metadata specify no heads", no("llama.attention.head_count")),
    "heads 2^32-1": ("'llama.attention.head_count' is 4294967295", heads(2**32 - 1)),
    "heads for each of three layers": ("has 3 elements for 1 layers", heads([2, 2, 2])),
    "heads below zero": ("is -1, not within 0", heads([-1], "int32")),
    "heads as strings": ("of type array[string] instead of uint32", heads(["2"], "string")),
    "heads times width that wrap": (  # 2^16 heads of 2^16 + 1 make 2^16 to a uint32
        "more than llama.cpp can count",
        all_of(heads(2**16), *(value(f"llama.attention.{side}_length", 2**16 + 1) for side in ("key", "value"))),
    ),
    "KV heads that do not divide": ("not a multiple of its", value("llama.attention.head_count_kv", 3)),
    "head width 0": ("2 heads in an embedding of 64 have width 0", value("llama.attention.key_length", 0)),
    "keys wider than values": ("which llama does not allow", value("llama.attention.value_length", 64)),
    "FFN 2^32-1": ("'llama.feed_forward_length' is 4294967295", value("llama.feed_forward_length", 2**32 - 1)),
    "epsilon not a number": ("is not a number", epsilon(math.nan)),
    "epsilon below zero": ("not within 0 to 1", epsilon(-1.0)),
    "epsilon missing": ("lack 'llama.attention.layer", no("llama.attention.layer_norm_rms_epsilon")),
    "epsilon an integer": ("instead of float32", value("llama.attention.layer_norm_rms_epsilon", 1)),
    "rope scaling unknown": (
        "the rope scaling type is 'quadratic'",
        value("llama.rope.scaling.type", "quadratic", "string"),
    ),
    "rope wider than a head": ("must be even and at most", value("llama.rope.dimension_count", 64)),
    "rope of nothing": ("must be even and at most", value("llama.rope.dimension_count", 0)),
    "rope odd": ("must be even and at most", value("llama.rope.dimension_count", 31)),
    "experts used of none": ("2 of 0 experts are used", value("llama.expert_used_count", 2)),
    "experts none used": ("0 of 4 experts are used", experts(4, 0, 4)),
    "experts more used than there": ("5 of 4 experts are used", experts(4, 5, 4)),
    "1025 experts": ("'llama.expert_count' is 1025", experts(1025, 2, 1)),
    "experts fewer in the tensors": ("does not hold 4 experts", experts(4, 2, 1)),
    "experts in odd groups": ("4 experts in 3 groups", experts(4, 2, 4, expert_group_count=3)),
    "expert groups none used": ("in 2 groups, 0 of them used", experts(4, 2, 4, expert_group_count=2)),
    # vocabulary: CVE-2025-49847, -52566, llama.cpp#25508, #25969
    "token twice": ("'same', occurs twice in the vocabulary", tokens("same", "same")),
    "token twice up to a zero": ("occurs twice in the vocabulary", tokens(b"a\0b", b"a\0c")),
    "token empty and spelled out": ("occurs twice in the vocabulary", tokens("", "[EMPTY_1]")),
    "byte token below zero": (
        "instead of <0x00> to <0xFF>",
        all_of(
            value("tokenizer.ggml.model", "plamo2", "string"),
            tokens("<0x-1>"),
            value("tokenizer.ggml.token_type", [1, 6, *[1] * 262], "int32"),
        ),
    ),
    "special token outside": ("is 264, outside the vocabulary", value("tokenizer.ggml.eos_token_id", 264)),
    "special token -1": ("is 4294967295, outside", value("tokenizer.ggml.bos_token_id", 2**32 - 1)),
    "special token a string": (
        "is of type string instead of uint32",
        value("tokenizer.ggml.padding_token_id", "<pad>", "string"),
    ),
    "vocabulary larger than the embedding": (
        "token_embd.weight has shape (64, 264) instead of (64, 300)",
        all_of(tokens(n=300), no("tokenizer.ggml.token_type")),
    ),
    "dummy vocabulary of 2^31": (
        "token_embd.weight has shape",
        all_of(
            value("tokenizer.ggml.model", "none", "string"),
            no("tokenizer.ggml.tokens"),
            value("llama.vocab_size", 2**31 - 1),
        ),
    ),
    # weights: CVE-2026-53923, and types without a kernel
    "no tensors": ("the file has no tensors", file(tensors=[])),
    "no embedding": ("lacks token_embd.weight", without("token_embd.weight")),
    "weights I8": ("is of type I8, which llama.cpp cannot", tensor(type=24)),
    "weights I64": ("is of type I64, which llama.cpp cannot", tensor(type=27)),
    "weights F64": ("is of type F64, which llama.cpp cannot", tensor(type=28)),
    "weights Q8_1": ("is of type Q8_1, which llama.cpp cannot", tensor(type=9)),
    "embedding F64": ("is of type F64", tensor("token_embd.weight", type=28)),
    "norm F16": ("which llama.cpp can only use as F32", tensor("output_norm.weight", type=1)),
    "norm Q4_0": ("can only use as F32", tensor("blk.0.attn_norm.weight", type=2)),
    "bias F16": ("can only use as F32", also("blk.0.attn_q.bias", 64, type="F16")),
    "embedding a vector": ("token_embd.weight has shape", tensor("token_embd.weight", shape=[64 * 264])),
}

LEFT_TO_LLAMA_CPP: dict[str, tuple[str, Change]] = {
    "a block without tensors": ("'blk.1.attn_norm.weight' not found", blocks(2)),
    "a tensor beyond the blocks": ("expected 13, got 12", also("blk.9.attn_q.weight", 64, 64)),
    "only an embedding": (
        "'blk.0.attn_norm.weight' not found",
        lambda g: file(tensors=[tensor for tensor in g.tensors if not tensor.name.startswith("blk")])(g),
    ),
    "head wider than the tensors": (
        "invalid n_rot: 32, expected 64",
        all_of(*(value(f"llama.attention.{side}_length", 64) for side in ("key", "value"))),
    ),
    "FFN 0": ("'blk.0.ffn_gate.weight' has wrong shape", value("llama.feed_forward_length", 0)),
    "bias of another width": ("'blk.0.attn_q.bias' has wrong shape", also("blk.0.attn_q.bias", 32)),
    "query another shape": ("'blk.0.attn_q.weight' has wrong shape", tensor(shape=[64, 32])),
    "query with a third dimension": ("'blk.0.attn_q.weight' has wrong shape", tensor(shape=[64, 64, 2])),
    "key another shape": ("'blk.0.attn_k.weight' has wrong shape", tensor("blk.0.attn_k.weight", shape=[64, 64])),
    "down another shape": ("'blk.0.ffn_down.weight' has wrong shape", tensor("blk.0.ffn_down.weight", shape=[32, 64])),
    "output another vocabulary": ("'output.weight' has wrong shape", tensor("output.weight", shape=[64, 32])),
    "a norm missing": ("'blk.0.attn_norm.weight' not found", without("blk.0.attn_norm.weight")),
    "the output norm missing": ("'output_norm.weight' not found", without("output_norm.weight")),
    "a key misspelt": ("'blk.0.attn_k.weight' not found", tensor("blk.0.attn_k.weight", name="blk.0.attn_kk.weight")),
    "up misspelt": ("'blk.0.ffn_up.weight' not found", tensor("blk.0.ffn_up.weight", name="blk.0.ffn_pu.weight")),
    "a weight with a suffix of its own": (
        "'blk.0.attn_output.weight' not found",
        tensor("blk.0.attn_output.weight", name="blk.0.attn_output.weights"),
    ),
    "a norm of another length": (
        "'blk.0.ffn_norm.weight' has wrong shape",
        tensor("blk.0.ffn_norm.weight", shape=[32]),
    ),
    "the output norm of another length": (
        "'output_norm.weight' has wrong shape",
        tensor("output_norm.weight", shape=[32]),
    ),
    "rope factors of another length": ("'rope_freqs.weight' has wrong shape", also("rope_freqs.weight", 32)),
    "no tokenizer": ("key not found in model: tokenizer.ggml.model", no("tokenizer.ggml.model")),
    "no tokens": ("cannot find tokenizer vocab in model file", no("tokenizer.ggml.tokens")),
    "tokens numbers": ("invalid gguf type for tokenizer.ggml.tokens", value("tokenizer.ggml.tokens", [1] * 264)),
    "scores too few": (
        "Index out of array bounds for scores (1 < 264)",
        value("tokenizer.ggml.scores", [0.0], "float32"),
    ),
    "scores bytes": ("invalid gguf type for tokenizer.ggml.scores", value("tokenizer.ggml.scores", [0] * 264, "uint8")),
    "token types too few": (
        "Index out of array bounds for toktypes (3 < 264)",
        value("tokenizer.ggml.token_type", [1, 1, 1], "int32"),
    ),
    "token types a scalar": ("invalid gguf type for tokenizer.ggml.token_type", value("tokenizer.ggml.token_type", 1)),
    "merges numbers": ("invalid gguf type for tokenizer.ggml.merges", value("tokenizer.ggml.merges", [1])),
}
"""Faults that are left to llama.cpp, which refuses them in one sentence, and a phrase of it."""

GIANTS: dict[str, tuple[str, Change]] = {
    "string of 2 GiB": ("goes beyond the first 256 MiB", file(metadata={"x": STRING + u64(2**31)})),
    "array of 2^28 strings": ("more than any real model has", file(metadata={"x": ARRAY + STRING + u64(2**28)})),
    "2^20 tensors": ("1048576 tensors are claimed, more than any real model has", file(n_tensors=2**20)),
    "2^24 keys": ("16777216 metadata keys are claimed, more than any real model has", file(n_kv=2**24)),
    "4 GiB of zeros": ("not a GGUF file", lambda g: b"\0"),
}
"""Files that are large enough for what they claim: 4 GiB, most of it a hole."""


def split(no: int, key: str, number: int, type: str = "uint16") -> Callable[[list[RawGguf]], None]:
    """Another number in part `no`."""
    return lambda parts: parts[no].set(key, number, type)


SPLITS: dict[str, tuple[str, Callable[[list[RawGguf]], Any]]] = {
    "part missing": ("model-00002-of-00002.gguf of this split", lambda parts: parts.pop()),
    "part count above the name": ("is not named as such", split(0, "split.count", 65535)),
    "part count as uint32": ("'split.count' is of type uint32 instead of uint16", split(0, "split.count", 2, "uint32")),
    "parts in the wrong order": ("split.no is 1 instead of 0", split(0, "split.no", 1)),
    "part of another split": ("split.count is 3 instead of 2", split(1, "split.count", 3)),
    "part without a number": ("split.no is missing", lambda parts: parts[1].metadata.pop("split.no")),
    "parts with fewer tensors": (
        "states 99 tensors but the parts hold 12",
        split(0, "split.tensors.count", 99, "int32"),
    ),
    "tensor in two parts": ("is also in an earlier part", lambda parts: also("token_embd.weight", 64, 264)(parts[1])),
    "second part no GGUF": (
        "model-00002-of-00002.gguf: this is not a GGUF file",
        lambda parts: file(magic=b"GGUX")(parts[1]),
    ),
    "second part cut": (
        "more than the file has left",
        lambda parts: record("x", STRING + u64(9**9) + b"x")(parts[1]),
    ),
}


def parted(whole: RawGguf) -> list[RawGguf]:
    """The model in two parts."""
    half, n_tensors = len(whole.tensors) // 2, len(whole.tensors)
    parts = [whole, RawGguf(tensors=whole.tensors[half:])]
    whole.tensors = whole.tensors[:half]
    for no, part in enumerate(parts):
        part.set("split.no", no, "uint16")
        part.set("split.count", 2, "uint16")
        part.set("split.tensors.count", n_tensors, "int32")
    return parts


def split_llama(
    path: Path,
    change: Callable[[list[RawGguf]], Any] = lambda parts: None,
    named: str = "model-{:05d}-of-00002.gguf",
) -> Path:
    """Write tiny_llama in two parts, after `change` had its way with them; returns the first."""
    parts = parted(tiny_llama())
    change(parts)
    first, *_ = [part.write(path.with_name(named.format(no + 1))) for no, part in enumerate(parts)]
    return first


PLACES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no such file": ("no such file", lambda path: None),
    "directory": ("is a directory", Path.mkdir),
    "named pipe": ("not a regular file", os.mkfifo),
    "dangling link": ("no such file", lambda path: path.symlink_to(path.with_name("nowhere"))),
    "part not named like one": ("is not named as such", lambda path: split_llama(path, named="{}model.gguf")),
}

HOSTILE: dict[str, str] = {
    kind: phrase for table in (CASES, GIANTS, SPLITS, PLACES) for kind, (phrase, _) in table.items()
}
"""Every kind of hostile file, and a phrase that our ModelFileError about it must hold."""


def hostile(path: str | Path, kind: str) -> Path:
    """Write the hostile file of this kind to `path` (or beside it) and return the one to open."""
    path, g = Path(path), tiny_llama()
    if kind in SPLITS:
        return split_llama(path, SPLITS[kind][1])
    if kind in PLACES:
        return PLACES[kind][1](path) or path
    made = (CASES | LEFT_TO_LLAMA_CPP | GIANTS)[kind][1](g)
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        g.write(path)
    if kind in GIANTS:
        os.truncate(path, 2**32)
    return path
