"""A CUDA toolkit: the one that is named, or one put together from the package index's wheels."""

from __future__ import annotations

import re
import shutil
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oallama.setup.console import Console, SetupError, Step, capture, run
from oallama.setup.gpu import toolkit_root

from .recipe import TOOLKIT_WHEELS

_LEFT_OUT = ("libcublasLt", "libnvblas", "libcublas_static", "libcublasLt_static")
"""Not needed to link, and 400 MB."""


@dataclass(frozen=True)
class Toolkit:
    """nvcc, its folder, and where cuBLAS is, which may be a folder of its own."""

    nvcc: Path
    root: Path
    cublas_include: Path
    cublas_library: Path
    version: str

    def flags(self) -> tuple[str, ...]:
        """CMake's arguments that name it."""
        flags = [f"-DCMAKE_CUDA_COMPILER={self.nvcc}", f"-DCUDAToolkit_ROOT={self.root}"]
        if self.root not in self.cublas_include.parents:
            flags += [f"-DCUDA_cublas_LIBRARY={self.cublas_library}", f"-DCMAKE_CUDA_FLAGS=-I{self.cublas_include}"]
        return tuple(flags)


def toolkit_in(root: Path, env: Mapping[str, str]) -> Toolkit:
    """The toolkit in a folder; cuBLAS there, or in this Python's packages. Raises SetupError."""
    nvcc = root / "bin" / "nvcc"
    output = capture([str(nvcc), "--version"], env) or ""
    version = re.search(r"release [\d.]+, V([\d.]+)", output)
    if version is None:
        raise SetupError(f"{nvcc} does not run: name a CUDA 13 toolkit with --cuda")
    places = [root, *(Path(folder, "nvidia", "cu13") for folder in site_folders())]
    for place in places:
        include = place / "include"
        library = next((file for sub in ("lib64", "lib") for file in sorted((place / sub).glob("libcublas.so*"))), None)
        if (include / "cublas_v2.h").is_file() and library is not None:
            return Toolkit(nvcc, root, include, library, version[1])
    raise SetupError(f"no cublas_v2.h in {root} or this Python's nvidia packages: install nvidia-cublas")


def site_folders() -> list[str]:
    """Where this Python's packages are; NVIDIA's have a CUDA of their own, nvidia/cu13."""
    import site

    return [*site.getsitepackages(), sysconfig.get_path("purelib"), site.getusersitepackages()]


def installed_root(env: Mapping[str, str]) -> Path | None:
    """The folder of the nvcc on this machine, which may be a wrapper far from its toolkit; None if there is none."""
    named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{named}/bin") if named else shutil.which("nvcc", path=env.get("PATH"))
    nvcc = nvcc or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return None
    return toolkit_root(nvcc, env)


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
