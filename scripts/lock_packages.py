#!/usr/bin/env python3
"""Write scripts/setup/locked.txt: versions and hashes of every package that set-up installs, from pyproject.toml.

    python scripts/lock_packages.py            # keeps the versions that still fit
    python scripts/lock_packages.py --upgrade  # takes the newest

Needs `uv` (pip install uv) and Python 3.11 or later. Look at the difference before it is committed: these packages run
on every user's machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "setup" / "locked.txt"
LEFT_OUT = ("train",)  # torch: not set-up's
TOOLS = ("scikit-build-core[pyproject]>=0.10", "cmake>=3.21", "ninja>=1.11")
"""What pip would fetch by itself to compile llama-cpp-python and oallama."""


def asked_for(pyproject: Mapping[str, object]) -> dict[str, list[str]]:
    """By extra, and for oallama and its build tools, the requirements as they are written."""
    project = pyproject["project"]
    assert isinstance(project, dict)
    extras = {name: list(wanted) for name, wanted in project["optional-dependencies"].items() if name not in LEFT_OUT}
    return {"build": list(TOOLS), "oallama": list(project["dependencies"]), **extras}


def names(requirements: Sequence[str]) -> list[str]:
    """Packages, as pip spells them."""
    found = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return sorted({re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match})


def main(arguments: Sequence[str]) -> int:
    groups = asked_for(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    wanted = "\n".join(requirement for requirements in groups.values() for requirement in requirements)
    draft = LOCK.with_suffix(".new")
    draft.write_text(LOCK.read_text(encoding="utf-8") if LOCK.exists() else "", encoding="utf-8")
    command = [
        "uv",
        "pip",
        "compile",
        "-",
        "--universal",
        "--generate-hashes",
        "--no-header",
        "--python-version",
        "3.10",
    ]
    done = subprocess.run(
        [*command, *arguments, "--quiet", "--output-file", str(draft)], input=wanted, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        draft.unlink()
        return done.returncode
    head = "".join(f"# {name}: {' '.join(names(requirements))}\n" for name, requirements in groups.items())
    body = draft.read_text(encoding="utf-8")
    draft.write_text(
        "# Written by scripts/lock_packages.py; set-up installs what is here and nothing else.\n" + head + body,
        encoding="utf-8",
    )
    draft.replace(LOCK)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
