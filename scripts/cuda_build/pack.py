"""The pack: one compressed archive with its manifest, and how a folder that Python runs from is made.

lib/          ggml, llama and the CUDA back end; cpu/NAME/libggml-cpu.so.0 for other processors than the plainest
native/       libggml_bridge, libggml-oallama
site/         llama_cpp's Python part, and the packages that the other machine lacks
bin/          llama-bench and llama-server
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cuda_build.recipe import best_cpu_variant
from oallama.core.files import read_toml
from oallama.setup.console import SetupError, capture
from oallama.setup.machine import this_cpu

ARCHIVE, MANIFEST = "pack.tar.xz", "manifest.json"
LIMIT_BYTES = 60 << 20  # that travel


def copy_libraries(folder: Path, names: Iterable[str], to: Path) -> None:
    """`lib….so` with the links that lead to it, as files and links."""
    to.mkdir(parents=True, exist_ok=True)
    for name in names:
        files = sorted(folder.glob(f"lib{name}.so*"))
        if not files:
            raise SetupError(f"the build left no lib{name}.so in {folder}: remove that folder and run again")
        for path in files:
            shutil.copy2(path, to / path.name, follow_symlinks=False)


def strip(folder: Path, env: Mapping[str, str]) -> None:
    """Take what only a debugger needs out of libraries and programs; a machine without `strip` leaves it in."""
    files = [str(path) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    native = [file for file in files if ".so" in Path(file).name or Path(file).parent.name == "bin"]
    if native:
        capture(["strip", "--strip-unneeded", *native], env, 120.0)


def write_pack(tree: Path, manifest: Mapping[str, Any], out: Path) -> int:
    """Compress `tree`, with the manifest, into `out`. Returns the pack's bytes. Raises SetupError, leaving no pack,
    where it would be above LIMIT_BYTES."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ARCHIVE).unlink(missing_ok=True)
    (tree / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    draft = out / f"{ARCHIVE}.part"
    with tarfile.open(draft, "w:xz", preset=6) as tar:
        for path in sorted(tree.iterdir()):
            tar.add(path, path.name)
    n_bytes = draft.stat().st_size
    if n_bytes > LIMIT_BYTES:
        draft.unlink()
        raise SetupError(
            f"the pack would be {n_bytes / 2**20:.1f} MiB, above the limit of {LIMIT_BYTES / 2**20:.0f} MiB: "
            "give fewer architectures with --arch"
        )
    draft.replace(out / ARCHIVE)
    return n_bytes


def unpack(pack: Path, to: Path) -> Path:
    """Unpack a pack, a folder or its archive, into `to`, once. Returns `to`. Raises SetupError."""
    archive = pack / ARCHIVE if pack.is_dir() else pack
    if not archive.is_file():
        raise SetupError(f"{pack} has no {ARCHIVE}: run scripts/build_cuda, or name the folder that it wrote")

    mark, status = to / "unpacked.txt", archive.stat()
    stamp = f"{status.st_size} {int(status.st_mtime)}\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == stamp:
        return to
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise SetupError(f"{archive} is damaged ({error}): run scripts/build_cuda again") from error
    choose_cpu(to, this_cpu().features)
    mark.write_text(stamp, encoding="utf-8")
    return to


def choose_cpu(tree: Path, features: Iterable[str]) -> str:
    """Put the libggml-cpu for this processor in its place; returns the variant's name. Raises SetupError."""
    variant = best_cpu_variant(features)
    if variant is None:
        raise SetupError(
            "this processor has no AVX2, which the pack needs: set up a checkout here with scripts/setup_env.py"
        )
    better = tree / "cpu" / variant.name / "libggml-cpu.so.0"
    if better.is_file():
        place = (tree / "lib" / "libggml-cpu.so.0").resolve()
        place.unlink()
        shutil.copy2(better, place)
    (tree / "cpu-variant.txt").write_text(variant.name + "\n", encoding="utf-8")
    return variant.name


def read_manifest(tree: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((tree / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def install_native(tree: Path, root: Path) -> None:
    """Put our two libraries where the checkout looks for them, unless it has its own."""
    place = root / "build" / "native"
    place.mkdir(parents=True, exist_ok=True)
    for library in (tree / "native").iterdir():
        if not (place / library.name).exists():
            shutil.copy2(library, place / library.name)


def install_entry_points(tree: Path, root: Path) -> None:
    """Write the metadata that names the entry points of oallama and contrib/. `bench --matrix` and contrib's policies
    are found by them."""
    project = read_toml(root / "pyproject.toml")["project"]
    to = tree / "site" / f"oallama-{project['version']}.dist-info"
    to.mkdir(parents=True, exist_ok=True)
    (to / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oallama\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (to / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_environment(tree: Path, root: Path, env: Mapping[str, str], library_folders: Iterable[Path]) -> dict[str, str]:
    """The environment in which Python runs oallama out of the pack's folder and this checkout. library_folders: where
    cuBLAS and the CUDA run-time are."""
    libraries = [str(folder) for folder in library_folders]
    packages = (str(tree / "site"), str(root), str(root / "contrib"))
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(filter(None, (*packages, env.get("PYTHONPATH")))),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*libraries, env.get("LD_LIBRARY_PATH")))),
        "LLAMA_CPP_LIB_PATH": str(tree / "lib"),
    }
