"""A copy of the tree in which faults are planted, and its tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shared import ROOT

import ggml_bridge

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "first_example", "--hypothesis-seed=0")
PASSED, FAILED = 0, 1  # exit status of pytest
LATE = -signal.SIGKILL  # of what was killed at its deadline

OWN_SOURCES = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""
"""sitecustomize.py of the copy: an editable install would import the checkout's sources instead."""

FIRST_EXAMPLE = """from hypothesis import Phase, settings
settings.register_profile("first", phases=(Phase.explicit, Phase.generate))
settings.load_profile("first")
"""
"""A plugin of pytest: one example that fails is enough, however large."""

FEW_EXAMPLES = """from hypothesis import settings
USED = "_hypothesis_internal_use_settings"
def pytest_collection_modifyitems(items):
    for function in {item.obj for item in items if hasattr(item.obj, "hypothesis")}:
        asked = getattr(function, USED)
        setattr(function, USED, settings(asked, max_examples=min(10, asked.max_examples)))
"""
"""A plugin of pytest: a property is tried with no more examples than this, whatever it asks for."""


def copy_tree(copy: Path) -> None:
    """What git knows, as it is now, and the native libraries, as they were built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    built = copy / "build" / "native"
    built.mkdir(parents=True, exist_ok=True)
    for folder in ggml_bridge.__path__:
        for library in Path(folder).glob("libggml*"):
            shutil.copy2(library, built)
    (copy / "sitecustomize.py").write_text(OWN_SOURCES, encoding="utf-8")
    (copy / "first_example.py").write_text(FIRST_EXAMPLE, encoding="utf-8")
    (copy / "few_examples.py").write_text(FEW_EXAMPLES, encoding="utf-8")


@contextmanager
def planted(file: Path, text: str) -> Iterator[None]:
    """The file with another text. Its time is another one too, so that what was made of the sound text is not taken for
    it: neither bytecode, which serves again afterwards, nor objects, which do not."""
    sound, before = file.read_bytes(), file.stat()
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_bytes(sound)
        if file.suffix == ".py":
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def environment_of(copy: Path, keep_bytecode: bool = False) -> dict[str, str]:
    """keep_bytecode: only where no fault is planted."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "" if keep_bytecode else "1"}


def run_pytest(
    copy: Path, tests: Sequence[str], options: Sequence[str] = (), keep_bytecode: bool = False
) -> tuple[int, str]:
    """Its exit status, and what it said."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST, *options, *tests], cwd=copy, env=environment_of(copy, keep_bytecode),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return run.returncode, run.stdout
