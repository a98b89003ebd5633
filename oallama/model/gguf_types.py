"""Numbers of the GGUF format: limits, and the value types of the metadata."""

from __future__ import annotations

GGML_MAX_DIMS = 4
GGML_MAX_NAME = 64
"""Bytes of a tensor name with its terminating zero (ggml.h)."""

LLAMA_MAX_LAYERS = 512
LLAMA_MAX_EXPERTS = 1024
"""Numbers above which llama.cpp 0.3.36 aborts (llama-hparams.h)."""

DEFAULT_ALIGNMENT = 32

# Metadata value types: GGUF id -> (name, struct format of one little-endian value).
VALUE_STRING = 8
VALUE_ARRAY = 9
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    VALUE_STRING: ("string", ""),
    VALUE_ARRAY: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
