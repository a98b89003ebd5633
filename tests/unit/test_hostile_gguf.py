"""Files made to hurt: each is refused with the right sentence. Damage that is drawn: tests/fuzz."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_factory import HOSTILE, hostile, write_gguf
from gguf_factory.hostile_files import split_llama
from gguf_factory.raw import tiny_llama

from oallama.core.errors import ModelFileError
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators

REMEDIES = (
    "download it again", "get it again from a source you trust", "convert the model again", "name a", "name the",
    "name it like", "put it beside this file", "use parts of one and the same model", "check the path",
    "copy the model",
)  # fmt: skip


def test_the_file_that_all_are_made_of_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama().encode())
    assert len(operators(read_gguf(path))) == 8
    assert len(operators(read_gguf(split_llama(tmp_path / "split.gguf")))) == 8


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = hostile(tmp_path / "model.gguf", kind)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert HOSTILE[kind] in message
    assert message.startswith(str(tmp_path)), "the file first"
    assert message.isprintable(), "one line, no control characters"
    assert any(remedy in message.rpartition(";")[2] for remedy in REMEDIES), "the remedy last"
    if path.is_file() and "missing" not in kind:
        assert re.search(r"\(at byte \d+\)", message)


DIVISORS = [
    ("mamba2", "ssm.group_count"),
    ("mamba2", "ssm.time_step_rank"),
    ("mamba2", "ssm.conv_kernel"),
    ("mamba2", "ssm.inner_size"),
]


@pytest.mark.parametrize(("arch", "key"), DIVISORS)
def test_what_llama_cpp_divides_by_is_not_zero(arch: str, key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", arch, metadata={f"{arch}.{key}": 0})
    with pytest.raises(ModelFileError, match="is 0, and llama"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("arch", "metadata"),
    [
        ("minicpm3", {"attention.head_count_kv": 1}),
        ("deepseek2", {"attention.head_count_kv": 2}),
        ("deepseek2", {"attention.key_length": 289}),
        ("phi3", {"rope.dimension_count": 0}),
        ("granitemoe", {"expert_used_count": [0, 2, 9]}),
        ("lfm2", {"attention.head_count_kv": [0, 3]}),
    ],
)
def test_shapes_that_llama_cpp_asserts_on_are_refused(arch: str, metadata: dict[str, Any], tmp_path: Path) -> None:
    changed = {f"{arch}.{key}": value for key, value in metadata.items()}
    with pytest.raises(ModelFileError):
        read_gguf(write_gguf(tmp_path / "model.gguf", arch, metadata=changed))


def test_what_it_costs_does_not_follow_what_the_file_claims(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama().encode())
    sound = calls_made(lambda: read_gguf(path))
    for kind in ("array of 2^28 strings", "string of 2 GiB", "4 GiB of zeros", "tensor count 2^64-1", "2^32-1 blocks"):
        giant = hostile(tmp_path / f"{kind.replace(' ', '_')}.gguf", kind)
        assert calls_made(lambda giant=giant: refused(giant)) < 2 * sound, kind  # type: ignore[misc]


def refused(path: Path) -> None:
    with pytest.raises(ModelFileError):
        read_gguf(path)


def calls_made(work: Callable[[], Any]) -> int:
    """Functions called, a measure of work that no busy machine changes."""
    count = 0

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
