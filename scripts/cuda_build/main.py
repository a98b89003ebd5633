"""The command: from the pinned source package to a pack, or to a source archive."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from setup_env import digest_files, native_sources

from oallama.core.files import cache_folder
from oallama.core.units import format_seconds
from oallama.setup.build import SOURCE, fetch_source, pinned_version
from oallama.setup.console import Console, SetupError, Step, capture, guarded, lock, run
from oallama.setup.machine import build_jobs, check_compiler, find_compiler, platform_tag
from oallama.setup.uv import package_environment, packages_folder

from .build import Builder, compiler_seconds
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
    parse_programs,
)
from .source import unpack_source_archive, write_source_archive
from .toolkit import Toolkit, assemble, installed_root, toolkit_in, unpack_wheel


def main(root: Path, arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="build_cuda", description="Build llama.cpp for CUDA without a GPU; pack it.")
    parser.add_argument("--arch", default=DEFAULT_ARCHITECTURES, metavar="LIST", help="90a (default), or 90a,89,120a")
    parser.add_argument("--out", type=Path, default=root / "build" / "cuda-pack", metavar="DIR")
    parser.add_argument("--cuda", type=Path, metavar="DIR", help="a CUDA 13 toolkit; `here`: this machine's")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python version of the target (default 3.12)")
    parser.add_argument("--no-fa", action="store_true", help="omit flash attention: a third less to compile")
    parser.add_argument(
        "--programs", default=",".join(PROGRAMS), metavar="LIST", help=f"{', '.join(PROGRAMS)}; or none"
    )
    parser.add_argument(
        "--limit", type=int, default=LIMIT_BYTES >> 20, metavar="MiB", help="largest size of the pack, MiB"
    )
    parser.add_argument("-j", "--jobs", type=int, help="parallel compilers")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--source-archive", action="store_true", help="do not compile: pack the source for the target")
    either.add_argument(
        "--source", type=Path, metavar="FILE", help="build from a source archive, with this machine's nvcc"
    )
    options = parser.parse_args(arguments)
    console = Console(sys.stderr, root / "build" / "build_cuda.log")
    return guarded(console, "build_cuda", lambda: _main(root, console, options))


def _main(root: Path, console: Console, options: argparse.Namespace) -> int:
    env = {"PATH": os.defpath, **os.environ}
    architectures, programs = parse_architectures(options.arch), parse_programs(options.programs)
    work = cache_folder(env).absolute() / "cuda"
    version = pinned_version()
    limit = options.limit << 20
    with lock(work / "build.lock", console):
        console.open_log()
        start = time.monotonic()
        python = root / ".venv" / "bin" / "python"
        if not python.is_file():
            raise SetupError("no environment to fetch packages: run python3 scripts/setup_env.py first")
        packages = package_environment(env, python)
        if options.source:
            unpack_source_archive(options.source, work)
        else:
            with console.step("source", f"fetching llama.cpp {SOURCE.release}") as step:
                fetch_source(console, step, work, python, env)
                _copy_bindings(python, env, work / "bindings")
                _fetch_wheels(console, step, python, options.python, work, packages)
                step.result = f"source of llama.cpp {SOURCE.release} and wheels for Python {options.python}"
        if options.source_archive:
            with console.step("archive", "packing the source") as step:
                made = write_source_archive(work, options.out, limit)
                step.result = f"packed the source: {made.stat().st_size / 2**20:.1f} MiB"
            print(made)
            return 0
        check_compiler(find_compiler(env), env)
        toolkit = _toolkit(console, options, python, work, packages)
        builder = Builder(console, root, work, work / "source", options.jobs or build_jobs(env), env)
        native = builder.native()
        variants = builder.cpu_variants()
        built = builder.cuda(toolkit, architectures, not options.no_fa, programs)
        tree = work / "tree"
        _collect(tree, work, built, native, variants, programs, env)
        folders = ("build", "build-native", *(f"build-cpu-{variant.name}" for variant in CPU_VARIANTS[:-1]))
        manifest: dict[str, Any] = {
            "llama_cpp": SOURCE.release, "llama_cpp_python": version,
            "architectures": [name.removesuffix("-real") for name in architectures],
            "flash_attention": not options.no_fa, "nvcc": toolkit.version, "python": options.python,
            "platform": platform_tag(), "native_digest": digest_files(root, native_sources(root)),
            "cpu_variants": [variant.name for variant in CPU_VARIANTS], "jobs": builder.jobs,
            "seconds_of_this_call": round(time.monotonic() - start, 1),
            "compiler_seconds": {name: round(compiler_seconds(work / name), 1) for name in folders},
        }  # fmt: skip
        with console.step("pack", "compressing") as step:
            packed = _pack(console, tree, manifest, options.out, limit)
            step.result = f"packed {packed['archive_bytes'] / 2**20:.1f} MiB of at most {options.limit}"
        console.say(
            f"build_cuda: {sum(packed['unpacked_bytes'].values()) / 2**20:.1f} MiB unpacked, compilers took "
            f"{format_seconds(sum(packed['compiler_seconds'].values()))} in all, this call "
            f"{format_seconds(time.monotonic() - start)}"
        )
    print(options.out / ARCHIVE)
    return 0


def _pack(console: Console, tree: Path, manifest: Mapping[str, Any], out: Path, limit: int) -> dict[str, Any]:
    """The pack with the programs, or without them where they do not fit."""
    try:
        names = sorted(path.name for path in (tree / "bin").glob("llama-*"))
        return write_pack(tree, {**manifest, "programs": names}, out, limit)
    except SetupError:
        if not (tree / "bin").is_dir():
            raise
    console.line("pack", "llama.cpp's programs do not fit and are omitted")
    shutil.rmtree(tree / "bin")
    return write_pack(tree, {**manifest, "programs": []}, out, limit)


def _toolkit(
    console: Console, options: argparse.Namespace, python: Path, work: Path, env: Mapping[str, str]
) -> Toolkit:
    """The toolkit that is named, this machine's where the source came with us or `here` is said, else the wheels'."""
    with console.step("toolkit", "looking for nvcc") as step:
        here = options.source is not None or str(options.cuda) == "here"
        if options.cuda is not None and str(options.cuda) != "here":
            root = options.cuda
        elif here:
            found = installed_root(env)
            if found is None:
                raise SetupError("no nvcc on this machine: name a CUDA 13 toolkit with --cuda")
            root = found
        else:
            root = assemble(console, step, python, work, env)
        toolkit = toolkit_in(root, env)
        step.result = f"nvcc {toolkit.version}" + ("" if options.cuda or here else ", from the package index")
    return toolkit


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
    tree: Path,
    work: Path,
    built: Path,
    native: Path,
    variants: Mapping[str, Path],
    programs: Sequence[str],
    env: Mapping[str, str],
) -> None:
    """Put everything that travels into `tree`, anew."""
    shutil.rmtree(tree, ignore_errors=True)
    copy_libraries(built, LIBRARIES, tree / "lib")
    copy_libraries(native, NATIVE, tree / "native")
    for name, library in variants.items():
        (tree / "cpu" / name).mkdir(parents=True)
        shutil.copy2(library, tree / "cpu" / name / "libggml-cpu.so.0")
    site = tree / "site"
    shutil.copytree(work / "bindings", site / "llama_cpp")
    version = _version_of(site / "llama_cpp" / "__init__.py")
    info = site / f"llama_cpp_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n", "utf-8")
    for wheel in sorted((work / "python-wheels").glob("*.whl")):
        unpack_wheel(wheel, site)
    for name in programs:
        if (built / name).is_file():  # a source archive has none
            (tree / "bin").mkdir(exist_ok=True)
            for path in (built / name, *sorted(built.glob(f"lib{name}-impl.so*"))):
                shutil.copy2(path, tree / "bin" / path.name, follow_symlinks=False)
    strip(tree, env)


def _copy_bindings(python: Path, env: Mapping[str, str], folder: Path) -> None:
    """llama_cpp's Python part, as set-up installed it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (packages_folder(python, env) / "llama_cpp").glob("*.py"):
        shutil.copy2(path, folder / path.name)


def _version_of(module: Path) -> str:
    text = module.read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]
