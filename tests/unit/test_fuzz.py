"""Damaged inputs are read or refused with a sentence: a bounded share of tests/fuzz, and every fault it found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import documents, gguf_files
from fuzz.main import TARGETS, Target, TookTooLong, fuzz, tried
from seeds import FRESH

from oallama.core.codec import CodecError, parse_json
from oallama.core.errors import UsageError
from oallama.core.units import parse_bytes
from oallama.device.spec import parse_cpus, parse_device

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "fuzz"
N = 250  # inputs of each target: what a test may take


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("seed", ["1", str(FRESH)], ids=["fixed", "fresh"])
def test_damaged_inputs_are_read_or_refused(seed: str, tmp_path: Path) -> None:
    done = run(*TARGETS, "-n", str(N), "--seed", seed, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr  # names the seed and each input that was kept
    shares = dict(re.findall(r"^(\w+): .* (\d+)% accepted", done.stdout, re.MULTILINE))
    assert shares.keys() == TARGETS.keys()
    assert all(0 < int(share) < 90 for share in shares.values()), (
        "damage that is always noticed, or never, tells nothing"
    )


def test_a_found_fault_stays_mended(tmp_path: Path) -> None:
    assert {folder.name for folder in GOLDEN.iterdir()} <= TARGETS.keys()
    for folder in GOLDEN.iterdir():
        done = run(folder.name, "--replay", *map(str, sorted(folder.iterdir())))
        assert done.returncode == 0, done.stdout + done.stderr


def test_inputs_of_a_seed_are_the_same_from_any_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[bytes] = []

    def check(raw: bytes, folder: Path) -> None:
        made.append(raw)
        raise ValueError(len(made))

    monkeypatch.setitem(TARGETS, "made", Target(lambda random: random.randbytes(8), check, ".txt"))
    assert fuzz("made", 5, None, 7, 0, tmp_path, tmp_path)
    assert fuzz("made", 2, None, 7, 3, tmp_path, tmp_path)
    assert made[5:] == made[3:5] and len(set(made)) == 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == {
        "7-0.txt": made[0],
        "7-3.txt": made[3],
    }


@pytest.mark.parametrize("name", ["plan", "profile", "verdict", "routing", "machine"])
def test_sound_documents_are_accepted(name: str, tmp_path: Path) -> None:
    for document in getattr(documents, f"{name}s")():
        TARGETS[name].check(json.dumps(document).encode(), tmp_path)


def test_sound_models_are_accepted(tmp_path: Path) -> None:
    for model in gguf_files.sound():
        n_zeros = sum(len(model.pad(tensor.data)) for tensor in model.tensors)
        gguf_files.check(gguf_files.encoded(model.head(), n_zeros), tmp_path)


def test_what_counts_as_a_fault(tmp_path: Path) -> None:
    def fault(error: BaseException) -> str:
        def check(raw: bytes, folder: Path) -> None:
            raise error

        return tried(Target(lambda random: b"", check, ""), b"", tmp_path)

    assert fault(UsageError("give another")) == ""
    assert "without one clear sentence" in fault(UsageError("two\nlines"))
    assert "without one clear sentence" in fault(UsageError(""))
    for error in (ValueError("x"), MemoryError(), RecursionError(), TookTooLong("more")):
        assert fault(error).startswith(type(error).__name__)


def test_a_failing_input_is_kept_and_can_be_tried_again(tmp_path: Path) -> None:
    planted = GOLDEN / "value" / "infinite-size.txt"
    assert TARGETS["value"].make is not None and planted.is_file()
    kept = tmp_path / "kept.txt"
    kept.write_bytes(b"size:6GiB")
    done = run("value", "--replay", str(kept), str(planted))
    assert done.returncode == 0 and "2 inputs, no fault" in done.stdout
    assert run("no-such-target").returncode == 2


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "[1e999]", "[" * 200 + "]" * 200, "[" * 100_000, "9" * 5000, "", b"\xff"]
)
def test_json_that_could_not_be_written_again_is_refused(text: str | bytes) -> None:
    with pytest.raises(CodecError):
        parse_json(text)


@pytest.mark.parametrize("text", ["9" * 400 + ".5", "9" * 19, "9" * 5000, "8388608TiB"])
def test_a_size_beyond_64_bits_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 64 bits can count"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text",
    [
        "emulated:rtx3090,link=12.3456789,gbps=100000000.1,tflops=0.1,latency=1.2345678",
        "emulated:rtx3090,scale=1.23456789/2.00000001",
        "emulated:rtx4090,vram=6GiB,scale=3",
    ],
)
def test_a_device_says_itself_to_the_last_digit(text: str) -> None:
    assert parse_device(str(parse_device(text))) == parse_device(text)


@pytest.mark.parametrize(
    "text",
    [
        "emulated:rtx3090,link=1e300", "emulated:rtx3090,latency=1e400", "emulated:rtx3090,scale=4e-324",
        "emulated:rtx3090,gbps=" + "0" * 100_000 + "x", "emulated:rtx3090,routing=x\nvalues drawn", "emulated:a\0b",
        "rpc-worker:" + "0" * 5000 + "1", "rpc-worker:1:" + "0-4095," * 10_000 + "1",
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_device(text)


def test_a_list_of_cpus_costs_no_more_than_it_is_long() -> None:
    assert parse_cpus("0-1,3") == (0, 1, 3)
    with pytest.raises(ValueError, match="too long"):
        parse_cpus("0-4095," * 1000 + "1")
