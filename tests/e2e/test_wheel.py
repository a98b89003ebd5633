"""scripts/wheel: what pip installs on any Linux."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from processes import ROOT

from ggml_bridge.library import library_folder
from oallama.stores.default_model import FILE

LIBRARIES = {f"ggml_bridge/lib{name}.so" for name in ("ggml_bridge", "ggml-oallama", "ggml-emulated")}
OF_GLIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux" or struct.calcsize("P") != 8, reason="wheels are for Linux"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source package and the wheel."""
    subprocess.run([ROOT / "scripts" / "wheel"], check=True, capture_output=True, timeout=800)
    (source,), (wheel,) = (ROOT / "dist").glob("*.tar.gz"), (ROOT / "dist").glob("*.whl")
    return source, wheel


def test_the_wheel_needs_nothing_but_glibc_and_has_the_default_model(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = made
    assert wheel.name.startswith("oallama-") and "py3-none-" in wheel.name and "manylinux_2_28_x86_64" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        files = {f"oallama/models/{FILE}", "oallama/setup/locked.txt", "oallama_contrib/policies/hetegen.py"}
        assert LIBRARIES | files <= set(archive.namelist())
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: llama" not in archive.read(metadata).decode()
        licences = [name for name in archive.namelist() if name.endswith("third_party/ggml/LICENSE")]
        assert "The ggml authors" in archive.read(licences[0]).decode()
        archive.extractall(tmp_path)
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    for library in LIBRARIES:
        told = subprocess.run([readelf, "-d", tmp_path / library], capture_output=True, text=True, check=True).stdout
        needed = {line.partition("[")[2].rstrip("]") for line in told.splitlines() if "(NEEDED)" in line}
        assert needed <= OF_GLIBC, library


def test_the_source_package_has_what_it_is_built_from(made: tuple[Path, Path]) -> None:
    with tarfile.open(made[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", f"models/{FILE}", "oallama/setup/locked.txt"} <= names
    assert {"third_party/ggml/LICENSE", "third_party/ggml/ggml-backend-impl.h"} <= names
    assert not any(name.startswith(("tests/", "docs/", "scripts/")) for name in names)


def interpreter(version: str) -> str:
    """The first Python of this version that starts, from PATH or pyenv; skips the test where there is none."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, of_pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"there is no Python {version}")


@pytest.mark.parametrize("version", ["3.10", "this", "3.13"])
def test_a_story_without_a_compiler_from_the_wheel_and_an_archive(
    made: tuple[Path, Path], tmp_path: Path, version: str
) -> None:
    """In a new environment, whose PATH has no compiler, with the llama.cpp of this one as an archive on loopback."""
    new, programs, archive = tmp_path / "new", tmp_path / "programs", tmp_path / "llama.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(library_folder(), "build/bin")
    programs.mkdir()
    for name in ("sh", "env", "uname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    environment = {**os.environ, "PATH": str(programs), "OALLAMA_CACHE_DIR": str(tmp_path / "cache")}

    def run(program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [new / "bin" / program, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return done

    python = sys.executable if version == "this" else interpreter(version)
    subprocess.run([python, "-m", "venv", new], check=True, timeout=300)
    run("pip", "install", "--quiet", str(made[1]))
    assert "oallama setup" in run("oallama", "run", "Once", "-n", "4", code=1).stderr
    assert "--matrix" in run("oallama", "bench", "--help").stdout
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = ("setup", "--llama-cpp", f"http://127.0.0.1:{server.server_port}/{archive.name}", "--sha256")
        assert "do not trust it" in run("oallama", *given, "0" * 64, code=1).stderr
        run("oallama", *given, hashlib.sha256(archive.read_bytes()).hexdigest())
        server.shutdown()
    assert len(run("oallama", "run", "Once upon a time", "-n", "16", "--tune", "never").stdout.split()) > 5
    asked = ("--device", "none", "-t", "1", "--tokens", "1", "--json")
    assert json.loads(run("oallama", "profile", str(ROOT / "models" / FILE), *asked).stdout)["cases"]
    simulated = ("oallama", "simulate", str(ROOT / "models" / FILE), "--machine", "pc-12gb", "--policy")
    assert "policy hetegen" in run(*simulated, "hetegen", "--vram", "300MiB").stdout
    assert "pip install 'oallama[twinpilots]'" in run(*simulated, "twinpilots", "--vram", "300MiB", code=2).stderr
    run("oallama", "doctor")
