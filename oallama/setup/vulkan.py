"""Requirements of a Vulkan build, and the commands that install them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oallama.setup.console import DRIVER_S, SetupError, capture, compiles

HEADERS_VERSION = "1.3.272"  # the first with VkLayerSettingEXT; ggml does not compile with older headers
_DRIVER_FOLDERS = ("/usr/share/vulkan", "/usr/local/share/vulkan", "/etc/vulkan")


@dataclass(frozen=True)
class Part:
    """A requirement, and the command that provides it on Debian and Ubuntu."""

    what: str
    remedy: str


GLSLC = Part("glslc", "sudo apt install glslc")
LOADER = Part("the Vulkan loader and headers", "sudo apt install libvulkan-dev")
NEW_HEADERS = Part(
    f"Vulkan headers of {HEADERS_VERSION} or later", f"set VULKAN_SDK to a Vulkan SDK of {HEADERS_VERSION} or later"
)
SPIRV = Part("spirv-headers", "sudo apt install spirv-headers")
DRIVER = Part("a Vulkan driver", "sudo apt install mesa-vulkan-drivers")


def devices(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (name, kind) of the Vulkan drivers' devices; kind is such as DISCRETE_GPU or CPU."""
    summary = capture(["vulkaninfo", "--summary"], env, DRIVER_S) or ""
    kinds = re.findall(r"deviceType\s*=\s*PHYSICAL_DEVICE_TYPE_(\w+)", summary)
    names = re.findall(r"deviceName\s*=\s*(.+)", summary)
    return [(name.strip(), kind) for name, kind in zip(names, kinds, strict=False)]


def missing_to_build(env: Mapping[str, str], cxx: str) -> list[Part]:
    """Return the missing packages for compiling ggml's Vulkan back end."""
    sdk = env.get("VULKAN_SDK")
    path = os.pathsep.join(filter(None, (env.get("PATH"), f"{sdk}/bin" if sdk else None)))
    missing = [] if shutil.which("glslc", path=path) else [GLSLC]
    if not _compiles(cxx, "vulkan/vulkan.h", "", env, sdk) or not _links(cxx, env, sdk):
        missing.append(LOADER)
    elif not _compiles(cxx, "vulkan/vulkan.h", "static VkLayerSettingEXT setting;", env, sdk):
        missing.append(NEW_HEADERS)
    if not _compiles(cxx, "spirv/unified1/spirv.hpp", "", env, sdk):
        missing.append(SPIRV)
    return missing


def missing_to_run(env: Mapping[str, str]) -> list[Part]:
    """Return the missing packages for a Vulkan device: a driver, which may be a software driver."""
    if env.get("VK_DRIVER_FILES") or env.get("VK_ICD_FILENAMES"):
        return []
    return [] if any(any(Path(folder, "icd.d").glob("*.json")) for folder in _DRIVER_FOLDERS) else [DRIVER]


def advice(missing: Sequence[Part]) -> str:
    """Return the missing parts, each with what provides it, as the end of a sentence."""
    return "; ".join(f"{part.what} missing: {part.remedy}" for part in missing)


def check(cxx: str, env: Mapping[str, str]) -> None:
    """Raise SetupError with everything that is missing to build or run Vulkan."""
    if missing := [*missing_to_build(env, cxx), *missing_to_run(env)]:
        raise SetupError(advice(missing))


def _compiles(cxx: str, header: str, use: str, env: Mapping[str, str], sdk: str | None) -> bool:
    include = [f"-I{sdk}/include"] if sdk else []
    return compiles([cxx, "-fsyntax-only", *include], f"#include <{header}>\n{use}\n", env)


def _links(cxx: str, env: Mapping[str, str], sdk: str | None) -> bool:
    libraries = [f"-L{sdk}/lib"] if sdk else []
    return compiles([cxx], "int main() {}\n", env, ["-o", "check", *libraries, "-lvulkan"])
