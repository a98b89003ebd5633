"""Damaged inputs are read, or refused with one sentence, within bounds; and every input that once did harm is tried.

`scripts/test tests/fuzz` tries many more of each than `scripts/test`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seeds import ALL

from fuzz import gguf_files, texts
from fuzz.documents import DOCUMENTS, GOLDEN
from fuzz.limits import TookTooLong, accepted
from fuzz.mutation import damaged_json
from oallama.core.errors import UsageError

EXAMPLES = 20_000 if ALL else 250

Make = Callable[[Random], bytes]
Check = Callable[[bytes, Path], None]

TARGETS: dict[str, tuple[Make, Check]] = {
    "gguf": (gguf_files.make, gguf_files.check),
    **{name: (functools.partial(damaged_json, sound=sound), check) for name, (sound, check) in DOCUMENTS.items()},
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


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("fuzz/*/*")), ids=lambda path: path.stem)
def test_an_input_that_did_harm_does_none_now(path: Path) -> None:
    accepted(TARGETS[path.parent.name][1], path.read_bytes())


def test_what_inputs_are_made_of_is_accepted(tmp_path: Path) -> None:
    for documents, check in DOCUMENTS.values():
        for document in documents:
            check(json.dumps(document).encode(), tmp_path)
    for model in gguf_files.sound():
        parts = [gguf_files.part_of(tree) for tree in model]
        gguf_files.check(gguf_files.encoded([(part.head(), part.data_bytes) for part in parts]), tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("value", f"bytes:{size}") for size in ("9" * 400 + ".5", "9" * 19, "9" * 5000, "8388608TiB")),
        *(("device", f"emulated:rtx3090,{key}") for key in ("link=1e300", "latency=1e400", "scale=4e-324")),
        ("device", "emulated:rtx3090,gbps=" + "0" * 100_000 + "x"),
        ("device", "emulated:rtx3090,routing=x\nvalues drawn"),
        ("device", "emulated:a\0b"),
        ("device", "rpc-worker:" + "0" * 5000 + "1"),
        ("device", "rpc-worker:1:" + "0-4095," * 10_000 + "1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, text: str) -> None:
    assert not accepted(TARGETS[name][1], text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "emulated:rtx3090,link=12.3456789,gbps=100000000.1,tflops=0.1,latency=1.2345678",
        "emulated:rtx3090,scale=1.23456789/2.00000001",
        "emulated:rtx4090,vram=6GiB,scale=3",
    ],
)
def test_a_device_says_itself_to_the_last_digit(text: str) -> None:
    assert accepted(texts.check_device, text.encode())


def test_anything_but_one_sentence_within_bounds_is_a_fault() -> None:
    def outcome(work: Callable[[], object]) -> bool:
        return accepted(lambda raw, folder: work(), b"")  # type: ignore[arg-type, return-value]

    def refuse(error: Exception) -> None:
        raise error

    assert not outcome(lambda: refuse(UsageError("give another")))
    for error in (UsageError("two\nlines"), UsageError("")):
        with pytest.raises(AssertionError, match="without one clear sentence"):
            outcome(lambda error=error: refuse(error))  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        outcome(lambda: 1 / 0)
    with pytest.raises(TookTooLong):
        outcome(lambda: all(True for _ in itertools.repeat(1)))
    with pytest.raises(MemoryError):
        outcome(lambda: bytearray(600 << 20))
