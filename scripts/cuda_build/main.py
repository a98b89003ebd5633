"""The command: from the pinned source package to a pack."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from setup_env import digest_files, native_sources

from ggml_bridge.library import LLAMA_CPP_PYTHON_VERSION
from oallama.core.files import cache_folder
from oallama.setup.build import SOURCE, fetch_source
from oallama.setup.console import Console, SetupError, Step, capture, guarded, lock, run
from oallama.setup.machine import build_jobs, check_compiler, find_compiler, platform_tag
from oallama.setup.uv import package_environment, packages_folder

from .build import Builder
from .pack import ARCHIVE, copy_libraries, strip, write_pack
from .recipe import (
    CPU_VARIANTS,
    DEFAULT_ARCHITECTURES,
    LIBRARIES,
    LIMIT_BYTES,
    NATIVE,
    PROGRAMS,
    PYTHON_PARTS,
    parse_architectures,
)
from .toolkit import assemble, toolkit_in, unpack_wheel


def main(root: Path, arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="build_cuda", description="Build llama.cpp for CUDA without a GPU; pack it.")
    parser.add_argument("--arch", default=DEFAULT_ARCHITECTURES, metavar="LIST", help="90a (default), or 90a,89,120a")
    parser.add_argument("--out", type=Path, default=root / "build" / "cuda-pack", metavar="DIR")
    parser.add_argument("--cuda", type=Path, metavar="DIR", help="a CUDA 13 toolkit (default: the package index's)")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python version of the target (default 3.12)")
    parser.add_argument("--no-fa", action="store_true", help="omit flash attention: a third less to compile")
    parser.add_argument("-j", "--jobs", type=int, help="parallel compilers")
    options = parser.parse_args(arguments)
    console = Console(sys.stderr, root / "build" / "build_cuda.log")
    return guarded(console, "build_cuda", lambda: _main(root, console, options))


def _main(root: Path, console: Console, options: argparse.Namespace) -> int:
    env = {"PATH": os.defpath, **os.environ}
    architectures = parse_architectures(options.arch)
    work = cache_folder(env).absolute() / "cuda"
    with lock(work / "build.lock", console):
        console.open_log()
        python = root / ".venv" / "bin" / "python"
        if not python.is_file():
            raise SetupError("no environment to fetch packages: run python3 scripts/setup_env.py first")
        packages = package_environment(env, python)
        with console.step("source", f"fetching llama.cpp {SOURCE.release}") as step:
            source = fetch_source(console, step, work, python, env)
            _fetch_wheels(console, step, python, options.python, work, packages)
            step.result = f"source of llama.cpp {SOURCE.release} and wheels for Python {options.python}"
        check_compiler(find_compiler(env), env)
        with console.step("toolkit", "looking for nvcc") as step:
            toolkit = toolkit_in(options.cuda or assemble(console, step, python, work, packages), env)
            step.result = f"nvcc {toolkit.version}" + ("" if options.cuda else ", from the package index")
        builder = Builder(console, root, work, source, options.jobs or build_jobs(env), env)
        native = builder.native()
        variants = builder.cpu_variants()
        built = builder.cuda(toolkit, architectures, not options.no_fa)
        tree = work / "tree"
        _collect(tree, python, work, built, native, variants, env)
        manifest: dict[str, Any] = {
            "llama_cpp": SOURCE.release, "llama_cpp_python": LLAMA_CPP_PYTHON_VERSION,
            "architectures": [name.removesuffix("-real") for name in architectures],
            "flash_attention": not options.no_fa, "nvcc": toolkit.version, "python": options.python,
            "platform": platform_tag(), "native_digest": digest_files(root, native_sources(root)),
            "cpu_variants": [variant.name for variant in CPU_VARIANTS],
        }  # fmt: skip
        with console.step("pack", "compressing") as step:
            n_bytes = write_pack(tree, manifest, options.out, LIMIT_BYTES)
            step.result = f"packed {n_bytes / 2**20:.1f} MiB of at most {LIMIT_BYTES >> 20}"
    print(options.out / ARCHIVE)
    return 0


def _fetch_wheels(console: Console, step: Step, python: Path, version: str, work: Path, env: Mapping[str, str]) -> None:
    """Wheels of PYTHON_PARTS for the other machine's Python, in the versions of this environment."""
    folder, mark = work / "python-wheels", work / "python-wheels" / "wanted.txt"
    frozen = capture([str(python), "-m", "pip", "list", "--format=freeze"], env, 60.0) or ""
    pins = {line.partition("==")[0].lower().replace("_", "-"): line for line in frozen.splitlines() if "==" in line}
    wanted = [pins.get(name, name) for name in PYTHON_PARTS]
    text = "\n".join([version, *wanted]) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    target = ["--python-version", version, "--implementation", "cp"]
    for number in (28, 27, 24, 17, 12):
        target += ["--platform", f"manylinux_2_{number}_x86_64"]
    target += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux2010_x86_64"]
    run(console, step, [*pip, *target, *wanted], env, f"fetching wheels for Python {version}")
    mark.write_text(text, encoding="utf-8")


def _collect(
    tree: Path, python: Path, work: Path, built: Path, native: Path, variants: Mapping[str, Path],
    env: Mapping[str, str],
) -> None:  # fmt: skip
    """Put everything that travels into `tree`, anew."""
    shutil.rmtree(tree, ignore_errors=True)
    copy_libraries(built, LIBRARIES, tree / "lib")
    copy_libraries(native, NATIVE, tree / "native")
    for name, library in variants.items():
        (tree / "cpu" / name).mkdir(parents=True)
        shutil.copy2(library, tree / "cpu" / name / "libggml-cpu.so.0")
    site, bindings = tree / "site", packages_folder(python, env) / "llama_cpp"
    shutil.copytree(bindings, site / "llama_cpp", ignore=lambda _, names: [n for n in names if not n.endswith(".py")])
    info = site / f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}.dist-info"
    info.mkdir()
    facts = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {LLAMA_CPP_PYTHON_VERSION}\n"
    (info / "METADATA").write_text(facts, "utf-8")
    for wheel in sorted((work / "python-wheels").glob("*.whl")):
        unpack_wheel(wheel, site)
    (tree / "bin").mkdir()
    for name in PROGRAMS:
        for path in (built / name, *sorted(built.glob(f"lib{name}-impl.so*"))):
            shutil.copy2(path, tree / "bin" / path.name, follow_symlinks=False)
    strip(tree, env)
