"""A CUDA toolkit: the one that is named, or one put together from the package index's wheels."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cuda_build.recipe import TOOLKIT_WHEELS
from oallama.setup.console import Console, SetupError, Step, capture, run

_LEFT_OUT = ("libcublasLt", "libnvblas", "libcublas_static", "libcublasLt_static")
"""Not needed to link, and 400 MB."""


@dataclass(frozen=True)
class Toolkit:
    """A folder with nvcc and cuBLAS."""

    root: Path
    version: str

    def flags(self) -> tuple[str, ...]:
        """CMake's arguments that name it."""
        return f"-DCMAKE_CUDA_COMPILER={self.root / 'bin' / 'nvcc'}", f"-DCUDAToolkit_ROOT={self.root}"


def toolkit_in(root: Path, env: Mapping[str, str]) -> Toolkit:
    """The toolkit in a folder. Raises SetupError."""
    nvcc = root / "bin" / "nvcc"
    version = re.search(r"release [\d.]+, V([\d.]+)", capture([str(nvcc), "--version"], env) or "")
    if version is None:
        raise SetupError(f"{nvcc} does not run: name a CUDA 13 toolkit with --cuda")
    if not (root / "include" / "cublas_v2.h").is_file() or not any(root.glob("lib*/libcublas.so*")):
        raise SetupError(f"no cuBLAS in {root}: name a CUDA 13 toolkit that has it with --cuda")
    return Toolkit(root, version[1])


def assemble(console: Console, step: Step, python: Path, work: Path, env: Mapping[str, str]) -> Path:
    """Unpack the wheels into `work/toolkit`, unless they are there. Returns the toolkit's folder. Raises SetupError."""
    root = work / "toolkit" / "nvidia" / "cu13"
    done, wanted = work / "toolkit" / "wheels.txt", "\n".join(TOOLKIT_WHEELS) + "\n"
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return root
    wheels = work / "wheels"
    pip = [str(python), "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    run(console, step, [*pip, *TOOLKIT_WHEELS], env, "fetching nvcc and cuBLAS")
    shutil.rmtree(work / "toolkit", ignore_errors=True)
    for wheel in sorted(wheels.glob("nvidia_*.whl")):
        unpack_wheel(wheel, work / "toolkit", lambda name: not Path(name).name.startswith(_LEFT_OUT))
    for folder in (root / "bin", root / "nvvm" / "bin"):
        for program in folder.rglob("*"):
            program.chmod(0o755)
    (root / "lib64").symlink_to("lib")
    for library in ("cudart", "cublas"):
        (root / "lib" / f"lib{library}.so").symlink_to(f"lib{library}.so.13")
    shutil.rmtree(wheels)  # half a gigabyte
    done.write_text(wanted, encoding="utf-8")
    return root


def unpack_wheel(wheel: Path, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Put what a wheel lets one import into a folder of packages: without its scripts and headers, which are in .data.
    `wanted` says which of its files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if ".data/" not in name and wanted(name)])
