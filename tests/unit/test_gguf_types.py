"""The table of tensor types against the other sources of the same numbers: ggml at run time, and the gguf package."""

from __future__ import annotations

import ctypes

import gguf
import pytest

from ggml_bridge.library import library_folder, soname
from oallama.core.ggml_types import GGML_TYPES, GGML_TYPES_BY_NAME, MUL_MAT_TYPES


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_folder() / soname("ggml-base")))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    return library


def test_every_type_is_as_ggml_says(ggml: ctypes.CDLL) -> None:
    """Removed ones have blocks of 0."""
    assert {t.id: (t.name, t.block_size, t.block_bytes) for t in GGML_TYPES.values()} == {
        i: (ggml.ggml_type_name(i).decode().upper(), ggml.ggml_blck_size(i), ggml.ggml_type_size(i))
        for i in range(max(GGML_TYPES) + 1)
        if ggml.ggml_blck_size(i)
    }


def test_the_gguf_package_differs_in_what_is_written_down_only() -> None:
    theirs = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    ours = {t.name: (t.block_size, t.block_bytes) for t in GGML_TYPES.values()}
    differing = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert differing <= {"Q8_1", "Q2_0"}
    assert all(kind.name in ours and GGML_TYPES_BY_NAME[kind.name].id == kind for kind in gguf.GGMLQuantizationType)


def test_types_that_mul_mats_read_have_a_dot_product_in_ggml_cpu() -> None:
    class Traits(ctypes.Structure):
        _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p))  # and more

    cpu = ctypes.CDLL(str(library_folder() / soname("ggml-cpu")))
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(Traits)
    able = {t.name for t in GGML_TYPES.values() if cpu.ggml_get_type_traits_cpu(t.id).contents.vec_dot}
    assert able == MUL_MAT_TYPES


def test_bytes_of_a_row() -> None:
    assert GGML_TYPES_BY_NAME["Q4_K"].n_bytes(512) == 288
    assert GGML_TYPES_BY_NAME["F16"].n_bytes(3) == 6
