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

from cuda_build.pack import ARCHIVE, copy_libraries, strip, write_pack
from cuda_build.recipe import (
    CPU_VARIANTS,
    DEFAULT_ARCHITECTURES,
    LIBRARIES,
    NATIVE,
    PROGRAMS,
    PYTHON,
    PYTHON_PARTS,
    Build,
    cpu_flags,
    cuda_flags,
    parse_architectures,
)
from cuda_build.toolkit import Toolkit, assemble, toolkit_in, unpack_wheel
from ggml_bridge.library import LLAMA_CPP_PYTHON_VERSION
from oallama.core.files import cache_folder
from oallama.setup.build import SOURCE, cmake_build, download_source
from oallama.setup.console import Console, Step, capture, guarded, lock, run
from oallama.setup.machine import build_jobs, check_compiler, find_compiler, platform_tag
from oallama.setup.uv import package_environment, packages_folder

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="build_cuda", description="Build llama.cpp for CUDA without a GPU; pack it.")
    parser.add_argument("--arch", default=DEFAULT_ARCHITECTURES, metavar="LIST", help="90a (default), or 90a,89,120a")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cuda-pack", metavar="DIR")
    parser.add_argument("--cuda", type=Path, metavar="DIR", help="a CUDA 13 toolkit (default: the package index's)")
    parser.add_argument("-j", "--jobs", type=int, help="parallel compilers")
    options = parser.parse_args(arguments)
    console = Console(sys.stderr, ROOT / "build" / "build_cuda.log")
    return guarded(console, "build_cuda", lambda: _main(console, options))


def _main(console: Console, options: argparse.Namespace) -> int:
    env = {"PATH": os.defpath, **os.environ}
    architectures = parse_architectures(options.arch)
    work, python = cache_folder(env).absolute() / "cuda", Path(sys.executable)
    with lock(work / "build.lock", console):
        console.open_log()
        packages = package_environment(env, python)
        with console.step("source", f"fetching llama.cpp {SOURCE.release}") as step:
            source = download_source(console, step, work, python, env)
            _fetch_wheels(console, step, python, work, packages)
            step.result = f"source of llama.cpp {SOURCE.release} and wheels for Python {PYTHON}"
        check_compiler(find_compiler(env), env)
        with console.step("toolkit", "looking for nvcc") as step:
            toolkit = toolkit_in(options.cuda or assemble(console, step, python, work, packages), env)
            step.result = f"nvcc {toolkit.version}" + ("" if options.cuda else ", from the package index")
        builds = _builds(work, source, toolkit, architectures)
        for name, build in builds.items():
            with console.step(name, f"compiling {build.what}") as step:
                jobs, in_work = options.jobs or build_jobs(env), {**env, "GIT_CEILING_DIRECTORIES": str(work)}
                flags, targets = build.flags, build.targets
                cmake_build(console, step, build.source, build.folder, flags, jobs, targets, in_work, build.folder.name)
                step.result = f"compiled {build.what}"
        tree = work / "tree"
        _collect(tree, python, work, builds, env)
        manifest: dict[str, Any] = {
            "llama_cpp": SOURCE.release, "llama_cpp_python": LLAMA_CPP_PYTHON_VERSION,
            "architectures": [name.removesuffix("-real") for name in architectures],
            "nvcc": toolkit.version, "python": PYTHON, "platform": platform_tag(),
            "native_digest": digest_files(ROOT, native_sources(ROOT)),
            "cpu_variants": [variant.name for variant in CPU_VARIANTS],
        }  # fmt: skip
        with console.step("pack", "compressing") as step:
            step.result = f"packed {write_pack(tree, manifest, options.out) / 2**20:.1f} MiB"
    print(options.out / ARCHIVE)
    return 0


def _builds(work: Path, source: Path, toolkit: Toolkit, architectures: Sequence[str]) -> dict[str, Build]:
    """All builds by name: our own libraries of this checkout, libggml-cpu for each CPU variant but the last, which is
    in the main build, and that one: libraries and programs with CUDA."""
    native_flags = ("-DCMAKE_BUILD_TYPE=Release", "-DOALLAMA_NATIVE_TESTS=OFF")
    variants = {
        variant.name: Build(
            f"libggml-cpu for {variant.name}", source, work / f"build-cpu-{variant.name}", cpu_flags(variant),
            ("ggml-cpu",),
        )
        for variant in CPU_VARIANTS[:-1]
    }  # fmt: skip
    flags, names = (*cuda_flags(architectures), *toolkit.flags()), ", ".join(architectures).replace("-real", "")
    what = f"llama.cpp for sm_{names} with nvcc {toolkit.version}"
    return {
        "oallama": Build("our own libraries", ROOT, work / "build-native", native_flags, NATIVE),
        **variants,
        "CUDA": Build(what, source, work / "build", flags, (*LIBRARIES, *PROGRAMS)),
    }


def _fetch_wheels(console: Console, step: Step, python: Path, work: Path, env: Mapping[str, str]) -> None:
    """Wheels of PYTHON_PARTS for the other machine's Python, in the versions of this environment."""
    folder, mark = work / "python-wheels", work / "python-wheels" / "wanted.txt"
    frozen = capture([str(python), "-m", "pip", "list", "--format=freeze"], env, 60.0) or ""
    pins = {line.partition("==")[0].lower().replace("_", "-"): line for line in frozen.splitlines() if "==" in line}
    wanted = [pins.get(name, name) for name in PYTHON_PARTS]
    text = "\n".join([PYTHON, *wanted]) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    target = ["--python-version", PYTHON, "--implementation", "cp"]
    for number in (28, 27, 24, 17, 12):
        target += ["--platform", f"manylinux_2_{number}_x86_64"]
    target += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux2010_x86_64"]
    run(console, step, [*pip, *target, *wanted], env, f"fetching wheels for Python {PYTHON}")
    mark.write_text(text, encoding="utf-8")


def _collect(tree: Path, python: Path, work: Path, builds: Mapping[str, Build], env: Mapping[str, str]) -> None:
    """Put everything that travels into `tree`, anew."""
    shutil.rmtree(tree, ignore_errors=True)
    built = builds["CUDA"].folder / "bin"
    copy_libraries(built, LIBRARIES, tree / "lib")
    copy_libraries(builds["oallama"].folder, NATIVE, tree / "native")
    for variant in CPU_VARIANTS[:-1]:
        (tree / "cpu" / variant.name).mkdir(parents=True)
        library = (builds[variant.name].folder / "bin" / "libggml-cpu.so.0").resolve()
        shutil.copy2(library, tree / "cpu" / variant.name / "libggml-cpu.so.0")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
