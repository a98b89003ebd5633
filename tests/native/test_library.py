"""Finding and refusing libraries. Each refusal is tried in a process of its own, since a process has one bridge."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ggml_bridge
from ggml_bridge import library
from ggml_bridge.llama_params import fit_bindings

LOAD = "import ggml_bridge\ntry:\n ggml_bridge.load()\nexcept Exception as e:\n print(type(e).__name__, e, sep=': ')"


def refusal(folder: Path) -> str:
    """What load() says when llama-cpp-python's libraries are taken from that folder."""
    environment = {**os.environ, library.LIB_PATH_VARIABLE: str(folder)}
    run = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def compile_library(path: Path, source: str) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to make a foreign library with")
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, check=True)


def test_loads_the_pinned_version(bridge: ggml_bridge.Bridge) -> None:
    assert bridge.ggml_version() == "0.26.0"
    assert bridge.libraries.llama_cpp.__version__ == library.LLAMA_CPP_PYTHON_VERSION
    assert bridge.libraries.folder == library.library_folder()
    assert bridge.ggml_commit()
    assert ggml_bridge.load() is bridge


def test_refuses_a_folder_without_libraries(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert message.startswith("BridgeError: LLAMA_CPP_LIB_PATH has no libggml-base")
    assert "run `oallama setup`" in message
    assert "\n" not in message


def test_refuses_what_is_no_library(tmp_path: Path) -> None:
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        (tmp_path / library.soname(name)).write_text("not a library")
    message = refusal(tmp_path)
    assert message.startswith("BridgeError: cannot load ")
    assert "\n" not in message


def test_refuses_libraries_of_something_else(tmp_path: Path) -> None:
    for name in ("ggml-base", "ggml-cpu", "ggml", "llama"):
        compile_library(tmp_path / library.soname(name), "int nothing;")
    (tmp_path / "libllama.so").symlink_to(library.soname("llama"))
    message = refusal(tmp_path)
    assert message.startswith("BridgeError: llama_cpp with the libraries in ")
    assert "undefined symbol" in message and "\n" not in message


class Interface:
    """A stand-in for llama_cpp.llama_cpp whose library returns the parameters that it is given."""

    def __init__(self, folder: Path, context: ctypes.Structure, model: ctypes.Structure | None = None) -> None:
        api = ggml_bridge.load().libraries.llama_cpp.llama_cpp
        returned = {"model": model or api.llama_model_default_params(), "context": context}
        source = "#include <string.h>\n"
        for name, value in returned.items():
            n, data = ctypes.sizeof(value), "".join(f"\\x{byte:02x}" for byte in bytes(value))
            source += f"struct {name} {{ char bytes[{n}]; }};\n"
            source += f"struct {name} llama_{name}_default_params(void)"
            source += f' {{ struct {name} made; memcpy(&made, "{data}", {n}); return made; }}\n'
        makers = ("llama_init_from_model", "llama_new_context_with_model")
        source += "".join(f"void {name}(void) {{}}\n" for name in makers)
        compile_library(folder / "llama.so", source)
        self._lib = ctypes.CDLL(str(folder / "llama.so"))
        for name in makers:
            getattr(self._lib, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.llama_model_params = api.llama_model_params
        self.llama_context_params = type(
            "llama_context_params", (ctypes.Structure,), {"_fields_": bindings_fields(api)}
        )


def bindings_fields(api: ModuleType) -> list[tuple[str, Any]]:
    """Fields of llama_context_params as llama-cpp-python has them."""
    return [field for field in api.llama_context_params._fields_ if field[0] != "moe_cache_size"]


def parameters(api: ModuleType, fields: list[tuple[str, Any]]) -> ctypes.Structure:
    """llama_context_params of these fields, with llama.cpp's defaults."""
    made = type("llama_context_params", (ctypes.Structure,), {"_fields_": fields})()
    defaults = api.llama_context_default_params()
    for name, _ in bindings_fields(api):
        setattr(made, name, getattr(defaults, name))
    return made


def test_bindings_fit_each_layout_that_is_known(bridge: ggml_bridge.Bridge, tmp_path: Path) -> None:
    api = bridge.libraries.llama_cpp.llama_cpp
    assert api.llama_context_default_params().moe_cache_size == 0, "b11549 has the field"
    for name, fields in (("old", bindings_fields(api)), ("new", api.llama_context_params._fields_)):
        (tmp_path / name).mkdir()
        stand_in = Interface(tmp_path / name, parameters(api, fields))
        fit_bindings(stand_in)
        assert hasattr(stand_in.llama_context_params, "moe_cache_size") is (name == "new")
        passed = stand_in._lib.llama_init_from_model.argtypes[1]
        assert passed is (stand_in.llama_context_params if name == "new" else ctypes.c_void_p)


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
def test_refuses_parameters_of_another_layout(bridge: ggml_bridge.Bridge, tmp_path: Path, where: str) -> None:
    api = bridge.libraries.llama_cpp.llama_cpp
    fields = list(api.llama_context_params._fields_)
    fields.insert(5 if where == "in the middle" else len(fields), ("unknown", ctypes.c_size_t))
    with pytest.raises(ggml_bridge.VersionMismatch, match="an unknown llama_context_params"):
        fit_bindings(Interface(tmp_path, parameters(api, fields)))


def test_refuses_model_parameters_of_another_layout(bridge: ggml_bridge.Bridge, tmp_path: Path) -> None:
    api = bridge.libraries.llama_cpp.llama_cpp
    larger = type(
        "larger", (ctypes.Structure,), {"_fields_": [*api.llama_model_params._fields_, ("more", ctypes.c_void_p)]}
    )
    with pytest.raises(ggml_bridge.VersionMismatch, match="an unknown llama_model_params"):
        fit_bindings(Interface(tmp_path, api.llama_context_default_params(), larger()))


def test_says_that_llama_cpp_was_imported_before(tmp_path: Path) -> None:
    for path in library.library_folder().glob("lib*.so*"):
        (tmp_path / path.name).symlink_to(path)
    code = f"import os; os.environ['{library.LIB_PATH_VARIABLE}'] = {str(tmp_path)!r}; import llama_cpp; "
    code += f"del os.environ['{library.LIB_PATH_VARIABLE}']\n{LOAD}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith("BridgeError: llama_cpp was imported before oallama, with the libraries in "), (
        run.stderr
    )


def test_refuses_another_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LLAMA_CPP_PYTHON_VERSION", "0.3.99")
    with pytest.raises(ggml_bridge.VersionMismatch, match=r"0\.3\.36 is installed but only 0\.3\.99 works"):
        library.check_installed_version()


def test_names_the_ways_to_build_a_missing_bridge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ggml_bridge, "__path__", [str(tmp_path / "ggml_bridge")])
    with pytest.raises(ggml_bridge.BridgeError, match=r"is not built; run `\S+ -m pip install \.`"):
        library.find_built("ggml_bridge")


def test_importing_loads_nothing_native() -> None:
    code = "import sys, ggml_bridge, ggml_bridge.child; print({'llama_cpp', 'numpy', 'cffi'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_ggml_is_silent_and_remembered(capfd: pytest.CaptureFixture[str], bridge: ggml_bridge.Bridge) -> None:
    with pytest.raises(ggml_bridge.OutOfMemory) as error:
        bridge.mul_mat("CPU", "CPU", "F32", 1 << 25, 1 << 25, working_set_bytes=0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "failed to allocate" in str(error.value)
