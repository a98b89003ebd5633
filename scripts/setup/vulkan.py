"""Requirements of a Vulkan build: what it needs from the system, the command that installs it, and newer headers where
they are too old."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import capture, compiles, run
from .console import Console, SetupStep
from .errors import SetupError
from .machine import cache_dir

HEADERS_VERSION = "1.3.272"  # of VkLayerSettingEXT; ggml does not compile with older ones
NEWER_DEBIAN = "trixie"  # whose headers are new enough, for a Debian whose own are not
_QUERY_S = 60.0  # a driver that has to wake several cards may take this long
_DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DRIVER_FOLDERS = ("/usr/share/vulkan", "/usr/local/share/vulkan", "/etc/vulkan", "/opt/homebrew/share/vulkan")


@dataclass(frozen=True)
class Part:
    """Something that is needed: what it is to a user, and its packages by package manager."""

    what: str
    apt: str
    dnf: str


GLSLC = Part("glslc", "glslc", "glslc")
LOADER = Part("the Vulkan loader and headers", "libvulkan-dev", "vulkan-loader-devel vulkan-headers")
NEW_HEADERS = Part(f"Vulkan headers of {HEADERS_VERSION} or later", "", "")  # no package of this system has them
SPIRV = Part("spirv-headers", "spirv-headers", "spirv-headers-devel")
DRIVER = Part("a Vulkan driver", "mesa-vulkan-drivers", "mesa-vulkan-drivers")


def devices(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, kind) of the devices that Vulkan drivers answer with; a kind is as in DISCRETE_GPU or CPU."""
    summary = capture(["vulkaninfo", "--summary"], env, _QUERY_S) or ""
    kinds = re.findall(r"deviceType\s*=\s*PHYSICAL_DEVICE_TYPE_(\w+)", summary)
    names = re.findall(r"deviceName\s*=\s*(.+)", summary)
    return [(name.strip(), kind) for name, kind in zip(names, kinds, strict=False)]


def missing_to_build(env: Mapping[str, str], cxx: str) -> list[Part]:
    """What has to be installed before ggml's Vulkan back end can be compiled."""
    sdk = env.get("VULKAN_SDK")
    path = os.pathsep.join(filter(None, (env.get("PATH"), f"{sdk}/bin" if sdk else None)))
    missing = [] if shutil.which("glslc", path=path) else [GLSLC]
    if not _compiles(cxx, "vulkan/vulkan.h", "", env, sdk) or not _links(cxx, env, sdk):
        missing.append(LOADER)
    elif sdk_for_build(env, cxx) is None:
        missing.append(NEW_HEADERS)
    if not _compiles(cxx, "spirv/unified1/spirv.hpp", "", env, sdk):
        missing.append(SPIRV)
    return missing


def missing_to_run(env: Mapping[str, str]) -> list[Part]:
    """What has to be installed before any Vulkan device can answer: a driver, be it one on the processor."""
    if env.get("VK_DRIVER_FILES") or env.get("VK_ICD_FILENAMES"):
        return []
    return [] if any(any(Path(folder, "icd.d").glob("*.json")) for folder in _DRIVER_FOLDERS) else [DRIVER]


def sdk_for_build(env: Mapping[str, str], cxx: str) -> str | None:
    """VULKAN_SDK for the build, so that headers are new enough: as it is (`""` where it is not set), or the folder of
    headers that `fetch_headers` unpacked. None where neither will do."""
    fetched = headers_folder(env)
    for sdk in (env.get("VULKAN_SDK", ""), str(fetched)):
        if _compiles(cxx, "vulkan/vulkan.h", "static VkLayerSettingEXT setting;", env, sdk):
            return sdk
    return None


def headers_folder(env: Mapping[str, str]) -> Path:
    """Where `fetch_headers` unpacks: `include/vulkan` is below it."""
    return cache_dir(env) / "vulkan-headers" / NEWER_DEBIAN


def advice(missing: Sequence[Part], env: Mapping[str, str]) -> str:
    """What is missing and what to type, as the end of a sentence; for at least one part."""
    names = " and ".join(filter(None, (", ".join(part.what for part in missing[:-1]), missing[-1].what)))
    fault = f"{names} {'are' if len(missing) > 1 or missing[0] is not GLSLC else 'is'} missing: "
    command = shown_command(missing, env)
    if NEW_HEADERS not in missing:
        return fault + command
    newer = f"name a Vulkan SDK of {HEADERS_VERSION} or later in VULKAN_SDK"
    if debian_archive(env):
        newer += ", or have Debian 13's fetched with `python3 scripts/setup_env.py --vulkan --install-packages`"
    return fault + "; ".join(filter(None, (command, newer)))


def shown_command(missing: Sequence[Part], env: Mapping[str, str]) -> str:
    """The command that installs the packages of the missing parts here; `install …` where no manager is known."""
    for manager in ("apt", "dnf"):
        if shutil.which(manager, path=env.get("PATH")):
            packages = " ".join(filter(None, (getattr(part, manager) for part in missing)))
            return f"sudo {manager} install {packages}" if packages else ""
    return "install " + ", ".join(filter(None, (part.apt for part in missing))) if any(p.apt for p in missing) else ""


def check(cxx: str, env: Mapping[str, str]) -> None:
    """Raises SetupError, which names everything at once, when something is missing to build Vulkan or to run it."""
    if missing := [*missing_to_build(env, cxx), *missing_to_run(env)]:
        raise SetupError(advice(missing, env))


def install_packages(console: Console, cxx: str, env: Mapping[str, str]) -> None:
    """Install what building and running need, with apt, and unpack newer headers into the cache where the system's are
    too old. Does nothing where nothing is missing. Raises SetupError."""
    missing = [*missing_to_build(env, cxx), *missing_to_run(env)]
    packages = [part.apt for part in missing if part.apt]
    if packages:
        with console.step("packages", f"installing {', '.join(packages)}") as step:
            _apt_install(console, step, packages, env)
            step.result = f"installed {', '.join(packages)}"
    if NEW_HEADERS in missing_to_build(env, cxx):
        with console.step("headers", "fetching newer Vulkan headers") as step:
            fetch_headers(console, step, env)
            step.result = f"unpacked Debian's Vulkan headers ({NEWER_DEBIAN}) into {headers_folder(env)}"


def _apt_install(console: Console, step: SetupStep, packages: Sequence[str], env: Mapping[str, str]) -> None:
    if shutil.which("apt-get", path=env.get("PATH")) is None:
        raise SetupError(f"there is no apt-get to install packages with: install {', '.join(packages)} yourself")
    # Output goes to the log, so sudo cannot ask for a password
    apt = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "apt-get", "-q"]
    apt_env = {**env, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(console, step, [*apt, "update"], apt_env, "apt-get update")
        run(console, step, [*apt, "install", "-y", "--no-install-recommends", *packages], apt_env, "apt-get install")
    except SetupError as error:
        raise SetupError(f"{error}: run sudo apt install {' '.join(packages)} yourself", error.tail) from error


def debian_archive(env: Mapping[str, str]) -> str | None:
    """Address of the archive that this Debian's apt uses; None on any other system."""
    format = "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)"
    listed = capture(["apt-get", "indextargets", "--format", format, "Created-By: Packages"], env) or ""
    prefix = "Debian|Debian|main|"
    return next((line[len(prefix) :] for line in listed.splitlines() if line.startswith(prefix)), None)


def fetch_headers(console: Console, step: SetupStep, env: Mapping[str, str]) -> Path:
    """Unpack the Vulkan headers of a newer Debian into the cache, without installing anything: apt fetches the package
    and checks its signature, in folders of its own. Returns the folder. Raises SetupError."""
    archive = debian_archive(env)
    if archive is None:
        raise SetupError(
            f"the Vulkan headers here are too old and newer ones can be fetched on Debian only: name a Vulkan SDK of "
            f"{HEADERS_VERSION} or later in VULKAN_SDK"
        )
    place = headers_folder(env)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as draft:
        folder = Path(draft)
        for name in ("lists/partial", "cache/archives/partial", "package", "unpacked"):
            (folder / name).mkdir(parents=True)
        signed = f"[signed-by={_DEBIAN_KEYS}] " if Path(_DEBIAN_KEYS).exists() else ""
        (folder / "sources.list").write_text(f"deb {signed}{archive} {NEWER_DEBIAN} main\n", encoding="utf-8")
        settings = {
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": folder / "lists",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",  # nobody else may read this folder
            "Acquire::Languages": "none",
        }
        apt = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
        run(console, step, [*apt, "update"], env, f"reading Debian {NEWER_DEBIAN}'s list of packages")
        what = "fetching the newer Vulkan headers"
        run(console, step, [*apt, "download", "libvulkan-dev"], env, what, cwd=folder / "package")
        package = next((folder / "package").glob("*.deb"))
        run(console, step, ["dpkg-deb", "-x", str(package), str(folder / "unpacked")], env, "unpacking them")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (folder / "unpacked" / "usr" / "include").replace(place / "include")
    return place


def _compiles(cxx: str, header: str, use: str, env: Mapping[str, str], sdk: str | None) -> bool:
    include = [f"-I{sdk}/include"] if sdk else []
    return compiles([cxx, "-fsyntax-only", *include], f"#include <{header}>\n{use}\n", env)


def _links(cxx: str, env: Mapping[str, str], sdk: str | None) -> bool:
    libraries = [f"-L{sdk}/lib"] if sdk else []
    return compiles([cxx], "int main() {}\n", env, ["-o", "check", *libraries, "-lvulkan"])
