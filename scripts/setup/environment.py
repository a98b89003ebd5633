"""The project's `.venv`, or one beside it: its stamp, which says what it was set up for, and what goes into it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .commands import capture, run
from .console import Console, SetupStep
from .errors import SetupError
from .files import write_json

DEFAULT = ".venv"
STAMP = "oallama-setup.json"
UNFINISHED = "oallama-setup.unfinished"
SCHEMA = 1
_NATIVE = (".c", ".cc", ".cpp", ".h", ".hpp", ".cmake", ".map")


@dataclass(frozen=True)
class Stamp:
    """What a finished set-up was made from (`inputs`: name -> digest) and what came out of it."""

    inputs: dict[str, str]
    extras: list[str]
    wheel: str  # key of the installed llama-cpp-python
    backend: str
    layouts: dict[str, str] = field(default_factory=dict)  # CPU buffer type -> "ok" or why it is not used
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA


class Environment:
    """`.venv` in the project root, or another `name` there."""

    def __init__(self, root: Path, name: str = DEFAULT) -> None:
        self.root = root
        self.name = name
        self.folder = root / name
        self.python = self.folder / "bin" / "python"

    def read_stamp(self) -> Stamp | None:
        """The stamp of a finished set-up of this very folder; None where there is none, or it was cut short."""
        if (self.folder / UNFINISHED).exists() or not (self.folder / "bin" / "oallama").exists():
            return None
        try:
            stamp = Stamp(**json.loads((self.folder / STAMP).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        same = stamp.schema == SCHEMA and stamp.inputs.get("place") == self.place()
        return stamp if same else None

    def drop_stamp(self) -> None:
        """Forget what was installed: it is about to be replaced."""
        (self.folder / STAMP).unlink(missing_ok=True)

    def settle(self) -> None:
        """Take the mark of an interrupted set-up away."""
        (self.folder / UNFINISHED).unlink(missing_ok=True)

    def write_stamp(self, stamp: Stamp) -> None:
        """Declare the set-up finished: the last thing that is done."""
        write_json(self.folder / STAMP, asdict(stamp))
        self.settle()

    def place(self) -> str:
        """Where the environment and its interpreter are: an environment that was moved, or lost it, does not work."""
        return f"{self.folder} {os.path.realpath(self.python)}"

    def fault(self, env: Mapping[str, str]) -> str | None:
        """Why the environment has to be made anew; None when it is usable.

        That is so when a set-up left it half-written, when it was moved, or when its interpreter is gone. One that
        somebody made by hand is usable.
        """
        if not self.folder.exists():
            return "there is none"
        if (self.folder / UNFINISHED).exists():
            return "the last set-up was cut short"
        version = capture([str(self.python), "-c", "import pip, sys; print(sys.version_info >= (3, 10))"], env)
        if version is None:
            return "its Python or pip does not run"
        if version.strip() != "True":
            return "its Python is older than 3.10"
        try:
            place = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))["inputs"]["place"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if place == self.place() else "it was moved or its Python was replaced"

    def prepare(self, console: Console, step: SetupStep, fault: str | None, env: Mapping[str, str]) -> None:
        """Make the environment anew where it has a fault, and mark it unfinished."""
        if fault is None:
            (self.folder / UNFINISHED).touch()
            step.result = f"kept {self.name}"
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / UNFINISHED).touch()
        run(console, step, [sys.executable, "-m", "venv", str(self.folder)], env, f"creating {self.name}")
        self._upgrade_old_pip(console, step, env)
        step.result = f"created {self.name} with Python {'.'.join(map(str, sys.version_info[:3]))} ({fault})"

    def _upgrade_old_pip(self, console: Console, step: SetupStep, env: Mapping[str, str]) -> None:
        shown = capture([str(self.python), "-m", "pip", "--version"], env) or ""
        found = re.match(r"pip (\d+)\.(\d+)", shown)
        if found and (int(found[1]), int(found[2])) < (21, 3):  # the first that installs this project in editable mode
            run(console, step, [*self._pip("install"), "--upgrade", "pip"], env, "upgrading pip")

    def install_packages(
        self, console: Console, step: SetupStep, requirements: str, hashed: bool, env: Mapping[str, str]
    ) -> None:
        """Install what is named. hashed: only if its hash is, and nothing that it needs but does not name."""
        options = ["--require-hashes", "--no-deps"] if hashed else ["--prefer-binary"]
        with requirements_file(requirements) as file:
            command = [*self._pip("install"), *options, "--requirement", str(file)]
            run(console, step, command, env, "installing packages")

    def install_wheel(self, console: Console, step: SetupStep, wheel: Path, env: Mapping[str, str]) -> None:
        """Install a llama-cpp-python wheel in place of any other; its dependencies come with the project's."""
        command = [*self._pip("install"), "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
        run(console, step, command, env, "installing llama-cpp-python")

    def install_project(
        self, console: Console, step: SetupStep, extras: list[str], dependencies: bool, env: Mapping[str, str]
    ) -> None:
        """Editable install of the project, which compiles the native bridge by tools that are there; `dependencies`:
        with what it needs, of any version."""
        if self.name != DEFAULT:
            env = {**env, "SKBUILD_BUILD_DIR": str(self._native_build())}
        target = f"{self.root}[{','.join(extras)}]" if extras else str(self.root)
        # Never from source: llama-cpp-python was installed before, so a request for it would be a fault.
        options = ["--prefer-binary", "--only-binary", "llama-cpp-python"] if dependencies else ["--no-deps"]
        command = [*self._pip("install"), "--verbose", "--no-build-isolation", *options, "--editable", target]
        run(console, step, command, env, "installing oallama", cwd=self.root)

    def drop_native_build(self) -> None:
        """Forget how the native part was compiled: CMake would keep the compiler of another time."""
        default = self.name == DEFAULT
        for folder in (self.root / "build").glob("*-none-*") if default else [self._native_build()]:
            shutil.rmtree(folder, ignore_errors=not default)

    def _native_build(self) -> Path:
        """Build folder of an environment that is not the default one, whose folder pyproject.toml names."""
        return self.root / "build" / self.name.lstrip(".")

    def _pip(self, verb: str) -> list[str]:
        return [str(self.python), "-m", "pip", verb]


@contextmanager
def requirements_file(requirements: str) -> Iterator[Path]:
    """A file for pip's --requirement."""
    with tempfile.TemporaryDirectory(prefix="oallama-setup-") as folder:
        file = Path(folder, "requirements.txt")
        file.write_text(requirements, encoding="utf-8")
        yield file


def python_with_pip(root: Path, env: Mapping[str, str], what: str) -> Path:
    """The default environment's Python, or this one. Raises SetupError where neither has pip, and the tools that build
    llama-cpp-python, to fetch `what` with."""
    for python in (Environment(root).python, Path(sys.executable)):
        if capture([str(python), "-c", "import pip, scikit_build_core"], env) is not None:
            return python
    raise SetupError(f"there is no pip to fetch {what} with: run python3 scripts/setup_env.py first")


def digest_files(root: Path, files: Iterator[Path] | list[Path]) -> str:
    """One digest over the names and contents of files; those that do not exist count as absent."""
    total = hashlib.sha256()
    for file in sorted(files):
        if file.is_file():
            total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def native_sources(root: Path) -> list[Path]:
    """The files that the native bridge is compiled from."""
    native = [path for path in (root / "ggml_bridge").rglob("*") if path.suffix in _NATIVE]
    return [*native, *(root / "ggml_bridge").rglob("CMakeLists.txt"), root / "CMakeLists.txt"]


@contextmanager
def lock(path: Path, console: Console) -> Iterator[None]:
    """Hold a lock file; says so once when another process has it, and waits. The kernel frees it when we die."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise SetupError(f"{path} cannot be written ({error.strerror}): set OALLAMA_CACHE_DIR elsewhere") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            console.say(f"  another set-up is running (process {file.read().strip() or 'unknown'}): waiting for it")
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.2)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
