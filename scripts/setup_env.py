#!/usr/bin/env python3
"""Set up `.venv` in the project root; scripts/demo and scripts/test call this. See docs/install.md.

Kept to what any Python 3 can read up to its imports: an older python3 hands over to a newer one, or says what is
missing.
"""

import os
import shutil
import sys

if sys.version_info < (3, 10):  # noqa: UP036  it is here for the older ones
    for name in ["python3." + str(minor) for minor in range(14, 9, -1)]:
        found = shutil.which(name)
        if found:
            os.execv(found, [found, *sys.argv])
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("error: oallama needs Python 3.10 or later and this is " + version + ": install a newer python3")

import argparse
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from oallama.core.units import format_seconds  # noqa: E402
from oallama.setup import vulkan  # noqa: E402
from oallama.setup.console import Console, capture, guarded, lock, run  # noqa: E402
from oallama.setup.gpu import asked_backend  # noqa: E402
from oallama.setup.install import Installer  # noqa: E402
from oallama.setup.uv import package_environment  # noqa: E402

LOCKS = ("scripts/locked.txt", "oallama/setup/locked.txt")
STAMP, UNFINISHED = "oallama-packages", "oallama-setup.unfinished"
NATIVE = (".c", ".cpp", ".h")


class Checkout:
    """The environment `name` of a checkout, and the packages in it."""

    def __init__(self, root: Path, name: str, extras: Sequence[str], console: Console, env: Mapping[str, str]) -> None:
        self.root, self.folder, self.console, self.env = root, root / name, console, env
        self.python = self.folder / "bin" / "python"
        self.default = name == ".venv"
        earlier_extras = self.read_stamp()[1:]
        self.extras = sorted({*extras, *earlier_extras})

    def read_stamp(self) -> list[str]:
        """Digest of what is installed, and the extras; empty where there is nothing."""
        try:
            return (self.folder / STAMP).read_text(encoding="utf-8").split()
        except OSError:
            return []

    def stamp(self) -> list[str]:
        files = [*native_sources(self.root), *(self.root / name for name in ("pyproject.toml", *LOCKS))]
        place = f"{self.folder} {os.path.realpath(self.python)}"
        return [hashlib.sha256((place + digest_files(self.root, files)).encode()).hexdigest(), *self.extras]

    def up_to_date(self) -> bool:
        return self.read_stamp() == self.stamp() and not (self.folder / UNFINISHED).exists()

    def fault(self) -> str | None:
        """Why the environment has to be made anew; None if it is usable, be it made by hand."""
        if not self.folder.exists():
            return "it is missing"
        if (self.folder / UNFINISHED).exists():
            return "the last set-up was cut short"
        code = "import pip, sys; print(sys.version_info >= (3, 10), sys.prefix)"
        told = (capture([str(self.python), "-c", code], self.env) or "").split(maxsplit=1)
        if told[:1] != ["True"]:
            return "its Python or pip does not run, or is too old"
        shown = self.folder / "bin" / "oallama"  # its first line names the folder that it was made for
        moved = shown.exists() and f"{self.folder}/" not in shown.read_text(encoding="utf-8", errors="replace")
        return "it was moved" if moved else None

    def install(self) -> None:
        """Make the environment where it has a fault, and install packages and the project. Raises SetupError."""
        fault = self.fault()
        with self.console.step("environment", f"creating {self.folder.name}") as step:
            if fault:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
            (self.folder / UNFINISHED).touch()
            if fault:
                command = [sys.executable, "-m", "venv", str(self.folder)]
                run(self.console, step, command, self.env, f"creating {self.folder.name}")
            step.result = f"created {self.folder.name} ({fault})" if fault else f"kept {self.folder.name}"
        try:
            self._packages()
        finally:
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # what fails by itself leaves nothing half-written
                (self.folder / UNFINISHED).unlink()
        (self.folder / STAMP).write_text(" ".join(self.stamp()), encoding="utf-8")

    def _packages(self) -> None:
        unlocked = self.env.get("OALLAMA_UNLOCKED", "") not in ("", "0")
        locks = [] if unlocked else [word for name in LOCKS for word in ("--constraint", str(self.root / name))]
        env = package_environment(self.env, self.python)
        uv = self.folder / "bin" / "uv"
        with self.console.step("packages", "installing packages") as step:
            pinned = _lines_of("uv", (self.root / LOCKS[0]).read_text(encoding="utf-8"))
            file = self.folder / "uv.txt"
            file.write_text("uv\n" if unlocked else pinned, encoding="utf-8")
            pip = [str(self.python), "-m", "pip", "install", "--no-deps", "--requirement", str(file)]
            run(self.console, step, pip, env, "installing uv")
            command = [str(uv), "pip", "install", "--python", str(self.python), *locks]
            # what builds the native part stays: in an environment that is made anew each time, all is compiled anew
            group = f"{self.root / 'pyproject.toml'}:build"
            run(self.console, step, [*command, "--group", group], env, "installing packages")
            if not self.default:  # pyproject.toml names the default one's build folder
                env["SKBUILD_BUILD_DIR"] = str(self.root / "build" / self.folder.name.lstrip("."))
            env["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
            if shutil.which("ccache", path=env["PATH"]):  # one cache for all checkouts, and for the tests' programs
                env.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
                env |= {"CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1"}
            if "test" in self.extras:
                env.setdefault("SKBUILD_CMAKE_DEFINE", "OALLAMA_WERROR=ON")  # as the tests compile the same files
            project = f"{self.root}[{','.join(self.extras)}]" if self.extras else str(self.root)
            command += ["--no-build-isolation-package", "oallama", "--reinstall-package", "oallama"]
            run(self.console, step, [*command, "--editable", project], env, "installing oallama", cwd=self.root)
            known = "of any version, unchecked" if unlocked else "known by their hashes"
            step.result = f"installed packages {known}, and oallama with its native part"


def native_sources(root: Path) -> list[Path]:
    """The files that the native part is compiled from."""
    files = (path for folder in ("ggml_bridge", "third_party") for path in (root / folder).rglob("*"))
    return [root / "CMakeLists.txt", *(path for path in files if path.suffix in NATIVE)]


def digest_files(root: Path, files: Iterable[Path]) -> str:
    """One digest over the names and contents of files; those that do not exist count as absent."""
    total = hashlib.sha256()
    for file in sorted(files):
        if file.is_file():
            total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def _lines_of(name: str, text: str) -> str:
    """The requirement of a package in a lock, with its hashes."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{name}=="))
    end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith("    --")), None)
    return "\n".join(lines[start:end]).rstrip("\\ ") + "\n"


def main(root: Path, arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Set up .venv: see docs/install.md.")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml (test, docs, train)")
    parser.add_argument("--refresh", action="store_true", help="look, install and test again even if nothing changed")
    parser.add_argument("--vulkan", action="store_true", help="set up .venv-vulkan, with Vulkan on any device")
    parser.add_argument("--no-amx", action="store_true", help="set up .venv-no-amx, with llama.cpp built without AMX")
    parser.add_argument("--llama-cpp", metavar="WHAT", help="folder, archive or its address: use this build")
    parser.add_argument("--sha256", help="hash of the --llama-cpp archive")
    options = parser.parse_args(arguments)
    kind = "-vulkan" if options.vulkan else "-no-amx" if options.no_amx else ""
    console = Console(sys.stderr, root / "build" / f"setup{kind}.log")
    return guarded(console, "set-up", lambda: _set_up(root, console, options, time.monotonic()))


def _set_up(root: Path, console: Console, options: argparse.Namespace, start_s: float) -> int:
    env = {"PATH": os.defpath, **os.environ}
    name, wish = (".venv-vulkan", "vulkan") if options.vulkan else (".venv", asked_backend(env))
    if options.no_amx:
        name, wish = ".venv-no-amx", "cpu"
    installer = Installer(console, root / name, env, wish, amx=not options.no_amx)

    def done() -> bool:
        checkout = Checkout(root, name, options.extra, console, env)
        new = options.refresh or options.llama_cpp is not None
        return not new and checkout.up_to_date() and installer.installed() is not None

    if done():
        print(f"set-up: up to date ({format_seconds(time.monotonic() - start_s)})", file=sys.stderr)
        return 0
    with lock(console.log_path.with_suffix(".lock"), console):
        if not done():  # another process may have done it while we waited
            console.open_log()
            console.say(f"set-up of {name} (log: {console.log_path})")
            if options.vulkan:
                vulkan.check(installer.compiler.cxx, env)
            checkout = Checkout(root, name, options.extra, console, env)
            if options.refresh or not checkout.up_to_date():
                checkout.install()
            installed = installer.run(options.llama_cpp, options.sha256, options.refresh)
            for note in installed.notes:
                console.say(f"  note: {note}")
        console.say(f"set-up: done ({format_seconds(time.monotonic() - start_s)})")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
