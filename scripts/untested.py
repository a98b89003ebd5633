"""Says what a run of the tests could not test on this machine: skipped tests with their reasons, other machines."""

from __future__ import annotations

import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from oallama.setup.machine import this_cpu


def skipped(*reports: Path) -> dict[str, list[str]]:
    """Reason -> the tests skipped for it, from files of pytest's --junitxml; nothing from one that was not written."""
    reasons: dict[str, list[str]] = {}
    for report in reports:
        try:
            root = ElementTree.parse(report).getroot()
        except (OSError, ElementTree.ParseError):
            continue
        for case in root.iter("testcase"):
            for mark in case.iter("skipped"):
                reason = mark.get("message") or "no reason given"
                name = case.get("name") or ""
                reasons.setdefault(reason, []).append(".".join(filter(None, (case.get("classname"), name))))
    return reasons


def report_lines(reasons: dict[str, list[str]]) -> list[str]:
    """The lines of the section, without its heading."""
    lines = []
    for reason, tests in sorted(reasons.items()):
        files = sorted({re.sub(r"\[.*", "", test) for test in tests})
        shown = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
        lines.append(f"  - {reason} ({len(tests)} test{'s' if len(tests) > 1 else ''}: {shown})")
    cpu = this_cpu()
    if not cpu.has_amx:
        lines.append("  - AMX's own kernels: of its layout a stand-in was tested, which stock llama.cpp treats alike")
    lines.append(f"  - other CPUs than {cpu.model}")
    lines.append(f"  - systems other than {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    return lines


_COULD_BE_HERE = re.compile(
    r"not installed|not built|no programs|no C\+\+ compiler|no Chromium|no Python|npm is not there"
)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 1 where --all is given and tests were skipped for want of what could be installed here."""
    reasons = skipped(*(Path(name) for name in arguments if name != "--all"))
    print("\n".join(report_lines(reasons)))
    return int("--all" in arguments and any(_COULD_BE_HERE.search(reason) for reason in reasons))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
