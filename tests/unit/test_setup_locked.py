"""Packages of set-up: each of one version, known by its hash, and refused where it is another."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from setup.console import Console  # noqa: E402
from setup.environment import Environment  # noqa: E402
from setup.errors import SetupError  # noqa: E402
from setup.llama_wheel import WheelStore, pinned_version  # noqa: E402
from setup.locked import COMPILED_HERE, LOCK, PROJECT, TOOLS, read_lock  # noqa: E402

SMALL = """# build: tool
# oallama: cffi llama-cpp-python
# hf: hub
cffi==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:aa
    # via oallama
cffi==2.0 ; python_full_version >= '3.11' \\
    --hash=sha256:bb
    # via oallama
diskcache==3 \\
    --hash=sha256:cc
    # via llama-cpp-python
hub[some]==4 \\
    --hash=sha256:dd
llama-cpp-python==0.3 \\
    --hash=sha256:ee
pycparser==5 \\
    --hash=sha256:ff
    # via
    #   cffi
    #   hub
rare==6 \\
    --hash=sha256:00
    # via pycparser
tool==7 \\
    --hash=sha256:11
"""


def versions(text: str) -> list[str]:
    return [line.split(" ")[0] for line in text.splitlines() if "==" in line]


def test_what_is_needed_is_installed_and_nothing_else() -> None:
    lock = read_lock(SMALL)
    both = ["cffi==1.0", "cffi==2.0", "diskcache==3"]
    assert versions(lock.requirements([PROJECT])) == [*both, "pycparser==5", "rare==6"]
    assert versions(lock.requirements(["hf"])) == ["hub[some]==4", "pycparser==5", "rare==6"]
    assert versions(lock.requirements([TOOLS, "train"])) == ["tool==7"], "what is not locked comes otherwise"
    assert lock.unlocked([PROJECT, "hf"]) == "cffi\nhub"


@pytest.mark.parametrize("text", ["", SMALL.replace("# build: tool\n", ""), SMALL.replace("tool==7", "tool")])
def test_a_damaged_list_is_one_sentence(text: str) -> None:
    with pytest.raises(SetupError, match=r"locked\.txt is damaged \(.*\): restore it"):
        read_lock(text)


def test_the_list_fits_pyproject() -> None:
    """Run scripts/lock_packages.py where it does not."""
    tomllib = pytest.importorskip("tomllib")
    from lock_packages import asked_for

    lock = read_lock(LOCK.read_text(encoding="utf-8"))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = asked_for(tomllib.loads(pyproject))
    assert set(asked) == set(lock.given)
    for group, requirements in asked.items():
        wanted = [Requirement(text) for text in requirements]
        assert {canonicalize_name(one.name) for one in wanted} == set(lock.given[group])
        for one in wanted:
            locked = versions(lock.texts[canonicalize_name(one.name)])
            assert locked and all(one.specifier.contains(text.partition("==")[2]) for text in locked), one
    assert versions(lock.texts[COMPILED_HERE]) == [f"{COMPILED_HERE}=={pinned_version(pyproject)}"]


def test_every_version_is_known_by_a_hash() -> None:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pinned = [number for number, line in enumerate(lines) if "==" in line and not line.startswith(("#", " "))]
    assert pinned and all(lines[number + 1].startswith("    --hash=sha256:") for number in pinned)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Of a package without contents."""
    files = {
        "speck/__init__.py": b"",
        "speck-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: speck\nVersion: 1\n",
        "speck-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    path = tmp_path / "index" / "speck-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("speck-1.dist-info/RECORD", f"{record}speck-1.dist-info/RECORD,,\n")
    return path


def install(tmp_path: Path, wheel: Path, sha256: str) -> Path:
    """Where it is installed. Raises SetupError."""
    console = Console((tmp_path / "said").open("w"), tmp_path / "log")
    console.open_log()
    environment = Environment(tmp_path)
    environment.python = Path(sys.executable)
    target = tmp_path / "target"
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_TARGET": str(target)}
    with console.step("packages", "installing") as step:
        environment.install_packages(console, step, f"speck==1 --hash=sha256:{sha256}\n", True, env)
    return target


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path, wheel: Path) -> None:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (install(tmp_path, wheel, sha256) / "speck").is_dir()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("speck/more.py", "raise SystemExit('run')")
    with pytest.raises(SetupError, match="whose hash differs from the one that was looked at"):
        install(tmp_path, wheel, sha256)
    assert not (tmp_path / "target" / "speck" / "more.py").exists()


def test_a_wheel_that_others_can_change_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "key" / "a.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch(mode=0o600)
    store = WheelStore(tmp_path)
    assert store.find("key") == wheel and store.find("other") is None
    for path in (wheel, wheel.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(SetupError, match="can be changed by other users: remove it"):
            store.find("key")
        path.chmod(mode)
