"""Interpreter and libraries of the steps: a pack of scripts/build_cuda, or this checkout's environment."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cuda_build.pack import install_native, read_manifest, run_environment, unpack
from cuda_build.toolkit import site_folders
from experiments.machine import backend_of
from setup.environment import digest_files, native_sources
from setup.errors import SetupError

from gpu_steps.main import parse, work_folder


def main(root: Path, arguments: Sequence[str]) -> int:
    """Does not return where it succeeds: the process becomes `python -m gpu_steps`."""
    options = parse(arguments)
    try:
        python, env = chosen(root, options.device, options.pack, work_folder(options), os.environ)
    except SetupError as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    os.execve(python, [str(python), "-m", "gpu_steps", *arguments], env)
    return 1


def chosen(
    root: Path, device: str, pack: Path | None, work: Path, env: Mapping[str, str]
) -> tuple[Path, dict[str, str]]:
    """The interpreter and its environment. Raises SetupError."""
    began = {"OALLAMA_GPU_RUN_BEGAN": str(time.time())}
    venv = root / (".venv-vulkan" if backend_of(device) == "Vulkan" else ".venv") / "bin" / "python"
    default = root / "build" / "cuda-pack"
    wanted = pack or (default if backend_of(device) == "CUDA" and default.is_dir() else None)
    if wanted is not None:
        tree = unpack(wanted, work.parent / "pack")
        manifest = read_manifest(tree)
        if manifest["native_digest"] != digest_files(root, native_sources(root)):
            print("gpu_run: the pack's libggml-oallama is not of this checkout's source: run scripts/build_cuda again",
                  file=sys.stderr)  # fmt: skip
        install_native(tree, root)
        python = Path(sys.executable)
        made = run_environment(tree, root, env, cuda_folders())
        made["OALLAMA_GPU_RUN_PACK"] = json.dumps(manifest)
    elif venv.is_file():
        python, made = venv, dict(env)
    else:
        raise SetupError(
            "there is neither a pack (scripts/build_cuda) nor an environment (python3 scripts/setup_env.py)"
        )
    if backend_of(device) == "Vulkan":
        made.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # ggml hides a device that is the processor unless it is named
    paths = (str(root / "scripts"), str(root), made.get("PYTHONPATH"))
    made |= {**began, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OALLAMA_CACHE_DIR": str(work / "cache")}
    return python, made


def cuda_folders() -> list[Path]:
    """Where cuBLAS and the CUDA run-time may be: this Python's nvidia packages, then the toolkit's own places."""
    places = [Path(folder, "nvidia", "cu13", "lib") for folder in dict.fromkeys(site_folders())]
    return [place for place in (*places, Path("/usr/local/cuda/lib64")) if place.is_dir()]
