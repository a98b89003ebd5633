"""Interpreter and libraries of scripts/gpu_run: a pack of scripts/build_cuda, or this checkout's environment."""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup_env import digest_files, native_sources

from cuda_build.pack import install_entry_points, install_native, read_manifest, run_environment, unpack
from oallama.setup.console import SetupError


def main(root: Path, arguments: Sequence[str]) -> int:
    """Does not return where it succeeds: the process becomes scripts/gpu_card.py."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--pack", type=Path)
    options, others = parser.parse_known_args(arguments)
    try:
        python, env = chosen(root, options.device, options.pack, os.environ)
    except SetupError as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    script = str(root / "scripts" / "gpu_card.py")
    os.execve(python, [str(python), script, "--device", options.device, *others], env)
    return 1


def chosen(root: Path, device: str, pack: Path | None, env: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """The interpreter and its environment. Raises SetupError."""
    vulkan, default = device.startswith("Vulkan"), root / "build" / "cuda-pack"
    venv = root / (".venv-vulkan" if vulkan else ".venv") / "bin" / "python"
    wanted = pack or (default if device.startswith("CUDA") and default.is_dir() else None)
    if wanted is not None:
        tree = unpack(wanted, root / "build" / "gpu" / "pack")
        if read_manifest(tree)["native_digest"] != digest_files(root, native_sources(root)):
            print("gpu_run: the pack's libggml-oallama is not built from this checkout: run scripts/build_cuda again",
                  file=sys.stderr)  # fmt: skip
        install_native(tree, root)
        install_entry_points(tree, root)
        python, variables = Path(sys.executable), run_environment(tree, root, env, cuda_folders())
    elif venv.is_file():
        python, variables = venv, dict(env)
    else:
        raise SetupError("neither a pack (scripts/build_cuda) nor an environment (python3 scripts/setup_env.py) exists")
    if vulkan:
        variables.setdefault(
            "GGML_VK_VISIBLE_DEVICES", "0"
        )  # ggml hides a device that is the processor unless it is named
    paths = (str(root / "scripts"), str(root), str(root / "tests"), variables.get("PYTHONPATH"))
    return python, variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cuda_folders() -> list[Path]:
    """Folders where cuBLAS and the CUDA run-time may be: this Python's nvidia packages, then the toolkit's own
    places."""
    sites = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), site.getusersitepackages()])
    places = [Path(folder, "nvidia", "cu13", "lib") for folder in sites]
    return [place for place in (*places, Path("/usr/local/cuda/lib64")) if place.is_dir()]
