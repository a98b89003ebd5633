"""struct ggml_tensor of the pinned ggml as ctypes sees it: what a `cb_eval` callback is given."""

from __future__ import annotations

import ctypes
from typing import Any

from oallama.core.errors import BridgeError

_MAX_DIMS, _MAX_SRC, _MAX_OP_PARAMS, _MAX_NAME = 4, 10, 64, 64


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml 0.25.3, up to its name; `check_tensor_layout` proves it before it is used."""


GgmlTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (_MAX_OP_PARAMS // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GgmlTensor) * _MAX_SRC),
    ("view_src", ctypes.POINTER(GgmlTensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * _MAX_NAME),
]


def tensor_at(address: int) -> GgmlTensor:
    """The tensor at an address, not copied."""
    tensor: GgmlTensor = ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents
    return tensor


def weight_of(node: GgmlTensor) -> GgmlTensor:
    """The tensor that a node reads as its first source: of a reshaped or transposed weight, that weight."""
    weight = node.src[0].contents
    while weight.view_src:
        weight = weight.view_src.contents
    found: GgmlTensor = weight
    return found


def check_tensor_layout(ggml: Any) -> None:
    """Prove `GgmlTensor` against tensors that ggml itself makes; BridgeError if the library has another layout.

    ggml: the opened ggml-base library; declares the functions it calls."""

    class InitParams(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    tensor = ctypes.POINTER(GgmlTensor)
    for function, result, *arguments in (
        (ggml.ggml_init, ctypes.c_void_p, InitParams),
        (ggml.ggml_free, None, ctypes.c_void_p),
        (ggml.ggml_new_tensor_2d, tensor, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        (ggml.ggml_mul_mat, tensor, ctypes.c_void_p, tensor, tensor),
        (ggml.ggml_view_1d, tensor, ctypes.c_void_p, tensor, ctypes.c_int64, ctypes.c_size_t),
        (ggml.ggml_set_name, tensor, tensor, ctypes.c_char_p),
        (ggml.ggml_op_name, ctypes.c_char_p, ctypes.c_int),
    ):
        function.restype, function.argtypes = result, arguments
    context = ggml.ggml_init(InitParams(1 << 20, None, True))
    a = ggml.ggml_new_tensor_2d(context, 0, 8, 3)
    b = ggml.ggml_new_tensor_2d(context, 0, 8, 5)
    ggml.ggml_set_name(a, b"weight")
    product = ggml.ggml_mul_mat(context, a, b).contents
    view = ggml.ggml_view_1d(context, a, 4, 0).contents

    def address(pointer: Any) -> int | None:
        return ctypes.cast(pointer, ctypes.c_void_p).value

    agrees = (
        tuple(product.ne) == (3, 5, 1, 1)
        and ggml.ggml_op_name(product.op) == b"MUL_MAT"
        and (address(product.src[0]), address(product.src[1])) == (address(a), address(b))
        and address(view.view_src) == address(a)
        and a.contents.name == b"weight"
    )
    ggml.ggml_free(context)
    if not agrees:
        raise BridgeError("this llama.cpp lays its tensors out differently; run `oallama setup`")
