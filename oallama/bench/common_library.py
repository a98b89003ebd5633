"""libllama-common, the C++ library beneath llama.cpp's tools, opened over the libraries that llama_cpp uses."""

from __future__ import annotations

import ctypes
from pathlib import Path

FIT_PARAMS = (
    "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32llama_model_tensor_buft_overridePm"
    "jPK22common_fit_extra_model14ggml_log_level"
)
"""As C++ names it: common_fit_params(char const *, llama_model_params *, llama_context_params *, float *,
llama_model_tensor_buft_override *, size_t *, uint32_t, common_fit_extra_model const *, ggml_log_level)."""


def open_common() -> ctypes.CDLL | None:
    """The library, or None where this build of llama-cpp-python has none.

    The bridge must be loaded: what libllama-common is linked with is then found by SONAME, so that it works on the
    same llama and ggml as llama_cpp. A library that brought its own copies is refused (None).
    """
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import library_folder, soname

    folder = library_folder()
    for place in (folder, folder.parent.parent / "lib"):
        path = place / soname("llama-common")
        if path.is_file():
            library = _open(path)
            if library is not None and _address(library) == _address(api._lib):
                return library
    return None


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _address(library: ctypes.CDLL) -> int | None:
    """Of a function of libllama, as code in `library` finds it."""
    return ctypes.cast(library["llama_model_default_params"], ctypes.c_void_p).value
