"""Block and byte sizes of every ggml tensor type.

The sizes are those of the `gguf` package (`gguf.constants.GGML_QUANT_SIZES`) with two corrections, because that table
differs from ggml 0.26.0: Q8_1 has 36 bytes a block (two halves and 32 quants), not 40, and type 42 (Q2_0: a half and
64 two-bit quants, 18 bytes) is missing there. Kept as a literal table, since importing `gguf` costs 0.3 s (numpy,
yaml); tests/unit/test_gguf_types.py compares it with the package, and with ggml itself at run time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type: rows are whole blocks of `block_size` elements, `block_bytes` each."""

    id: int
    name: str  # capitals: F16, Q4_K, ...
    block_size: int  # elements
    block_bytes: int

    def n_bytes(self, n_elements: int) -> int:
        """Bytes of `n_elements` elements; n_elements is a multiple of block_size."""
        return n_elements // self.block_size * self.block_bytes


_TABLE = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 36),  # gguf 0.19 says 40
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),  # gguf 0.19 does not know it
)

GGML_TYPES: dict[int, GgmlType] = {t.id: t for t in _TABLE}
GGML_TYPES_BY_NAME: dict[str, GgmlType] = {t.name: t for t in _TABLE}

NO_MUL_MAT_TYPES = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
"""Types without a CPU dot product: ggml-cpu has none for the two activation formats, and none for integers and doubles
(a mul-mat with such a weight calls a null pointer)."""

MUL_MAT_TYPES = frozenset(GGML_TYPES_BY_NAME) - NO_MUL_MAT_TYPES


def bytes_per_element(type_name: str) -> float:
    """Bytes of an element of a ggml type in capitals, or of a KV cache's as -ctk names it (f16, q8_0); of an unknown
    one as of F16."""
    known = GGML_TYPES_BY_NAME.get(type_name.upper(), GGML_TYPES[1])
    return known.block_bytes / known.block_size
