"""Finding and refusing libraries. Each refusal is tried in a process of its own, since a process has one bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ggml_bridge
from ggml_bridge import library

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
    assert bridge.ggml_version() == library.GGML_VERSION
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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('const char * ggml_version(void) { return "0.26.0"; }', "is of ggml 0.26.0 and only 0.25.3 works"),
        ("int nothing;", "does not tell the version of its ggml"),
    ],
)
def test_refuses_another_ggml(tmp_path: Path, source: str, expected: str) -> None:
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        compile_library(tmp_path / library.soname(name), source)
    message = refusal(tmp_path)
    assert message.startswith("VersionMismatch: ")
    assert expected in message
    assert "\n" not in message


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
