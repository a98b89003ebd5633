"""Get llama-cpp-python into the environment: build it or take it from the cache, and test what it computes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .console import Console
from .environment import Environment, lock
from .errors import SetupError
from .gpu import Backend, choose_backend
from .llama_wheel import Recipe, Variant, WheelStore, make_recipe
from .machine import Compiler, Cpu, cache_dir

_SELFTEST = "import json; from ggml_bridge.selftest import check_layouts; print(json.dumps(check_layouts()))"
_SELFTEST_S = 300.0
WHOLE = "*"  # stands for a build that failed, or a self-test that died, as a whole


@dataclass(frozen=True)
class Machine:
    """What this set-up runs on, and what it was asked for: `wish` is OALLAMA_BACKEND."""

    env: dict[str, str]
    cpu: Cpu
    compiler: Compiler
    wish: str


@dataclass(frozen=True)
class Installed:
    """The llama-cpp-python that passed: the wheel's key, its back end, layout -> "ok", and what had to be left out."""

    wheel: str
    backend: str
    layouts: dict[str, str]
    notes: list[str]


def next_variant(variant: Variant, bad: Mapping[str, str], has_amx: bool, auto: bool) -> Variant | None:
    """What to build after a failure (`bad`: layout -> what is wrong); None when nothing is left to try.

    A layout that computes wrong or crashes is built out. With `auto`, a GPU back end that cannot be built or loaded is
    given up for the CPU. A test that died as a whole says no layout: the suspect is AMX where the CPU has it.
    """
    if variant.backend.name != "cpu" and auto and WHOLE in bad:
        return replace(variant, backend=Backend("cpu", f"CPU build: the {variant.backend.name} build does not work"))
    if variant.amx and has_amx and ("AMX" in bad or WHOLE in bad):
        return replace(variant, amx=False)
    if variant.repack and ("CPU_REPACK" in bad or WHOLE in bad):
        return replace(variant, repack=False)
    return None


class LlamaInstaller:
    """Builds, installs and tests variants of llama-cpp-python until one passes."""

    def __init__(self, console: Console, environment: Environment, machine: Machine, version: str) -> None:
        self.console = console
        self.environment = environment
        self.machine = machine
        self.version = version
        self.store = WheelStore(cache_dir(machine.env))

    def install(self, install_project: Callable[[], None], refresh: bool) -> Installed:
        """Try variants in order. `install_project` is called once, after the first wheel is in (the self-test is part
        of the project). With `refresh` remembered self-tests are run again. Raises SetupError when none passes."""
        machine, project_in = self.machine, False
        notes: list[str] = []
        cmake = machine.env.get("CMAKE_ARGS", "")
        with self.console.step("machine", "looking for GPUs") as step:
            backend = choose_backend(machine.wish, machine.env, machine.compiler.cxx, cmake)
            step.result = f"{machine.cpu.model}, {machine.compiler}; {backend.why}"
        variant: Variant | None = Variant(backend)
        while variant:
            recipe = make_recipe(variant, self.version, machine.cpu, machine.compiler, machine.env)
            outcome = {} if refresh else self.store.read_outcome(recipe.key)
            bad = _failures(outcome)
            if not bad:
                bad = self._install_wheel(recipe)
            if not bad and not project_in:
                install_project()
                project_in = True
            if not bad and not outcome:
                outcome = self._test(recipe)
                bad = _failures(outcome)
            if not bad:
                return Installed(recipe.key, variant.backend.name, outcome, notes)
            following = next_variant(variant, bad, machine.cpu.has_amx, machine.wish == "auto")
            what = "; ".join(result if layout == WHOLE else f"{layout}: {result}" for layout, result in bad.items())
            if following:
                notes.append(f"{variant} does not work ({what}), so {following} is used")
                self.console.line("llama.cpp", notes[-1])
            variant = following
        raise SetupError(
            f"llama.cpp built with {machine.compiler} does not work ({what}): "
            "name another compiler in CXX (for example clang++) and run again"
        )

    def _install_wheel(self, recipe: Recipe) -> dict[str, str]:
        """Build the wheel unless it is kept, and install it. A GPU build that fails is a result where we may choose."""
        env = self.machine.env
        with self.console.step("llama.cpp", f"llama-cpp-python {recipe.version} ({recipe.backend.name})") as step:
            with lock(self.store.cache / "setup.lock", self.console):
                wheel, source = self.store.find(recipe.key), "taken from the cache"
                if wheel is None:
                    source = "compiled"
                    try:
                        wheel = self.store.build(self.console, step, self.environment.python, recipe, env)
                    except SetupError as error:
                        if recipe.backend.name == "cpu" or self.machine.wish != "auto":
                            raise
                        step.result = f"{step.result}: the build failed"
                        return {WHOLE: str(error)}
            self.environment.install_wheel(self.console, step, wheel, env)
            step.result = f"{step.result} {source} and installed"
        return {}

    def _test(self, recipe: Recipe) -> dict[str, str]:
        """Multiply with every CPU buffer type in a child process, and remember the outcome."""
        with self.console.step("self-test", "multiplying with every CPU layout") as step:
            outcome = run_selftest(self.environment.python, self.machine.env, self.console)
            step.result = ", ".join(f"{layout} {result}" for layout, result in outcome.items())
            self.store.write_outcome(recipe.key, outcome)
        return outcome


def run_selftest(python: Path, env: Mapping[str, str], console: Console) -> dict[str, str]:
    """Layout -> "ok" or what is wrong; {"*": reason} when the child died or said nothing."""
    command = [str(python), "-c", _SELFTEST]
    console.log_command(command, {})
    try:
        done = subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SELFTEST_S
        )
    except subprocess.TimeoutExpired:
        return {WHOLE: f"the self-test did not end within {_SELFTEST_S:.0f} s"}
    console.write_log(done.stdout + done.stderr)
    if done.returncode < 0:
        return {WHOLE: f"the self-test died with {signal.Signals(-done.returncode).name}"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return {str(layout): str(result) for layout, result in json.loads(lines[-1]).items()}
    said = done.stderr.strip().splitlines()
    return {WHOLE: said[-1][:300] if said else f"the self-test ended with status {done.returncode}"}


def _failures(outcome: Mapping[str, str]) -> dict[str, str]:
    return {layout: result for layout, result in outcome.items() if result != "ok"}
