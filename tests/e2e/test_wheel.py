"""scripts/wheel: what pip installs on any Linux."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from oallama.stores.default_model import FILE

ROOT = Path(__file__).resolve().parents[2]
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
        assert LIBRARIES | {f"oallama/models/{FILE}", "oallama/setup/locked.txt"} <= set(archive.namelist())
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
