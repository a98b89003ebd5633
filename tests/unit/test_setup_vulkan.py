"""What a Vulkan build lacks on a machine, what the user is told about it, and what --install-packages does. Compiler,
apt and its relatives are small scripts on a PATH of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from setup import gpu, untested, vulkan
from setup.console import Console
from setup.errors import SetupError
from setup.main import main

ROOT = Path(__file__).resolve().parents[2]
# A compiler that finds a header in its -I folders, or in $SYSTEM as a file whose content is the version it is of; that
# knows VkLayerSettingEXT where such a file says `new`; that links -lvulkan where $SYSTEM/libvulkan is.
COMPILER = """
includes=$SYSTEM
for word; do
    case "$word" in
    -I*) includes="${word#-I} $includes";;
    *.cpp) source=$word;;
    -lvulkan) [ -e "$SYSTEM/libvulkan" ] || exit 1; exit 0;;
    esac
done
header=$(sed -n 's/#include <\\(.*\\)>/\\1/p' "$source")
for folder in $includes; do
    if [ -e "$folder/$header" ]; then
        if grep -q VkLayerSettingEXT "$source"; then grep -q new "$folder/$header"; exit; fi
        exit 0
    fi
done
exit 1
"""
APT_GET = """
echo "$*" >> "$CALLS"
case "$*" in
*indextargets*) printf '%s\\n' "$TARGETS";;
*download*) for word; do case "$word" in Dir::Etc::SourceList=*) cp "${word#*=}" "$SYSTEM/used.list";; esac; done
    touch libvulkan-dev_1.4_amd64.deb;;
*install*) for word; do case "$word" in
    glslc) printf '#!/bin/sh\\n' > "$BIN/glslc"; chmod +x "$BIN/glslc";;
    libvulkan-dev) mkdir -p "$SYSTEM/vulkan"; touch "$SYSTEM/libvulkan" "$SYSTEM/vulkan/vulkan.h";;
    spirv-headers) mkdir -p "$SYSTEM/spirv/unified1"; touch "$SYSTEM/spirv/unified1/spirv.hpp";;
    esac; done;;
esac
"""
DPKG_DEB = 'mkdir -p "$3/usr/include/vulkan"; echo new > "$3/usr/include/vulkan/vulkan.h"'
DEBIAN = "Debian|Debian-Security|main|http://security.example/\nDebian|Debian|main|http://mirror.example/debian/"


class System:
    """A machine: what its compiler finds, which package manager it has."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.cxx = self.program("c++", COMPILER)
        for name in ("sed", "grep", "cp", "touch", "mkdir", "chmod"):
            (self.bin / name).symlink_to(Path("/usr/bin", name) if Path("/usr/bin", name).exists() else f"/bin/{name}")
        (folder / "system").mkdir()
        (folder / "calls").touch()
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "SYSTEM": str(folder / "system"),
            "BIN": str(self.bin),
            "CALLS": str(folder / "calls"),
            "TARGETS": DEBIAN,
        }
        self.console = Console((folder / "said").open("w+"), folder / "log")
        monkeypatch.setattr(vulkan, "_DRIVER_FOLDERS", (str(folder / "drivers"),))
        monkeypatch.setattr(vulkan.os, "geteuid", lambda: 0)

    def program(self, name: str, script: str = "") -> str:
        self.bin.mkdir(parents=True, exist_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
        (self.bin / name).chmod(0o755)
        return str(self.bin / name)

    def header(self, name: str, content: str = "", folder: Path | None = None) -> None:
        path = (folder or self.folder / "system") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    def debian(self) -> None:
        self.program("apt")
        self.program("apt-get", APT_GET)
        self.program("dpkg-deb", DPKG_DEB)

    def complete(self, headers: str = "new") -> None:
        self.program("glslc")
        self.header("libvulkan")
        self.header("vulkan/vulkan.h", headers)
        self.header("spirv/unified1/spirv.hpp")
        self.header("icd.d/lvp_icd.json", folder=self.folder / "drivers")

    def missing(self) -> list[vulkan.Part]:
        return [*vulkan.missing_to_build(self.env, self.cxx), *vulkan.missing_to_run(self.env)]

    def said_by_apt(self, word: str) -> list[str]:
        return [line for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines() if word in line]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_everything_that_is_missing_is_named_at_once_with_its_command(system: System) -> None:
    system.debian()
    with pytest.raises(SetupError) as caught:
        vulkan.check(system.cxx, system.env)
    assert str(caught.value) == (
        "glslc, the Vulkan loader and headers, spirv-headers and a Vulkan driver are missing: "
        "sudo apt install glslc libvulkan-dev spirv-headers mesa-vulkan-drivers"
    )
    assert not system.said_by_apt("install"), "nothing is installed unasked"


def test_fedora_is_told_its_own_packages(system: System) -> None:
    system.complete()
    (system.bin / "glslc").unlink()
    system.program("dnf")
    with pytest.raises(SetupError, match="glslc is missing: sudo dnf install glslc"):
        vulkan.check(system.cxx, system.env)


def test_a_complete_system_lacks_nothing(system: System) -> None:
    system.complete()
    assert system.missing() == []
    assert vulkan.sdk_for_build(system.env, system.cxx) == "", "and is built as it is"
    assert gpu.choose_backend("vulkan", system.env, system.cxx, "").env == ()


def test_a_driver_may_be_named_by_a_variable(system: System) -> None:
    system.complete()
    (system.folder / "drivers" / "icd.d" / "lvp_icd.json").unlink()
    assert system.missing() == [vulkan.DRIVER]
    system.env["VK_DRIVER_FILES"] = "/somewhere/icd.json"
    assert system.missing() == []


def test_old_headers_are_not_a_missing_package(system: System) -> None:
    system.complete(headers="old")
    assert system.missing() == [vulkan.NEW_HEADERS]
    with pytest.raises(SetupError, match=r"1\.3\.272 or later are missing: name a Vulkan SDK .* in VULKAN_SDK$"):
        vulkan.check(system.cxx, system.env)
    system.debian()
    with pytest.raises(SetupError, match=r"or have Debian 13's fetched with .*--install-packages`$"):
        vulkan.check(system.cxx, system.env)


def test_an_sdk_is_used_before_the_systems_headers(system: System) -> None:
    system.complete(headers="old")
    system.env["VULKAN_SDK"] = str(system.folder / "sdk")
    system.header("vulkan/vulkan.h", "new", system.folder / "sdk" / "include")
    assert system.missing() == []
    assert gpu.choose_backend("vulkan", system.env, system.cxx, "").env == (("VULKAN_SDK", str(system.folder / "sdk")),)


def test_packages_are_installed_once_and_newer_headers_fetched_beside_them(system: System) -> None:
    system.debian()
    system.header("icd.d/lvp_icd.json", folder=system.folder / "drivers")
    vulkan.install_packages(system.console, system.cxx, system.env)
    (install,) = system.said_by_apt("install -y")
    assert install.endswith("install -y --no-install-recommends glslc libvulkan-dev spirv-headers")
    used = (system.folder / "system" / "used.list").read_text(encoding="utf-8")
    assert used.endswith("http://mirror.example/debian/ trixie main\n"), "the archive that this machine uses anyway"
    headers = vulkan.headers_folder(system.env)
    assert (headers / "include" / "vulkan" / "vulkan.h").read_text(encoding="utf-8") == "new\n"
    assert {path.name for path in headers.parent.iterdir()} == {"trixie"}, "and nothing else is left there"
    assert gpu.choose_backend("vulkan", system.env, system.cxx, "").env == (("VULKAN_SDK", str(headers)),)
    before = system.said_by_apt("")
    vulkan.install_packages(system.console, system.cxx, system.env)
    assert [line for line in system.said_by_apt("")[len(before) :] if "indextargets" not in line] == []


def test_who_is_not_root_needs_a_sudo_that_does_not_ask(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    system.debian()
    system.program("sudo", 'echo "sudo: a password is required"; exit 1')
    monkeypatch.setattr(vulkan.os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="run sudo apt install glslc libvulkan-dev"):
        vulkan.install_packages(system.console, system.cxx, system.env)


def test_without_apt_nothing_can_be_installed(system: System) -> None:
    with pytest.raises(SetupError, match="no apt-get to install packages with: install glslc, libvulkan-dev"):
        vulkan.install_packages(system.console, system.cxx, system.env)


def test_a_processor_that_plays_a_vulkan_device_is_no_graphics_card() -> None:
    played = {"name": "Vulkan0", "backend": "Vulkan", "description": "llvmpipe (LLVM 15.0.6, 256 bits)"}
    (line,) = untested.absent_devices(json.dumps({"devices": [played]}))
    assert line.startswith("a graphics card: none answers here") and "llvmpipe" in line
    card = {**played, "description": "Arc A770"}
    assert untested.absent_devices(json.dumps({"devices": [card]})) == ["back ends other than Vulkan"]


def test_packages_are_installed_for_vulkan_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(tmp_path, ["--install-packages"])
    assert caught.value.code == 2 and "--install-packages goes with --vulkan" in capsys.readouterr().err


def test_scripts_test_takes_packages_with_vulkan_only() -> None:
    done = subprocess.run([ROOT / "scripts" / "test", "--install-packages"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "goes with --vulkan" in done.stderr
