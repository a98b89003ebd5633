"""Processes whose CPU has other layouts for weights than this one: none but the plain one, or AMX's as well
(tests/native/layouts_backend.cpp)."""

from __future__ import annotations

from native.native_helpers import build_native

import ggml_bridge
from ggml_bridge.library import library_folder
from oallama.device.user_backend import VARIABLE

WANTED = "OALLAMA_TEST_LAYOUTS"


def with_layouts(wanted: str) -> dict[str, str]:
    """Variables of their environment. wanted: none or amx. Skips where the library cannot be built."""
    library = build_native("ggml-layouts", library_folder()).with_name("libggml-layouts.so")
    return {VARIABLE: str(library), WANTED: wanted}


def with_amx() -> dict[str, str]:
    """Variables that give a process AMX's layout: none where this CPU and this build have it, or a layout that behaves
    like it."""
    return {} if "AMX" in ggml_bridge.load().cpu_layouts() else with_layouts("amx")
