"""Finds, checks and opens the native libraries: llama.cpp's, which llama-cpp-python's bindings then use, and our own.

A build of llama.cpp carries each library under several file names. libllama was linked against `lib….so.0`; opening any
other file would load a second registry of devices, so only `lib….so.0` is opened, and it is checked that the library
which llama_cpp uses sees the same registry.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ggml_bridge.errors import BridgeError, VersionMismatch
from ggml_bridge.llama_params import fit_bindings

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
"""Of the bindings. llama.h has changed since by what `llama_params` knows."""
LLAMA_CPP_BUILD = 11549
"""Number of the llama.cpp that set-up compiles. Its release is called b11549."""
LIB_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""Environment variable that names another folder of llama.cpp's libraries; llama_cpp reads it too."""
INSTALLED = Path("lib", "oallama", "llama.cpp")
"""Where set-up puts llama.cpp's libraries and programs in an environment. Not where llama-cpp-python keeps its own: who
imports that by itself keeps what he installed."""

_INSTALL = "run `oallama setup`"
_LIBRARIES = ("ggml-base", "ggml")
_CPU = "ggml-cpu"
"""The CPU library of a build for one CPU. A build for many CPUs has several libraries, and ggml chooses one when it is
asked to load its back ends."""
_BACKEND_VARIABLE = "GGML_BACKEND_PATH"


@dataclass(frozen=True, slots=True)
class Libraries:
    """The folder and the llama_cpp module that `open_libraries` opened, and the path of libggml_bridge."""

    folder: Path
    llama_cpp: ModuleType
    bridge_path: Path


def library_folder() -> Path:
    """Folder of llama.cpp's libraries; raises BridgeError."""
    override = os.environ.get(LIB_PATH_VARIABLE)
    folder = Path(override) if override else Path(sys.prefix) / INSTALLED
    if not override and not folder.is_dir():
        raise BridgeError(f"llama.cpp is not installed; {_INSTALL}")
    for name in _LIBRARIES:
        if not (folder / soname(name)).is_file():
            raise BridgeError(
                f"{LIB_PATH_VARIABLE if override else 'llama.cpp'} has no {soname(name)} in {folder}; {_INSTALL}"
            )
    return folder


def import_interface_only() -> None:
    """Let `llama_cpp.llama_cpp`, the C interface, be imported without the rest of its package: Llama, chat formats and
    numpy take longer than all else. For a process that uses none of them, before anything there imports llama_cpp."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None:
        sys.modules.setdefault("llama_cpp", importlib.util.module_from_spec(spec))


def soname(name: str) -> str:
    """`libggml.so.0` for `ggml`: the file that other libraries of the wheel ask for."""
    return f"lib{name}.so.0"


def check_installed_version() -> None:
    """Raises VersionMismatch unless the installed llama-cpp-python is exactly the one the bridge was written for."""
    try:
        version = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        raise BridgeError(f"llama.cpp is not installed; {_INSTALL}") from None
    if version != LLAMA_CPP_PYTHON_VERSION:
        raise VersionMismatch(
            f"llama-cpp-python {version} is installed but only {LLAMA_CPP_PYTHON_VERSION} works; {_INSTALL}"
        )


def open_libraries() -> Libraries:
    """Opens ggml, imports llama_cpp and finds libggml_bridge; raises BridgeError or VersionMismatch."""
    if not sys.platform.startswith("linux"):
        raise BridgeError(f"the native part runs on Linux, not on {sys.platform}")
    check_installed_version()
    folder = library_folder()
    base = _open(folder / soname("ggml-base"))
    one_cpu = (folder / soname(_CPU)).is_file()
    if one_cpu:
        _open(folder / soname(_CPU))
    ggml = _open(folder / soname("ggml"))
    if not one_cpu:
        _load_backends(ggml, base, folder)
    llama_cpp = _import_llama_cpp(folder)
    _check_one_registry(ggml, llama_cpp)
    fit_bindings(llama_cpp.llama_cpp)
    return Libraries(folder, llama_cpp, find_built("ggml_bridge"))


def find_plugin() -> Path:
    """Path of libggml-oallama, the split back end that llama.cpp loads too: see `find_built`. Raises BridgeError."""
    return find_built("ggml-oallama")


def find_built(name: str) -> Path:
    """Path of our own library `lib<name>`: beside this package (wheel, editable install) or in the build folder of a
    checkout; the newest, where there are several. Raises BridgeError."""
    file = f"lib{name}.so"
    folders = [Path(folder) for folder in sys.modules["ggml_bridge"].__path__]
    folders += [folder.parent / "build" / "native" for folder in folders]
    built = [folder / file for folder in folders if (folder / file).is_file()]
    if built:
        return max(built, key=lambda path: path.stat().st_mtime)
    raise BridgeError(f"{file} is not built; run `{sys.executable} -m pip install .` in the project's folder")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BridgeError(
            f"cannot load {path}: {error}; run `oallama setup --refresh` or unset {LIB_PATH_VARIABLE}"
        ) from None


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SAY_NOTHING = _LOG(lambda _level, _text, _data: None)
"""ggml's log, until the bridge captures it."""


def _load_backends(ggml: ctypes.CDLL, base: ctypes.CDLL, folder: Path) -> None:
    """Let ggml choose among the back ends in a folder; by itself it looks beside the program only. One that the user
    names is loaded elsewhere. Raises BridgeError if there is none for this CPU."""
    named = os.environ.pop(_BACKEND_VARIABLE, None)
    try:
        base.ggml_log_set(_SAY_NOTHING, None)
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    finally:
        if named is not None:
            os.environ[_BACKEND_VARIABLE] = named
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    if ggml.ggml_backend_dev_by_type(0) is None:
        raise BridgeError(f"no libggml-cpu in {folder} is for this CPU; {_INSTALL}")


def _import_llama_cpp(folder: Path) -> ModuleType:
    os.environ[LIB_PATH_VARIABLE] = str(folder)  # and stays: more of the package is imported where it is needed
    try:
        import llama_cpp.llama_cpp
    except MemoryError:
        raise
    except Exception as error:
        raise BridgeError(f"llama_cpp with the libraries in {folder} cannot be imported: {error}; {_INSTALL}") from None
    version = getattr(llama_cpp, "__version__", LLAMA_CPP_PYTHON_VERSION)  # none after import_interface_only
    if version != LLAMA_CPP_PYTHON_VERSION:
        raise VersionMismatch(f"llama_cpp {version} is installed but only {LLAMA_CPP_PYTHON_VERSION} works; {_INSTALL}")
    loaded = Path(llama_cpp.llama_cpp._lib._name).parent
    if not loaded.samefile(folder):
        raise BridgeError(
            f"llama_cpp was imported before oallama, with the libraries in {loaded}: import oallama's first, "
            f"or set {LIB_PATH_VARIABLE}={folder}"
        )
    module: ModuleType = llama_cpp
    return module


def _check_one_registry(ggml: ctypes.CDLL, llama_cpp: ModuleType) -> None:
    """libllama must have found the ggml that we opened: the same function at the same address."""
    seen_by_llama = ctypes.cast(llama_cpp.llama_cpp._lib.ggml_backend_dev_count, ctypes.c_void_p).value
    seen_by_us = ctypes.cast(ggml.ggml_backend_dev_count, ctypes.c_void_p).value
    if seen_by_llama != seen_by_us:
        raise BridgeError(
            f"llama_cpp uses another copy of ggml than {soname('ggml')}; {_INSTALL} in a fresh environment"
        )
