"""scripts/stock_binaries: what it builds and with which flags, and that an interrupted build goes on. pip and cmake are
small scripts here; the programs themselves are tested in tests/e2e."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from processes import PATIENCE_S, must_end, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from setup import stock
from setup.console import Console
from setup.errors import SetupError, UsageError
from setup.llama_wheel import Variant, WheelStore, make_recipe
from setup.machine import Compiler, read_cpu

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.3.36"
GCC = Compiler("/usr/bin/gcc", "/usr/bin/g++", "gcc", "12.2.0", "x86_64-linux-gnu")
XEON = read_cpu("model name : Xeon\nflags : avx2 amx_tile amx_int8")

# `pip download … --dest DIR … --requirement FILE` puts the source package there and notes what it was asked for.
PIP = """
echo "$@" >> "$CALLS"
for file; do :; done; grep == "$file" >> "$CALLS"
while [ "$1" != --dest ]; do shift; done
mkdir -p "$2" && cp "$SDIST" "$2"
"""
# cmake makes what it was asked for: `-B DIR` a build folder, `--target …` the programs; `$BUILD_FAILS` is run before.
CMAKE = """
echo "$@" >> "$CALLS"
if [ "$1" = -S ]; then mkdir -p "$4"; exit 0; fi
build=$2; mkdir -p "$build/bin"
sh -c "$BUILD_FAILS" || exit 1
while [ "$1" != --target ]; do shift; done
shift
for name in "$@"; do echo "$name" > "$build/bin/$name"; done
"""


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    path.chmod(0o755)
    return path


def source_package(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in ("README.md", "vendor/llama.cpp/CMakeLists.txt"):
            entry = tarfile.TarInfo(f"llama_cpp_python-{VERSION}/{name}")
            tar.addfile(entry, io.BytesIO())
    return path


class Place:
    """A machine whose compiler, pip and cmake are scripts, and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        program(folder / "bin" / "cmake", CMAKE)
        program(folder / "bin" / "c++", 'echo "c++ (GCC) 12.2.0"; echo "Free Software Foundation"')
        program(folder / "bin" / "cc", "true")
        self.python = program(folder / "python", PIP)
        self.console = Console((folder / "said").open("w+"), folder / "log")
        self.env = {
            "PATH": f"{folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(folder),
            "OALLAMA_CACHE_DIR": str(folder / "cache"),
            "CALLS": str(self.calls),
            "SDIST": str(source_package(folder / f"llama_cpp_python-{VERSION}.tar.gz")),
            "BUILD_FAILS": "true",
            "CUDA_HOME": str(folder / "no-cuda"),
        }
        (folder / "pyproject.toml").write_text(f'"llama-cpp-python=={VERSION}"', encoding="utf-8")

    def plan(self, wish: str = "cpu") -> stock.StockBuild:
        return stock.stock_build(self.folder, self.env, wish)

    def build(self) -> Path:
        return stock.build_programs(self.console, self.plan(), self.python, self.env)

    def called(self, word: str) -> list[str]:
        return [line for line in self.calls.read_text(encoding="utf-8").splitlines() if word in line]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_programs_are_kept_and_the_work_is_not(place: Place) -> None:
    assert place.plan().programs is None
    folder = place.build()
    assert sorted(path.name for path in folder.iterdir()) == sorted(stock.PROGRAMS)
    assert folder == place.plan().programs
    assert list((place.folder / "cache" / "stock").iterdir()) == [folder.parent]
    note = json.loads((folder.parent / "recipe.json").read_text(encoding="utf-8"))
    assert note["version"] == VERSION and "-DGGML_RPC=ON" in note["args"]


def test_shared_libraries_with_rpc_and_without_a_web_page(place: Place) -> None:
    """A page would be made by npm or downloaded."""
    place.build()
    (configure,) = place.called("-S ")
    for flag in ("BUILD_SHARED_LIBS=ON", "GGML_RPC=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"):
        assert f"-D{flag}" in configure.split()
    (fetch,) = place.called("download")
    assert "--no-deps" in fetch and "--require-hashes" in fetch
    assert place.called(f"llama-cpp-python=={VERSION}")


def test_a_build_that_failed_goes_on_without_fetching_again(place: Place) -> None:
    place.env["BUILD_FAILS"] = "echo 'fatal error: Killed signal terminated program cc1plus'; false"
    with pytest.raises(SetupError, match="out of memory"):
        place.build()
    assert place.plan().programs is None
    place.env["BUILD_FAILS"] = "true"
    assert place.build().is_dir()
    assert len(place.called("download")) == 1


def test_a_fetch_that_was_cut_short_is_done_again(place: Place) -> None:
    half = place.plan().place.with_name(f"{place.plan().place.name}.work") / "sdist" / "llama_cpp_python"
    (half / "vendor" / "llama.cpp").mkdir(parents=True)
    assert place.build().is_dir()
    assert len(place.called("download")) == 1


def test_other_flags_are_another_build(place: Place) -> None:
    plain = place.plan().place
    place.env["CMAKE_ARGS"] = "-DGGML_CPU_REPACK=OFF"
    assert place.plan().place != plain


def test_vulkan_needs_its_tools_and_unknown_back_ends_do_not_exist(place: Place) -> None:
    place.env["PATH"] = str(place.folder / "bin")
    with pytest.raises(SetupError, match="glslc"):
        place.plan("vulkan")
    with pytest.raises(UsageError, match="abacus"):
        place.plan("abacus")


def test_a_layout_that_failed_its_self_test_is_left_out_here_too(tmp_path: Path) -> None:
    place = Place(tmp_path)
    backend = place.plan().recipe.backend
    recipe = make_recipe(Variant(backend), VERSION, XEON, GCC, place.env)
    store = WheelStore(tmp_path / "cache")
    (store.cache / "wheels" / recipe.key).mkdir(parents=True)
    store.write_outcome(recipe.key, {"CPU": "ok", "AMX": "died with SIGSEGV"})
    chosen = stock.working_recipe(backend, VERSION, XEON, GCC, place.env, auto=True)
    assert any("-mno-amx-tile" in argument for argument in chosen.args)
    store.write_outcome(recipe.key, {"CPU": "ok", "AMX": "ok"})
    assert stock.working_recipe(backend, VERSION, XEON, GCC, place.env, auto=True) == recipe


def test_a_call_where_they_are_built_prints_their_folder_alone_and_builds_nothing(place: Place) -> None:
    place.folder.joinpath("pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder, calls = place.build(), place.calls.read_text(encoding="utf-8")
    for more in ([], ["--find"]):
        command = [sys.executable, str(ROOT / "scripts" / "stock_binaries"), *more]
        env = {**place.env, "OALLAMA_BACKEND": "cpu"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")
    assert place.calls.read_text(encoding="utf-8") == calls


def test_find_fails_in_one_sentence_where_there_are_none(place: Place) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "stock_binaries"), "--find"]
    env = {**place.env, "OALLAMA_BACKEND": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: llama.cpp's programs are not built here: run scripts/stock_binaries\n"


def test_ctrl_c_ends_the_compilers_and_the_next_run_goes_on(place: Place) -> None:
    pid_file = place.folder / "compiler.pid"
    place.env["BUILD_FAILS"] = f"echo $$ > {pid_file}; sleep 60"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom setup import stock\nfrom setup.console import Console\n"
        "from setup.main import guarded\n"
        f"folder = Path({str(place.folder)!r})\nenv = dict(os.environ)\n"
        "console = Console(sys.stderr, folder / 'log')\n"
        "job = lambda: stock.build_programs(console, stock.stock_build(folder, env, 'cpu'), folder / 'python', env)\n"
        "sys.exit(guarded(console, 'stock_binaries', job))\n"
    )
    env = {**place.env, "PYTHONPATH": str(ROOT / "scripts")}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: pid_file.exists() and pid_file.read_text())
    child.send_signal(signal.SIGTERM)  # treated as Ctrl-C, which a background process may be started without
    _, said = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert said.rstrip().endswith("stock_binaries interrupted: run it again to go on")
    must_end(int(pid_file.read_text()))
    place.env["BUILD_FAILS"] = "true"
    assert place.build().is_dir()
    assert len(place.called("download")) == 1
