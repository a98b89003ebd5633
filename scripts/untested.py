"""Says what a run of the tests could not test on this machine: skipped tests with their reasons, absent devices."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

_STAND_INS = ("CPU", "RPC", "BLAS", "OALLAMA")  # processors, worker processes and plugins: no graphics card

_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader")  # Vulkan devices that are the processor


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


def absent_devices(devices_json: str | None) -> list[str]:
    """What no test can have covered, from the output of `oallama devices --json` (None: the command failed)."""
    if devices_json is None:
        return ["devices: `oallama devices --json` failed, so it is not known which are here"]
    devices = json.loads(devices_json)["devices"]
    backends = {str(device["backend"]) for device in devices if not _stands_in(device)}
    if not backends:
        played = [str(device["description"]) for device in devices if device["backend"] == "Vulkan"]
        stood_in = f"{played[0]}, which is the processor," if played else "a worker process"
        return [
            f"a graphics card: none answers here (CUDA, ROCm, Vulkan); {stood_in} stood in for it",
            "CUDA graphs beside a pool without virtual memory (GGML_CUDA_NO_VMM): turned off, as its source says alone",
        ]
    return [f"back ends other than {', '.join(sorted(backends))}"]


def other_cpus(devices_json: str | None) -> list[str]:
    """Which CPU's features were tested, from the same output."""
    if devices_json is None:
        return []
    cpu = json.loads(devices_json)["cpu"]
    features = {str(feature) for feature in cpu["features"]}
    lines = [f"CPUs with other features than {cpu['name']}: {', '.join(sorted(features))}"]
    if "amx_tile" not in features:
        lines.append("AMX's own kernels: of its layout a stand-in was tested, which stock llama.cpp treats alike")
    return lines


def report_lines(reasons: dict[str, list[str]], devices: Sequence[str]) -> list[str]:
    """The lines of the section, without its heading."""
    lines = [f"  - {device}" for device in devices]
    for reason, tests in sorted(reasons.items()):
        files = sorted({re.sub(r"\[.*", "", test) for test in tests})
        shown = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
        lines.append(f"  - {reason} ({len(tests)} test{'s' if len(tests) > 1 else ''}: {shown})")
    lines.append(f"  - systems other than {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    return lines


def _stands_in(device: Mapping[str, object]) -> bool:
    in_software = any(name in str(device.get("description", "")).lower() for name in _SOFTWARE)
    return in_software or str(device["backend"]).upper().startswith(_STAND_INS)


_COULD_BE_HERE = re.compile(
    r"not installed|not built|no programs|no C\+\+ compiler|no Chromium|no Python|npm is not there"
)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 1 where --all is given and tests were skipped for want of what could be installed here."""
    command = [str(Path(sys.executable).with_name("oallama")), "devices", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    reasons = skipped(*(Path(name) for name in arguments if name != "--all"))
    devices = None if done.returncode else done.stdout
    print("\n".join(report_lines(reasons, [*absent_devices(devices), *other_cpus(devices)])))
    return int("--all" in arguments and any(_COULD_BE_HERE.search(reason) for reason in reasons))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
