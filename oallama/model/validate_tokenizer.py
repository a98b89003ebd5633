"""Checks a GGUF's vocabulary: consistent sizes, no duplicates, token ids inside it."""

from __future__ import annotations

import re

from oallama.model.gguf_file import CONVERT_AGAIN, GgufArray, GgufFile, fault, quoted
from oallama.model.hyperparameters import vocabulary_size

_BYTE_TOKEN_TYPE = 6
_BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_NO_VOCABULARY = ("no_vocab", "none")

_PER_TOKEN = (("scores", ("float32", "int32")), ("token_type", ("int32",)))


def validate_tokenizer(gguf: GgufFile) -> None:
    """Raise ModelFileError for a vocabulary that llama.cpp would abort on or index out of bounds."""
    model = gguf.entries.get("tokenizer.ggml.model")
    if model is None or model.type != "string":
        message = "the metadata lack the tokenizer model as a string"
        raise gguf.fault("tokenizer.ggml.model", message, CONVERT_AGAIN)
    if model.value in _NO_VOCABULARY:
        return
    tokens = _array(gguf, "tokens", ("string",))
    if tokens is None or not len(tokens):
        message = "the file has no vocabulary (tokenizer.ggml.tokens)"
        raise gguf.fault("tokenizer.ggml.model", message, CONVERT_AGAIN)
    types: GgufArray | None = None
    for name, allowed in _PER_TOKEN:
        array = _array(gguf, name, allowed)
        if array is not None and len(array) < len(tokens):
            message = f"tokenizer.ggml.{name} has {len(array)} elements for {len(tokens)} tokens"
            raise fault(gguf.path, array.offset, message)
        types = array if name == "token_type" else types
    _array(gguf, "merges", ("string",))
    _check_tokens(gguf, tokens, types, byte_tokens=model.value in ("llama", "t5", "plamo2"))
    _check_special_ids(gguf)


def _array(gguf: GgufFile, name: str, allowed: tuple[str, ...]) -> GgufArray | None:
    entry = gguf.entries.get(f"tokenizer.ggml.{name}")
    if entry is None:
        return None
    if not isinstance(entry.value, GgufArray) or entry.value.type not in allowed:
        message = f"tokenizer.ggml.{name} is of type {entry.type} instead of array[{allowed[0]}]"
        raise gguf.fault(f"tokenizer.ggml.{name}", message, CONVERT_AGAIN)
    return entry.value


def _check_tokens(gguf: GgufFile, tokens: GgufArray, types: GgufArray | None, byte_tokens: bool) -> None:
    distinct = set(tokens.raw_strings())
    if len(distinct) < len(tokens) or b"" in distinct or any(b"\0" in token for token in distinct):
        _check_doubles(gguf, tokens)
    if byte_tokens and types is not None:
        values = types.values
        for i, raw in enumerate(tokens.raw_strings()):
            if values[i] == _BYTE_TOKEN_TYPE and not _BYTE_TOKEN.fullmatch(raw):
                message = f"token {i} is a byte token but is {quoted(raw)} instead of <0x00> to <0xFF>"
                raise fault(gguf.path, tokens.offset, message)


def _check_doubles(gguf: GgufFile, tokens: GgufArray) -> None:
    """Raise ModelFileError for a token that occurs twice as llama.cpp reads tokens: cut at a zero byte, an empty token
    named after its index."""
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
