"""Installs llama.cpp into an environment: tries builds until one passes its self-test, or takes a prebuilt one.

The bindings come from llama-cpp-python without its libraries. llama.cpp's libraries are in a separate folder, from
which ggml_bridge loads them for the bindings.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ggml_bridge.layouts import FAULTS_FILE, faults_of_kinds
from ggml_bridge.library import INSTALLED, LIB_PATH_VARIABLE, LLAMA_CPP_PYTHON_VERSION
from oallama.core.files import cache_folder, write_whole
from oallama.core.temporary import temporary_folder
from oallama.setup.build import SOURCE, Build, Variant, compile_build, install_bindings, make_build
from oallama.setup.console import Console, SetupError, lock, run
from oallama.setup.gpu import GpuBackend, choose_backend, gpu_hint
from oallama.setup.machine import Compiler, check_compiler, find_compiler, this_cpu
from oallama.setup.prebuilt import check_machine, copy_build, take
from oallama.setup.uv import package_environment

STAMP = "oallama-setup.json"
_SELFTEST = """
import json
from ggml_bridge.errors import BridgeError
from ggml_bridge.selftest import check_layouts
try:
    print(json.dumps(check_layouts()))
except BridgeError as error:  # not even the layouts can be listed
    print(json.dumps({"build": str(error)}))
"""
_SELFTEST_S = 300.0
# In place of a layout's name, faults of the whole build:
UNUSABLE = "build"  # it cannot be compiled or loaded
DIED = "self-test"  # the child died without naming a layout


@dataclass(frozen=True)
class Installed:
    """The llama.cpp of an environment. asked: digest of what it was built for. folder: its source. given: argument of
    --llama-cpp; empty if compiled. layouts: the self-test's results."""

    asked: str
    folder: str
    given: str
    backend: str
    layouts: dict[str, str]
    notes: list[str]


def next_variant(variant: Variant, bad: Mapping[str, str], has_amx: bool, auto: bool) -> Variant | None:
    """Return the variant to build after a failure (`bad`: layout -> fault); None after the last one.

    A layout that multiplies wrongly by single matrices, or crashes, is built out. With `auto`, the CPU replaces a GPU
    back end that cannot be built or loaded. If the self-test died without naming a layout, AMX is built out first.
    """
    if variant.backend.name != "cpu" and auto and (UNUSABLE in bad or DIED in bad):
        return replace(variant, backend=GpuBackend("cpu", f"CPU build: the {variant.backend.name} build does not work"))
    if variant.amx and has_amx and ("AMX" in bad or DIED in bad):
        return replace(variant, amx=False)
    if variant.repack and ("CPU_REPACK" in bad or DIED in bad):
        return replace(variant, repack=False)
    return None


class Installer:
    """Installs into the environment in the folder `prefix`. wish: the back end, as in OALLAMA_BACKEND. amx: whether the
    build may use AMX."""

    def __init__(self, console: Console, prefix: Path, env: Mapping[str, str], wish: str, amx: bool = True) -> None:
        self.console, self.prefix, self.env, self.wish, self.amx = console, prefix, env, wish, amx
        self.python = prefix / "bin" / "python"
        self.cache = cache_folder(env).absolute()
        self.cpu = this_cpu()

    @cached_property
    def compiler(self) -> Compiler:
        return find_compiler(self.env)

    def installed(self) -> Installed | None:
        """Record of the finished setup of this environment; None without one, or for other needs than today's."""
        record = self._last()
        is_done = record and self.libraries().is_dir() and record.asked == self.asked(record.given)
        return record if is_done else None

    def _last(self) -> Installed | None:
        try:
            return Installed(**json.loads((self.prefix / STAMP).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def libraries(self) -> Path:
        """The folder of llama.cpp's libraries and programs in this environment."""
        return self.prefix / INSTALLED

    def asked(self, given: str) -> str:
        """Return a digest of everything that the choice of llama.cpp depends on."""
        parts = [LLAMA_CPP_PYTHON_VERSION, SOURCE.release, str(self.prefix), given]
        if not given:
            compiler = self.compiler
            parts += [self.wish, self.cpu.digest, str(compiler), compiler.cxx, compiler.target, gpu_hint(self.env)]
            parts += [self.env.get(name, "") for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS")]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def run(self, given: str | None = None, sha256: str | None = None, refresh: bool = False) -> Installed:
        """Install the given llama.cpp, else the one given before, else a build for this machine. refresh: compile or
        test again. Raises SetupError, and then leaves the installed llama.cpp."""
        if given is None and not refresh:
            if (record := self.installed()) is not None:
                return record
            given = last.given if (last := self._last()) else None
        record = self._prebuilt(given, sha256) if given else self._compiled()
        write_whole(self.prefix / STAMP, json.dumps(asdict(record), indent=1))
        return record

    def _prebuilt(self, given: str, sha256: str | None) -> Installed:
        with self.console.step("llama.cpp", f"taking {given}") as step:
            with lock(self.cache / "setup.lock", self.console):
                folder = take(given, sha256, self.cache, step)
            check_machine(folder)
            step.result = f"taken from {folder}"
        layouts = self._install(folder)
        if bad := _failures(layouts):
            raise SetupError(f"the llama.cpp in {folder} does not work on this machine: {_told(bad)}")
        return Installed(self.asked(given), str(folder), given, "prebuilt", layouts, [])

    def _compiled(self) -> Installed:
        check_compiler(self.compiler, self.env)
        with self.console.step("machine", "looking for GPUs") as step:
            backend = choose_backend(self.wish, self.env, self.compiler.cxx, self.env.get("CMAKE_ARGS", ""))
            step.result = f"{self.cpu.model}, {self.compiler}; {backend.why}"
        notes: list[str] = []
        variant: Variant | None = Variant(backend, amx=self.amx)
        while variant:
            build = make_build(variant, self.cpu, self.compiler, self.cache, self.env)
            bad = self._build(build)
            if build.folder is not None:
                layouts = self._install(build.folder)
                bad = _failures(layouts)
                if not bad:
                    return Installed(self.asked(""), str(build.folder), "", variant.backend.name, layouts, notes)
            following = next_variant(variant, bad, self.cpu.has_amx, self.wish == "auto")
            if following:
                notes.append(f"{variant} does not work ({_told(bad)}); using {following}")
                self.console.line("llama.cpp", notes[-1])
            variant = following
        raise SetupError(
            f"llama.cpp built with {self.compiler} does not work ({_told(bad)}): "
            "set CXX to another compiler (e.g. clang++) and run again, or see the log"
        )

    def _build(self, build: Build) -> dict[str, str]:
        """Compile unless cached. With `auto`, a failed GPU build is a result, not an error."""
        what = f"llama.cpp ({build.backend.name})"
        with self.console.step("llama.cpp", what) as step, lock(self.cache / "setup.lock", self.console):
            step.result = f"{what} from the cache"
            if build.folder is None:
                try:
                    compile_build(self.console, step, build, self.python, self.env)
                except SetupError as error:
                    if build.backend.name == "cpu" or self.wish != "auto":
                        raise
                    step.result = f"{what}: the build failed"
                    return {UNUSABLE: str(error)}
                step.result = f"{what} compiled"
        return {}

    def _install(self, folder: Path) -> dict[str, str]:
        """Test a copy of the libraries in a folder, and let it replace the installed ones unless it fails. Return the
        self-test's results."""
        place = self.libraries()
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder("new-", place.parent) as beside:
            copy = beside / place.name
            copy_build(folder, copy)
            layouts = self._test(copy)
            if not _failures(layouts):
                if faults := faults_of_kinds(layouts):
                    write_whole(copy / FAULTS_FILE, json.dumps(faults, indent=1))
                if place.exists():
                    place.replace(beside / "old")
                copy.replace(place)
        return layouts

    def _test(self, folder: Path) -> dict[str, str]:
        """Install the bindings, and multiply with every CPU layout of the libraries in a folder, in a child. Return
        results as check_layouts does, {"build": …} if llama_cpp cannot be loaded, {"self-test": …} if the child died.
        Raises SetupError if the self-test does not run."""
        with self.console.step("bindings", "installing llama-cpp-python") as step:
            packages = package_environment(self.env, self.python)
            run(self.console, step, install_bindings(self.python, self.env), packages, "installing llama-cpp-python")
            step.result = f"installed llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}"
        with self.console.step("self-test", "testing every CPU layout") as step:
            load = self._child(folder, "import ggml_bridge; ggml_bridge.load()")
            if load.returncode > 0:
                return {UNUSABLE: f"it cannot be loaded: {_last_line(load.stderr)}"}
            done = load if load.returncode < 0 else self._child(folder, _SELFTEST)
            if done.returncode < 0:
                return {DIED: f"died with {signal.Signals(-done.returncode).name}"}
            try:
                outcome = json.loads(_last_line(done.stdout))
            except ValueError:
                outcome = None
            if done.returncode > 0 or not isinstance(outcome, dict) or not outcome:
                raise SetupError(f"cannot run the self-test of llama.cpp: {_last_line(done.stderr)}")
            step.result = ", ".join(f"{layout} {result}" for layout, result in outcome.items())
        return {str(layout): str(result) for layout, result in outcome.items()}

    def _child(self, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
        env = {**self.env, LIB_PATH_VARIABLE: str(folder)}
        try:
            done = subprocess.run(
                [str(self.python), "-c", code], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=_SELFTEST_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"the self-test of llama.cpp took over {_SELFTEST_S:.0f} s: run it again") from error
        self.console.write_log(done.stdout + done.stderr)
        return done


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _failures(outcome: Mapping[str, str]) -> dict[str, str]:
    of_kinds = faults_of_kinds(outcome)
    return {layout: result for layout, result in outcome.items() if result != "ok" and layout not in of_kinds}


def _told(bad: Mapping[str, str]) -> str:
    return "; ".join(f"{layout}: {result}" for layout, result in bad.items())
