"""Set-up from nothing to a tested environment, or the finding that there is nothing to do."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FrameType

from . import vulkan
from .console import Console, format_seconds
from .environment import DEFAULT, Environment, Stamp, digest_files, lock, native_sources
from .errors import SetupError, UsageError
from .gpu import CHOICES, Backend, choose_backend, gpu_hint
from .llama import BuildMachine, LlamaInstaller, working_recipe
from .llama_wheel import pinned_version
from .locked import LOCK, PROJECT, TOOLS, Lock, read_lock
from .machine import check_compiler, find_compiler, platform_tag, this_cpu

VULKAN = ".venv-vulkan"
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Setup:
    """One set-up of one checkout's environment. `extras` are those of pyproject.toml that are asked for."""

    def __init__(
        self, root: Path, machine: BuildMachine, console: Console, extras: Sequence[str], name: str = DEFAULT
    ) -> None:
        self.root = root
        self.machine = machine
        self.console = console
        self.extras = sorted(extras)
        self.environment = Environment(root, name)
        self.version = pinned_version((root / "pyproject.toml").read_text(encoding="utf-8"))
        self.unlocked = machine.env.get("OALLAMA_UNLOCKED", "") not in ("", "0")

    @cached_property
    def lock(self) -> Lock:
        """Read only where something is installed: a set-up that is up to date takes hundredths of a second."""
        return read_lock(LOCK.read_text(encoding="utf-8"))

    def inputs(self) -> dict[str, str]:
        """Digests of everything that, when it changes, asks for some of the work to be done again."""
        env, compiler = self.machine.env, self.machine.compiler
        asked = [self.machine.wish, *(env.get(name, "") for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS"))]
        machine = [self.machine.cpu.digest, str(compiler), compiler.cxx, compiler.target, platform_tag(), gpu_hint(env)]
        return {
            "place": self.environment.place(),
            "project": digest_files(self.root, [self.root / "pyproject.toml"]),
            "packages": digest_files(LOCK.parent, [LOCK]),
            "native": digest_files(self.root, native_sources(self.root)),
            "llama": hashlib.sha256(repr([*machine, *asked, self.version]).encode()).hexdigest()[:16],
        }

    def up_to_date(self) -> bool:
        stamp = self.environment.read_stamp()
        return stamp is not None and stamp.inputs == self.inputs() and set(self.extras) <= set(stamp.extras)

    def run(self, refresh: bool = False) -> Stamp:
        """Do what is missing. Raises SetupError; an environment that was cut short is known as such ever after."""
        machine = self.machine
        check_compiler(machine.compiler, machine.env)
        fault = self.environment.fault(machine.env)
        stamp = None if fault else self.environment.read_stamp()
        extras = sorted({*self.extras, *(stamp.extras if stamp else ())})
        old = None if refresh else stamp
        backend = None  # None: the installed llama-cpp-python stays
        if old is None or old.inputs["llama"] != self.inputs()["llama"]:
            with self.console.step("machine", "looking for GPUs") as step:
                cmake_args = machine.env.get("CMAKE_ARGS", "")
                backend = choose_backend(machine.wish, machine.env, machine.compiler.cxx, cmake_args)
                step.result = f"{machine.cpu.model}, {machine.compiler}; {backend.why}"
                if old is not None and old.wheel == self._wheel(backend):
                    backend = None
                    step.result += "; the installed llama.cpp is the one for it"
        with self.console.step("environment", f"creating {self.environment.name}") as step:
            self.environment.prepare(self.console, step, fault, machine.env)
        try:
            stamp = self._install(old, backend, extras, refresh)
        except SetupError:
            self.environment.settle()  # the command that failed ended by itself: nothing is half-written
            raise
        self.environment.write_stamp(stamp)
        return stamp

    def _wheel(self, backend: Backend) -> str:
        """Key of the llama-cpp-python that would be installed for a back end, by what is known of it."""
        machine = self.machine
        auto = machine.wish == "auto"
        return working_recipe(backend, self.version, machine.cpu, machine.compiler, machine.env, auto).key

    def _install(self, old: Stamp | None, backend: Backend | None, extras: list[str], refresh: bool) -> Stamp:
        now = self.inputs()
        if old is None or extras != old.extras or any(old.inputs.get(of) != now[of] for of in ("project", "packages")):
            self._install_packages(extras)
        if old is not None and backend is None:
            self._install_project(extras)
            return Stamp(now, extras, old.wheel, old.backend, old.layouts, old.notes)
        assert backend is not None
        self.environment.drop_stamp()
        self.environment.drop_native_build()
        installer = LlamaInstaller(self.console, self.environment, self.machine, self.version)
        made = installer.install(backend, lambda: self._install_project(extras), refresh)
        return Stamp(now, extras, made.wheel, made.backend, made.layouts, made.notes)

    def _install_packages(self, extras: list[str]) -> None:
        """What the project, its build and these extras need: as locked.txt has it, or with OALLAMA_UNLOCKED=1 whatever
        the package index has."""
        groups = [PROJECT, TOOLS, *extras]
        if self.unlocked:
            what, requirements = "packages of any version, unchecked", self.lock.unlocked(groups)
        else:
            what, requirements = "packages that are known by their hashes", self.lock.requirements(groups)
        with self.console.step("packages", f"installing {what}") as step:
            self.environment.install_packages(self.console, step, requirements, not self.unlocked, self.machine.env)
            step.result = f"installed {what}"

    def _install_project(self, extras: list[str]) -> None:
        """With what extras need that are not locked."""
        unlocked = self.unlocked or not set(extras) <= set(self.lock.given)
        env = {name: value for name, value in self.machine.env.items() if name != "CMAKE_ARGS"}  # llama.cpp's, not ours
        env.update(CC=self.machine.compiler.cc, CXX=self.machine.compiler.cxx)
        what = "oallama and its native bridge"
        with self.console.step("oallama", f"installing {what}") as step:
            self.environment.install_project(self.console, step, extras, unlocked, env)
            step.result = f"installed {what}"


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip and compilers, without what would make pip install elsewhere or ask questions."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    kept = {name: value for name, value in env.items() if name not in dropped}
    return {**kept, "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def main(root: Path, arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Set up .venv: see docs/install.md.")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml (test, plots, train)")
    parser.add_argument("--refresh", action="store_true", help="look, install and test again even if nothing changed")
    parser.add_argument(
        "--vulkan", action="store_true", help=f"set up {VULKAN}, beside .venv, with Vulkan on any device"
    )
    packages = "with --vulkan: install what the system lacks, instead of saying what it is"
    parser.add_argument("--install-packages", action="store_true", help=packages)
    options = parser.parse_args(arguments)
    if options.install_packages and not options.vulkan:
        parser.error("--install-packages goes with --vulkan")
    console = Console(sys.stderr, root / "build" / ("setup-vulkan.log" if options.vulkan else "setup.log"))
    return guarded(console, "set-up", lambda: _set_up(root, console, options, time.monotonic()))


def guarded(console: Console, what: str, job: Callable[[], int]) -> int:
    """The exit status of `job`, or of what it ran into: Ctrl-C, a known fault, a full disk are told in a sentence."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        return job()
    except KeyboardInterrupt:
        console.clear()
        console.say(f"{what} interrupted: run it again to go on")
        return INTERRUPTED
    except SetupError as error:
        _explain(console, error)
        return USAGE if isinstance(error, UsageError) else FAILED
    except OSError as error:
        full = "the disk is full, free about 2 GB" if error.errno == 28 else "check that the folder can be written"
        _explain(console, SetupError(f"{error.filename or 'a file'}: {error.strerror or error}: {full}"))
        return FAILED


def asked_backend(env: Mapping[str, str]) -> str:
    """OALLAMA_BACKEND, `auto` where it is not set; raises UsageError for one that does not exist."""
    wish = env.get("OALLAMA_BACKEND", "").strip().lower() or "auto"
    if wish not in CHOICES:
        raise UsageError(f"OALLAMA_BACKEND={wish} is not known: use one of {', '.join(CHOICES)}")
    return wish


def _set_up(root: Path, console: Console, options: argparse.Namespace, start: float) -> int:
    env = clean_environment(os.environ)
    name, wish = (VULKAN, "vulkan") if options.vulkan else (DEFAULT, asked_backend(env))
    compiler = find_compiler(env)
    setup = Setup(root, BuildMachine(env, this_cpu(env), compiler, wish), console, options.extra, name)
    if not options.refresh and setup.up_to_date():
        print(f"set-up: up to date ({format_seconds(time.monotonic() - start)})", file=sys.stderr)
        return DONE
    with lock(console.log_path.with_suffix(".lock"), console):
        if options.refresh or not setup.up_to_date():  # another process may have done it while we waited
            console.open_log()
            console.say(f"set-up of {name} (log: {console.log_path})")
            if options.install_packages:
                vulkan.install_packages(console, compiler.cxx, env)
            elif options.vulkan:
                vulkan.check(compiler.cxx, env)
            stamp = setup.run(options.refresh)
            for note in stamp.notes:
                console.say(f"  note: {note}")
        console.say(f"set-up: done ({format_seconds(time.monotonic() - start)})")
    return DONE


def _explain(console: Console, error: SetupError) -> None:
    console.clear()
    if error.tail:
        console.say("  the last lines were:")
        for line in error.tail:
            console.say(f"    {line}")
        console.say(f"  the whole log is {console.log_path}")
    console.say(f"error: {error}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
