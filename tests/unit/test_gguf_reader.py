"""GGUF files: what the reader makes of sound ones, how little it reads for it, and what it says of hostile ones.
Damage that is drawn: tests/fuzz."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_factory import ARCHITECTURES, HOSTILE, hostile, write_gguf
from gguf_factory.hostile import split_llama
from gguf_factory.raw import tiny_llama

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import GgufArray, check_unchanged
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import hyperparameters, model_info
from oallama.model.operators import operators


def test_it_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    """gguf's own reader may be trusted with a file that gguf wrote."""
    path = write_gguf(tmp_path / "model.gguf", "qwen2moe", weight_type="Q4_K")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert [(t.name, t.shape, t.type, t.offset, t.n_bytes) for t in ours.tensors] == [
        (t.name, tuple(t.shape), t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    found = {key: list(value) if isinstance(value, GgufArray) else value for key, value in ours.metadata.items()}
    assert found == expected


def test_values_of_every_type(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300, "bool": True, "string": "Straße",
    }  # fmt: skip
    g = tiny_llama()
    for type, value in values.items():
        g.set(f"x.{type}", value, type)
        g.set(f"x.array.{type}", [value, value], type)
    g.set("x.array.empty", [], "string")
    found = read_gguf(g.write(tmp_path / "model.gguf"))
    for type, value in values.items():
        one, array = found.entries[f"x.{type}"], found.entries[f"x.array.{type}"]
        assert (one.type, one.value) == (type, value)
        assert (array.type, list(array.value), array.value[1]) == (f"array[{type}]", [value, value], value)
    assert found.metadata["x.bool"] is True
    assert len(found.metadata["x.array.empty"]) == 0


def test_another_alignment(tmp_path: Path) -> None:
    g = tiny_llama()
    g.set("general.alignment", 4096)
    g.alignment = 4096
    found = read_gguf(g.write(tmp_path / "model.gguf"))
    assert all(tensor.offset % 4096 == 0 for tensor in found.tensors)


def test_what_does_not_concern_an_architecture_may_be_zero(tmp_path: Path) -> None:
    """llama.cpp writes every hyperparameter it knows when it saves a model."""
    unused = ("experts_per_group", "full_attention_interval", "attention.key_length_mla", "ssm.group_count")
    others = {f"llama.{key}": 0 for key in (*unused, "interleave_moe_layer_step", "wkv.head_size")}
    assert read_gguf(write_gguf(tmp_path / "model.gguf", "llama", metadata=others)).arch == "llama"


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux' count of bytes read")
def test_a_file_of_39_gb_costs_its_header(tmp_path: Path) -> None:
    """What is read of a sparse giant is metadata and tensor headers, and at most a chunk ahead."""
    n_embd, n_ff = 192, 2**24
    path = tiny_llama(n_embd=n_embd, n_ff=n_ff).write(tmp_path / "giant.gguf")
    before = _bytes_read()
    found = read_gguf(path)
    assert _bytes_read() - before < 4 << 20
    assert found.file_bytes == path.stat().st_size > 38e9
    assert found.tensor_by_name["blk.0.ffn_down.weight"].n_bytes == 4 * n_embd * n_ff


def test_a_split_model_is_one(tmp_path: Path) -> None:
    whole = read_gguf(write_gguf(tmp_path / "whole.gguf", "llama"))
    first = write_gguf(tmp_path / "split.gguf", "llama", split_max_tensors=7)
    parts = sorted(tmp_path.glob("split-*-of-*.gguf"))
    assert len(parts) == 3
    found = read_gguf(first)
    assert [file.path for file in found.files] == [str(part) for part in parts]
    assert found.file_bytes == sum(part.stat().st_size for part in parts)
    heads = [[(t.name, t.shape, t.n_bytes) for t in model.tensors] for model in (found, whole)]
    assert heads[0] == heads[1]
    assert {t.path for t in found.tensors} == {str(part) for part in parts}
    assert model_info(found).files == found.files


def test_the_fingerprint_is_of_the_header(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "model.gguf")
    before = read_gguf(path).fingerprint
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert read_gguf(path).fingerprint == before, "weights do not count"
    assert read_gguf(path.rename(tmp_path / "moved.gguf")).fingerprint == before, "nor does the path"
    other = tiny_llama()
    other.set("llama.context_length", 65)
    assert read_gguf(other.write(path)).fingerprint != before


def test_a_change_on_disk_is_noticed(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "model.gguf")
    found = read_gguf(path)
    check_unchanged(found.files)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelFileError, match="changed since it was checked"):
        check_unchanged(found.files)
    path.unlink()
    with pytest.raises(ModelFileError, match="run again"):
        check_unchanged(found.files)


def test_model_info(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", n_layer=3, n_ctx=512)
    info = model_info(read_gguf(path))
    assert (info.arch, info.n_layer, info.n_embd, info.n_ff) == ("qwen3moe", 3, 256, 512)
    assert (info.n_head, info.n_head_kv, info.n_embd_head_k, info.n_embd_head_v) == (4, 2, 64, 64)
    assert (info.n_expert, info.n_expert_used, info.n_vocab, info.n_ctx_train) == (8, 2, 320, 512)
    assert info.file_bytes == path.stat().st_size
    lfm2 = read_gguf(write_gguf(path, "lfm2", n_layer=4))
    assert (hyperparameters(lfm2).n_head_kv, model_info(lfm2).n_head_kv) == ((0, 2, 0, 2), 2)
    latent = model_info(read_gguf(write_gguf(path, "minicpm3")))
    assert (latent.n_embd_head_k, latent.n_embd_head_v) == (96, 64)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_architecture_is_asked_for_tensors_that_it_has_not(arch: str, tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / "model.gguf", arch)).tensors


#
# hostile files
#

REMEDIES = (
    "download it again", "download it again from a source you trust", "convert the model again", "name a", "name the",
    "rename it, e.g.", "put it beside this file", "use parts of one and the same model", "check the path",
    "copy the model",
)  # fmt: skip


def test_the_files_that_hostile_ones_are_made_of_are_sound(tmp_path: Path) -> None:
    assert len(operators(read_gguf(tiny_llama().write(tmp_path / "model.gguf")))) == 8
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


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("mamba2", {"ssm.group_count": 0}, "is 0, and llama"),
        ("mamba2", {"ssm.time_step_rank": 0}, "is 0, and llama"),
        ("mamba2", {"ssm.conv_kernel": 0}, "is 0, and llama"),
        ("mamba2", {"ssm.inner_size": 0}, "is 0, and llama"),
        ("minicpm3", {"attention.head_count_kv": 1}, None),
        ("deepseek2", {"attention.head_count_kv": 2}, None),
        ("deepseek2", {"attention.key_length": 289}, None),
        ("phi3", {"rope.dimension_count": 0}, None),
        ("granitemoe", {"expert_used_count": [0, 2, 9]}, None),
        ("lfm2", {"attention.head_count_kv": [0, 3]}, None),
    ],
)
def test_what_llama_cpp_divides_by_or_asserts_on_is_refused(
    arch: str, metadata: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    changed = {f"{arch}.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "model.gguf", arch, metadata=changed)
    with pytest.raises(ModelFileError, match=said):
        read_gguf(path)


def test_what_it_costs_does_not_follow_what_the_file_claims(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "model.gguf")
    sound = calls_made(lambda: read_gguf(path))
    for kind in ("array of 2^28 strings", "string of 2 GiB", "4 GiB of zeros", "tensor count 2^64-1", "2^32-1 blocks"):
        giant = hostile(tmp_path / f"{kind.replace(' ', '_')}.gguf", kind)
        with pytest.raises(ModelFileError):
            calls_made(lambda giant=giant: read_gguf(giant), most=2 * sound)  # type: ignore[misc]


def calls_made(work: Callable[[], Any], most: float = float("inf")) -> int:
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
        assert count < most
    return count
