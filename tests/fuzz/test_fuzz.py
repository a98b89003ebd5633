"""Damaged inputs are read, or refused with one sentence, within bounds; and every input that once did harm is tried.

`scripts/test tests/fuzz` tries many more of each than `scripts/test`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seeds import ALL

from fuzz import documents, gguf_files, texts
from fuzz.limits import TookTooLong, accepted
from oallama.core.codec import CodecError, parse_json
from oallama.core.errors import UsageError
from oallama.core.units import parse_bytes
from oallama.device.spec import parse_cpus, parse_device

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fuzz"
EXAMPLES = 20_000 if ALL else 250

Make = Callable[[Random], bytes]
Check = Callable[[bytes, Path], None]

TARGETS: dict[str, tuple[Make, Check]] = {
    "gguf": (gguf_files.make, gguf_files.check),
    "plan": (documents.maker(documents.plans), documents.check_plan),
    "profile": (documents.maker(documents.profiles), documents.check_profile),
    "verdict": (documents.maker(documents.verdicts), documents.check_verdict),
    "routing": (documents.maker(documents.routings), documents.check_routing),
    "history": (documents.maker(documents.histories), documents.check_history),
    "machine": (documents.maker(documents.machines), documents.check_machine),
    "device": (texts.make_device, texts.check_device),
    "value": (texts.make_value, texts.check_value),
    "command": (texts.make_command, texts.check_command),
}
"""What makes an input, and what reads it in a folder of its own, by the format."""


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_read_or_refused(name: str) -> None:
    make, check = TARGETS[name]
    make(Random(0))  # imports and makes what is made once
    taken: list[bool] = []

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=8, max_size=8))
    def try_one(seed: bytes) -> None:
        taken.append(accepted(check, make(Random(seed))))

    try_one()
    assert 0 < sum(taken) < 0.9 * len(taken), "damage that is always noticed, or never, tells nothing"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*")), ids=lambda path: path.stem)
def test_an_input_that_did_harm_does_none_now(path: Path) -> None:
    accepted(TARGETS[path.parent.name][1], path.read_bytes())


@pytest.mark.parametrize("name", ["plans", "profiles", "verdicts", "routings", "histories", "machines"])
def test_sound_documents_are_accepted(name: str, tmp_path: Path) -> None:
    check = {"histories": "history"}.get(name, name[:-1])
    for document in getattr(documents, name)():
        TARGETS[check][1](json.dumps(document).encode(), tmp_path)


def test_sound_models_are_accepted(tmp_path: Path) -> None:
    for model in gguf_files.sound():
        n_zeros = sum(len(model.pad(tensor.data)) for tensor in model.tensors)
        gguf_files.check(gguf_files.encoded(model.head(), n_zeros), tmp_path)


def test_only_an_error_of_ours_with_one_sentence_is_a_refusal() -> None:
    def raising(error: BaseException) -> Check:
        def check(raw: bytes, folder: Path) -> None:
            raise error

        return check

    assert not accepted(raising(UsageError("give another")), b"")
    for error in (UsageError("two\nlines"), UsageError("")):
        with pytest.raises(AssertionError, match="without one clear sentence"):
            accepted(raising(error), b"")
    with pytest.raises(ValueError, match="x"):
        accepted(raising(ValueError("x")), b"")


def test_an_input_that_takes_too_long_or_too_much_is_a_fault() -> None:
    def spins(raw: bytes, folder: Path) -> None:
        while True:
            pass

    def takes_much(raw: bytes, folder: Path) -> None:
        bytearray(600 << 20)

    with pytest.raises(TookTooLong):
        accepted(spins, b"")
    with pytest.raises(MemoryError):
        accepted(takes_much, b"")


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
