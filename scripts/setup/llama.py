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
from .gpu import Backend
from .llama_wheel import Recipe, Variant, WheelStore, make_recipe
from .machine import Compiler, Cpu, cache_dir

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
# In place of a layout's name, what concerns the whole build:
UNUSABLE = "build"  # it cannot be compiled or loaded
DIED = "self-test"  # the child died without saying in which layout


@dataclass(frozen=True)
class BuildMachine:
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
    given up for the CPU. Where the self-test died without naming a layout, AMX is suspected first.
    """
    if variant.backend.name != "cpu" and auto and (UNUSABLE in bad or DIED in bad):
        return replace(variant, backend=Backend("cpu", f"CPU build: the {variant.backend.name} build does not work"))
    if variant.amx and has_amx and ("AMX" in bad or DIED in bad):
        return replace(variant, amx=False)
    if variant.repack and ("CPU_REPACK" in bad or DIED in bad):
        return replace(variant, repack=False)
    return None


def working_recipe(
    backend: Backend, version: str, cpu: Cpu, compiler: Compiler, env: Mapping[str, str], auto: bool
) -> Recipe:
    """How llama-cpp-python is built here: without the CPU layouts that its self-test found wrong."""
    store, variant = WheelStore(cache_dir(env)), Variant(backend)
    while True:
        recipe = make_recipe(variant, version, cpu, compiler, env)
        outcome = store.read_outcome(recipe.key)
        bad = {layout: result for layout, result in outcome.items() if result != "ok"}
        following = next_variant(variant, bad, cpu.has_amx, auto) if bad else None
        if following is None:
            return recipe
        variant = following


class LlamaInstaller:
    """Builds, installs and tests variants of llama-cpp-python until one passes."""

    def __init__(self, console: Console, environment: Environment, machine: BuildMachine, version: str) -> None:
        self.console = console
        self.environment = environment
        self.machine = machine
        self.version = version
        self.store = WheelStore(cache_dir(machine.env))

    def install(self, backend: Backend, install_project: Callable[[], None], refresh: bool) -> Installed:
        """Try variants in order, the first with all that `backend` offers. Raises SetupError when none passes.

        `install_project` is called once, after the first wheel is in: the self-test is part of the project. With
        `refresh`, self-tests whose outcome is remembered are run again.
        """
        machine, project_in = self.machine, False
        notes: list[str] = []
        variant: Variant | None = Variant(backend)
        while variant:
            recipe = make_recipe(variant, self.version, machine.cpu, machine.compiler, machine.env)
            outcome = {} if refresh else self.store.read_outcome(recipe.key)
            bad = _failures(outcome)
            if not bad:
                bad = self._install_wheel(recipe, tested=bool(outcome))
            if not bad and not project_in:
                install_project()
                project_in = True
            if not bad and not outcome:
                outcome = self._test(recipe)
                bad = _failures(outcome)
            if not bad:
                return Installed(recipe.key, variant.backend.name, outcome, notes)
            following = next_variant(variant, bad, machine.cpu.has_amx, machine.wish == "auto")
            what = "; ".join(f"{layout}: {result}" for layout, result in bad.items())
            if following:
                notes.append(f"{variant} does not work ({what}), so {following} is used")
                self.console.line("llama.cpp", notes[-1])
            variant = following
        raise SetupError(
            f"llama.cpp built with {machine.compiler} does not work ({what}): "
            "name another compiler in CXX (for example clang++) and run again, or see the log"
        )

    def _install_wheel(self, recipe: Recipe, tested: bool) -> dict[str, str]:
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
                        return {UNUSABLE: str(error)}
            self.environment.install_wheel(self.console, step, wheel, env)
            step.result += f" {source} and installed" + (", passed its self-test before" if tested else "")
        return {}

    def _test(self, recipe: Recipe) -> dict[str, str]:
        """Multiply with every CPU buffer type in a child process, and remember the outcome."""
        with self.console.step("self-test", "multiplying with every CPU layout") as step:
            outcome = run_selftest(self.environment.python, self.machine.env, self.console)
            step.result = ", ".join(f"{layout} {result}" for layout, result in outcome.items())
            if UNUSABLE not in outcome:  # a driver's library may be there next time
                self.store.write_outcome(recipe.key, outcome)
        return outcome


def run_selftest(python: Path, env: Mapping[str, str], console: Console) -> dict[str, str]:
    """Layout -> "ok" or what is wrong; {"build": …} when llama_cpp cannot be loaded, {"self-test": …} when it died.

    Raises SetupError when the self-test itself does not run: that says nothing about the build.
    """
    load = _child(python, "import llama_cpp", env, console)
    if load.returncode > 0:
        return {UNUSABLE: f"llama_cpp cannot be loaded: {_last_line(load.stderr)}"}
    done = load if load.returncode < 0 else _child(python, _SELFTEST, env, console)
    if done.returncode < 0:
        return {DIED: f"died with {signal.Signals(-done.returncode).name}"}
    try:
        outcome = json.loads(_last_line(done.stdout))
    except ValueError:
        outcome = None
    if done.returncode > 0 or not isinstance(outcome, dict) or not outcome:
        raise SetupError(
            f"the self-test of llama.cpp cannot run ({_last_line(done.stderr)}): reinstall with setup_env.py --refresh"
        )
    return {str(layout): str(result) for layout, result in outcome.items()}


def _child(python: Path, code: str, env: Mapping[str, str], console: Console) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-c", code]
    console.log_command(command, {})
    try:
        done = subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SELFTEST_S
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"the self-test of llama.cpp did not end within {_SELFTEST_S:.0f} s: run it again") from error
    console.write_log(done.stdout + done.stderr)
    return done


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _failures(outcome: Mapping[str, str]) -> dict[str, str]:
    return {layout: result for layout, result in outcome.items() if result != "ok"}
