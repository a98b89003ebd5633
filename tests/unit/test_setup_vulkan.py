"""What a Vulkan build lacks on a machine and what the user is told about it. The compiler is a small script on a
PATH of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


from oallama.setup import gpu, vulkan
from oallama.setup.console import SetupError

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


class System:
    """A machine: what its compiler finds, which package manager it has."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.cxx = self.program("c++", COMPILER)
        for name in ("sed", "grep", "cp", "touch", "mkdir", "chmod"):
            (self.bin / name).symlink_to(Path("/usr/bin", name) if Path("/usr/bin", name).exists() else f"/bin/{name}")
        (folder / "system").mkdir()
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "SYSTEM": str(folder / "system"),
        }
        monkeypatch.setattr(vulkan, "_DRIVER_FOLDERS", (str(folder / "drivers"),))

    def program(self, name: str, script: str = "") -> str:
        self.bin.mkdir(parents=True, exist_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
        (self.bin / name).chmod(0o755)
        return str(self.bin / name)

    def header(self, name: str, content: str = "", folder: Path | None = None) -> None:
        path = (folder or self.folder / "system") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    def complete(self, headers: str = "new") -> None:
        self.program("glslc")
        self.header("libvulkan")
        self.header("vulkan/vulkan.h", headers)
        self.header("spirv/unified1/spirv.hpp")
        self.header("icd.d/lvp_icd.json", folder=self.folder / "drivers")

    def missing(self) -> list[vulkan.Part]:
        return [*vulkan.missing_to_build(self.env, self.cxx), *vulkan.missing_to_run(self.env)]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_everything_that_is_missing_is_named_at_once_with_its_command(system: System) -> None:
    system.program("apt")
    with pytest.raises(SetupError) as caught:
        vulkan.check(system.cxx, system.env)
    assert str(caught.value) == (
        "glslc, the Vulkan loader and headers, spirv-headers and a Vulkan driver are missing: "
        "sudo apt install glslc libvulkan-dev spirv-headers mesa-vulkan-drivers"
    )


def test_a_complete_system_lacks_nothing(system: System) -> None:
    system.complete()
    assert system.missing() == []
    assert gpu.choose_backend("vulkan", system.env, system.cxx, "").flags == ("-DGGML_VULKAN=ON",)


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
