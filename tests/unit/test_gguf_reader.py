"""What the reader makes of sound files: metadata, tensors, parts, and how little it reads for it."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
from gguf_factory import ARCHITECTURES, write_gguf
from gguf_factory.raw import RawGguf, tiny_llama

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import GgufArray, check_unchanged
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import hyperparameters, model_info


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
    g = tiny_llama()
    values = {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31)}
    values |= {"uint64": 2**64 - 1, "int64": -(2**63)}
    reals = {"float32": 0.5, "float64": 1e300}
    for type, value in {**values, **reals}.items():
        g.set(f"x.{type}", value, type)
        g.set_array(f"x.array.{type}", type, [value, value])
    g.set("x.bool", 1, "bool")
    g.set("x.string", "Straße", "string")
    g.set_array("x.array.bool", "bool", [0, 1])
    g.set_array("x.array.string", "string", ["", "ß", "c"])
    g.set_array("x.array.empty", "string", [])
    path = tmp_path / "model.gguf"
    path.write_bytes(g.encode())
    found = read_gguf(path)
    for type, value in {**values, **reals}.items():
        assert found.metadata[f"x.{type}"] == value
        assert found.entries[f"x.{type}"].type == type
        assert list(found.metadata[f"x.array.{type}"]) == [value, value]
        assert found.entries[f"x.array.{type}"].type == f"array[{type}]"
    assert found.metadata["x.bool"] is True
    assert found.metadata["x.string"] == "Straße"
    assert list(found.metadata["x.array.bool"]) == [False, True]
    assert list(found.metadata["x.array.string"]) == ["", "ß", "c"]
    assert found.metadata["x.array.string"][1] == "ß"
    assert len(found.metadata["x.array.empty"]) == 0


def test_another_alignment(tmp_path: Path) -> None:
    g = tiny_llama()
    g.set("general.alignment", 4096)
    g.alignment = 4096
    path = tmp_path / "model.gguf"
    path.write_bytes(g.encode())
    found = read_gguf(path)
    assert all(tensor.offset % 4096 == 0 for tensor in found.tensors)


def test_what_does_not_concern_an_architecture_may_be_zero(tmp_path: Path) -> None:
    """llama.cpp writes every hyperparameter it knows when it saves a model."""
    unused = ("experts_per_group", "full_attention_interval", "attention.key_length_mla", "ssm.group_count")
    others = {f"llama.{key}": 0 for key in (*unused, "interleave_moe_layer_step", "wkv.head_size")}
    assert read_gguf(write_gguf(tmp_path / "model.gguf", "llama", metadata=others)).arch == "llama"


def _bytes_read() -> int:
    with open("/proc/self/io") as io:  # noqa: PTH123
        return next(int(line.split()[1]) for line in io if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux' count of bytes read")
def test_a_file_of_39_gb_costs_its_header(tmp_path: Path) -> None:
    """What is read of a sparse giant is metadata and tensor headers, and at most a chunk ahead."""
    n_embd, n_ff = 192, 2**24
    g = tiny_llama(n_embd=n_embd)
    g.set("llama.feed_forward_length", n_ff)
    for name, shape in (("gate", [n_embd, n_ff]), ("up", [n_embd, n_ff]), ("down", [n_ff, n_embd])):
        g.change(f"blk.0.ffn_{name}.weight", shape=shape)
    path = tmp_path / "giant.gguf"
    with path.open("wb") as file:
        size = _write_sparse(g, file.fileno())
    assert size > 38e9
    before = _bytes_read()
    found = read_gguf(path)
    assert _bytes_read() - before < 4 << 20
    assert found.file_bytes == size
    assert found.tensor_by_name["blk.0.ffn_down.weight"].n_bytes == 4 * n_embd * n_ff


def _write_sparse(g: RawGguf, fd: int) -> int:
    """Write a header whose data are a hole; returns the size of the file."""
    offset = 0
    for tensor in g.tensors:
        tensor.offset = offset
        n = 4
        for extent in tensor.shape:
            n *= extent
        offset += -(-n // 32) * 32
    head = g.head()
    os.write(fd, head)
    os.ftruncate(fd, len(head) + offset)
    return len(head) + offset


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
    path = tmp_path / "model.gguf"
    raw = bytearray(tiny_llama().encode())
    path.write_bytes(raw)
    before = read_gguf(path).fingerprint
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert read_gguf(path).fingerprint == before, "weights do not count"
    other = tiny_llama()
    other.set("llama.context_length", 65)
    path.write_bytes(other.encode())
    assert read_gguf(path).fingerprint != before
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(tiny_llama().encode())
    assert read_gguf(moved).fingerprint == before, "nor does the path"


def test_a_change_on_disk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama().encode())
    found = read_gguf(path)
    check_unchanged(found.files)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelFileError, match="changed since it was checked"):
        check_unchanged(found.files)
    path.unlink()
    with pytest.raises(ModelFileError, match="start again"):
        check_unchanged(found.files)


def test_model_info(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", n_layer=3, n_ctx=512)
    info = model_info(read_gguf(path))
    assert (info.arch, info.n_layer, info.n_embd, info.n_ff) == ("qwen3moe", 3, 256, 512)
    assert (info.n_head, info.n_head_kv, info.n_embd_head_k, info.n_embd_head_v) == (4, 2, 64, 64)
    assert (info.n_expert, info.n_expert_used, info.n_vocab, info.n_ctx_train) == (8, 2, 320, 512)
    assert info.file_bytes == path.stat().st_size


def test_model_info_per_layer(tmp_path: Path) -> None:
    gguf = read_gguf(write_gguf(tmp_path / "model.gguf", "lfm2", n_layer=4))
    assert hyperparameters(gguf).n_head_kv == (0, 2, 0, 2)
    assert model_info(gguf).n_head_kv == 2


def test_model_info_of_latent_attention(tmp_path: Path) -> None:
    info = model_info(read_gguf(write_gguf(tmp_path / "model.gguf", "minicpm3")))
    assert (info.n_embd_head_k, info.n_embd_head_v) == (96, 64)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_architecture_is_asked_for_tensors_that_it_has_not(arch: str, tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / "model.gguf", arch)).tensors
