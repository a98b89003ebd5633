"""Compiling: the main build with CUDA, one libggml-cpu a CPU variant, and our own two libraries. All of it is kept in
the work folder, so that a build that was cut short goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from oallama.setup.build import cmake_build
from oallama.setup.console import Console

from .recipe import CPU_VARIANTS, LIBRARIES, NATIVE, PROGRAMS, cpu_flags, cuda_flags
from .toolkit import Toolkit


class Builder:
    """Builds in `work` from llama.cpp's `source`, `jobs` compilers at once."""

    def __init__(self, console: Console, root: Path, work: Path, source: Path, jobs: int, env: Mapping[str, str]):
        self.console = console
        self.root = root
        self.work = work
        self.source = source
        self.jobs = jobs
        self.env = {**env, "GIT_CEILING_DIRECTORIES": str(work)}

    def cuda(self, toolkit: Toolkit, architectures: Sequence[str], flash_attention: bool) -> Path:
        """Libraries and programs. Returns the folder they are in."""
        flags = (*cuda_flags(architectures, flash_attention), *toolkit.flags())
        names = ", ".join(architectures).replace("-real", "")
        with self.console.step("CUDA", f"compiling for sm_{names}") as step:
            step.announce(f"compiling for sm_{names}, {self.jobs} jobs: over 60 core-minutes, once")
            folder = self._build(self.source, self.work / "build", flags, (*LIBRARIES, *PROGRAMS))
            step.result = f"compiled llama.cpp for sm_{names} with nvcc {toolkit.version}"
        return folder / "bin"

    def cpu_variants(self) -> dict[str, Path]:
        """libggml-cpu by variant, for all but the last, which is in the main build."""
        libraries = {}
        for variant in CPU_VARIANTS[:-1]:
            with self.console.step("CPU", f"compiling libggml-cpu for {variant.name}") as step:
                work = self.work / f"build-cpu-{variant.name}"
                folder = self._build(self.source, work, cpu_flags(variant), ("ggml-cpu",))
                libraries[variant.name] = (folder / "bin" / "libggml-cpu.so.0").resolve()
                step.result = f"compiled libggml-cpu for {variant.name}"
        return libraries

    def native(self) -> Path:
        """Our own libraries of this checkout. Returns the folder they are in."""
        with self.console.step("oallama", "compiling our own libraries") as step:
            flags = ("-DCMAKE_BUILD_TYPE=Release", "-DOALLAMA_NATIVE_TESTS=OFF")
            folder = self._build(self.root, self.work / "build-native", flags, NATIVE)
            step.result = f"compiled {', '.join(f'lib{name}' for name in NATIVE)}"
        return folder

    def _build(self, source: Path, folder: Path, flags: Sequence[str], targets: Sequence[str]) -> Path:
        with self.console.step("compile", f"compiling {folder.name}") as step:
            cmake_build(self.console, step, source, folder, flags, self.jobs, targets, self.env, folder.name)
        return folder
