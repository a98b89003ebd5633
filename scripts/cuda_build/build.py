"""Compiling: the main build with CUDA, one libggml-cpu a CPU variant, and our own two libraries. All of it is kept in
the work folder, so that a build that was cut short goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from oallama.setup.build import cmake_build
from oallama.setup.console import Console

from .recipe import CPU_VARIANTS, LIBRARIES, NATIVE, cpu_flags, cuda_flags
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

    def cuda(
        self, toolkit: Toolkit, architectures: Sequence[str], flash_attention: bool, programs: Sequence[str]
    ) -> Path:
        """Libraries, and programs where their source is there. Returns the folder they are in."""
        has_tools = (self.source / "tools" / "llama-bench").is_dir()
        flags = (*cuda_flags(architectures, flash_attention, has_tools), *toolkit.flags())
        targets = (*LIBRARIES, *(programs if has_tools else ()))
        names = ", ".join(architectures).replace("-real", "")
        with self.console.step("CUDA", f"compiling for sm_{names}") as step:
            step.announce(f"compiling for sm_{names}, {self.jobs} jobs: over 60 core-minutes, once")
            folder = self._build(self.source, self.work / "build", flags, targets)
            step.result = f"compiled llama.cpp for sm_{names} with nvcc {toolkit.version}"
        return folder / "bin"

    def cpu_variants(self) -> dict[str, Path]:
        """libggml-cpu by variant, for all but the last, which is in the main build."""
        found = {}
        for variant in CPU_VARIANTS[:-1]:
            with self.console.step("CPU", f"compiling libggml-cpu for {variant.name}") as step:
                work = self.work / f"build-cpu-{variant.name}"
                folder = self._build(self.source, work, cpu_flags(variant), ("ggml-cpu",))
                found[variant.name] = (folder / "bin" / "libggml-cpu.so.0").resolve()
                step.result = f"compiled libggml-cpu for {variant.name}"
        return found

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


def compiler_seconds(folder: Path) -> float:
    """What all compilers and linkers of a ninja build took together, however often it was cut short; 0 where it was not
    ninja's. What was built twice counts as its last time."""
    try:
        lines = (folder / ".ninja_log").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return 0.0
    by_output = {}
    for line in lines:
        start, end, _, output, _ = line.split("\t")
        by_output[output] = (int(start), int(end))
    return sum((end - start) / 1e3 for start, end in set(by_output.values()))  # one edge may have several outputs
