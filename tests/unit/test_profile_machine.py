"""What a profile belongs to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oallama.core.units import MIB
from oallama.profile.machine import KEY_PARTS, fingerprint, fingerprint_key, power_changes

IDENTITY: dict[str, Any] = {
    "description": "Test Card", "backend": "CUDA", "type": "GPU", "memory_bytes": 12 << 30, "driver_files": [],
}  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cache(root: Path, cpu: int, index: int, level: int, kind: str, size: str, shared: str) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    for name, text in {"level": str(level), "type": kind, "size": size, "shared_cpu_list": shared}.items():
        write(folder / name, text + "\n")


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """The files of a machine of four logical cores on two caches, and a battery."""
    write(
        tmp_path / "proc/cpuinfo",
        "processor\t: 0\nmodel name\t: Test CPU 9000\nflags\t\t: fpu avx2 amx_int8 smep\n\n"
        "processor\t: 1\nmodel name\t: Test CPU 9000\nflags\t\t: fpu avx2 amx_int8 smep\n",
    )
    for cpu in range(4):
        cache(tmp_path, cpu, 0, 1, "Data", "48K", str(cpu))
        cache(tmp_path, cpu, 1, 1, "Instruction", "64M", str(cpu))
        cache(tmp_path, cpu, 3, 3, "Unified", "32768K", "0-1" if cpu < 2 else "2-3")
    write(tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    return tmp_path


def test_what_the_files_say(laptop: Path) -> None:
    found = fingerprint(4, "CUDA0", laptop)
    expected = {
        "cpu": "Test CPU 9000", "cpu_features": ["amx_int8", "avx2"], "n_threads": 4, "numa_nodes": 2,
        "governor": "powersave", "energy_preference": None, "llc_bytes": 64 * MIB,
        "device_spec": "CUDA0",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    json.dumps(found, allow_nan=False)


def test_an_unreadable_machine_still_has_a_fingerprint(tmp_path: Path) -> None:
    found = fingerprint(1, "none", tmp_path)
    assert found["llc_bytes"] == 32 * MIB
    assert found["memory_bytes"] > 0 and found["numa_nodes"] == 1
    assert fingerprint_key(found) == fingerprint_key(fingerprint(1, "none", tmp_path))


def test_the_version_of_ggml_is_in_the_name_of_its_library(
    laptop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = tmp_path / "libraries"
    for name in ("libggml.so.0", "libggml-base.so.0", "libggml-base.so.0.26.0", "libggml-cpu.so", "libllama.so"):
        write(libraries / name, name)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(libraries))
    found = fingerprint(1, "none", laptop)
    assert found["ggml_version"] == "0.26.0"
    for name, part in (("libggml-cpu.so", "ggml_cpu_build"), ("libllama.so", "llama_build")):
        write(libraries / name, "built otherwise")
        assert fingerprint(1, "none", laptop)[part] != found[part]


def test_the_key_changes_with_each_part_that_must_agree_and_with_no_other(laptop: Path) -> None:
    found = fingerprint(4, "CUDA0", laptop, IDENTITY)
    for name in {*found, *KEY_PARTS, "device_name"}:
        other = fingerprint_key({**found, name: "something else"})
        assert (other != fingerprint_key(found)) is (name in KEY_PARTS), name


def test_power_changes_are_sentences_with_a_remedy(laptop: Path) -> None:
    found = fingerprint(4, "none", laptop)
    assert power_changes(found, found) == []
    (sentence,) = power_changes(found, {**found, "governor": "performance"})
    assert "'powersave'" in sentence and "'performance'" in sentence and "--refresh" in sentence


def test_reading_the_real_machine_loads_no_native_library() -> None:
    code = (
        "import sys; from oallama.profile.machine import fingerprint, fingerprint_key\n"
        "found = fingerprint(2, 'none'); print(fingerprint_key(found), found['llama_cpp_python'])\n"
        "assert not {'llama_cpp', 'numpy', 'cffi'} & set(sys.modules)\n"
        "assert found['cpu'] and found['llc_bytes'] > 0"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()[0]) == 16
