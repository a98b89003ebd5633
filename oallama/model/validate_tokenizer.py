"""Checks a GGUF's vocabulary where llama.cpp aborts or indexes out of bounds: tokens that occur twice, byte tokens,
token ids. It refuses missing, short and mistyped arrays itself."""

from __future__ import annotations

import re

from oallama.model.gguf_file import CONVERT_AGAIN, GgufArray, GgufFile, fault, quoted
from oallama.model.hyperparameters import vocabulary_size

_BYTE_TOKEN_TYPE = 6
_BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_NO_VOCABULARY = ("no_vocab", "none")


def validate_tokenizer(gguf: GgufFile) -> None:
    """Raise ModelFileError for a vocabulary that llama.cpp would abort on or index out of bounds."""
    model, tokens, types = (gguf.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    if model in _NO_VOCABULARY:
        return
    if isinstance(tokens, GgufArray) and tokens.type == "string":
        _check_doubles(gguf, tokens)
        if isinstance(types, GgufArray) and model in ("llama", "t5", "plamo2"):
            _check_byte_tokens(gguf, tokens, types)
    _check_special_ids(gguf)


def _check_byte_tokens(gguf: GgufFile, tokens: GgufArray, types: GgufArray) -> None:
    for i, (raw, type) in enumerate(zip(tokens.raw_strings(), types.values, strict=False)):
        if type == _BYTE_TOKEN_TYPE and not _BYTE_TOKEN.fullmatch(raw):
            message = f"token {i} is a byte token but is {quoted(raw)} instead of <0x00> to <0xFF>"
            raise fault(gguf.path, tokens.offset, message)


def _check_doubles(gguf: GgufFile, tokens: GgufArray) -> None:
    """Raise ModelFileError for a token that occurs twice as llama.cpp reads tokens: cut at a zero byte, an empty token
    named after its index."""
    distinct = set(tokens.raw_strings())
    if len(distinct) == len(tokens) and b"" not in distinct and not any(b"\0" in token for token in distinct):
        return
    seen: set[bytes] = set()
    for i, raw in enumerate(tokens.raw_strings()):
        text = raw.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i
        if text in seen:
            message = f"token {i}, {quoted(text)}, occurs twice in the vocabulary"
            raise fault(gguf.path, tokens.offset, message, CONVERT_AGAIN)
        seen.add(text)


def _check_special_ids(gguf: GgufFile) -> None:
    n_vocab = vocabulary_size(gguf)
    for key, entry in gguf.entries.items():
        if not key.startswith("tokenizer.ggml.") or not key.endswith("_token_id"):
            continue
        gguf.entry(key, "uint32")
        if entry.value >= n_vocab:
            raise gguf.fault(key, f"{quoted(key)} is {entry.value}, outside the vocabulary of {n_vocab}")
