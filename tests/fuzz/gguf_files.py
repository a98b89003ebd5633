"""GGUF files: sound models of several architectures, and importance matrices, taken apart, changed by what the format
knows, and read."""

from __future__ import annotations

import functools
import os
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from gguf_factory.raw import FORMATS, TYPE_IDS, RawGguf, RawTensor, array, scalar, string, tiny_llama, u32, u64
from gguf_factory.write import write_gguf

from fuzz.mutation import NUMBERS, TEXTS, damaged, number, text
from oallama.core.ggml_types import GGML_TYPES
from oallama.model.cut import cut_axis, cut_extent, cut_granularity
from oallama.model.gguf_header import read_header
from oallama.model.gguf_reader import read_gguf
from oallama.model.gguf_types import VALUE_TYPES
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.model.roles import MUL_MAT_ROLES
from oallama.report.inspect import inspect_document, model_lines, operator_table

SPLIT = b"\n-- next part of a split model --\n"
HOLE = b"\n-- then so many zeros: "
"""Between the parts of one input, and before the number of zeros that a part ends with: its tensors' data."""

ARCHITECTURES = ("gpt2", "phi3", "qwen3moe", "deepseek2", "gemma2", "mamba2", "minicpm3", "lfm2", "falcon", "olmo2")
MOST_BYTES = 1 << 30  # of data that grow with a shape; nothing is ever written of them
_NAMES = {kind: name for kind, (name, _) in VALUE_TYPES.items()}
_ROLES = sorted(MUL_MAT_ROLES)


class Zeros:
    """So many zero bytes, which are not there."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __add__(self, more: bytes) -> Zeros:
        return Zeros(self._n + len(more))


@functools.cache
def sound() -> tuple[RawGguf, ...]:
    """The models that inputs are made of."""
    small = tiny_llama(n_embd=32, n_ff=32, n_head=1)
    bare = tiny_llama(n_embd=32, n_ff=32, n_head=1, n_vocab=264)
    for key in [key for key in bare.metadata if key.startswith(b"tokenizer.")]:
        del bare.metadata[key]
    bare.set("tokenizer.ggml.model", "none", "string")
    with tempfile.TemporaryDirectory() as folder:
        others = [parts_of(write_gguf(Path(folder) / f"{arch}.gguf", arch)) for arch in ARCHITECTURES]
    for file in (bare, small):
        for tensor in file.tensors:
            tensor.data = Zeros(len(tensor.data))
    return (bare, bare, bare, small, *others)


def parts_of(path: Path) -> RawGguf:
    """A sound file as loose parts."""
    header = read_header(str(path))
    made = RawGguf(version=header.version)
    for key, entry in header.entries.items():
        if entry.type.startswith("array["):
            value = array(
                entry.value.type, list(entry.value.raw_strings() if entry.value.type == "string" else entry.value)
            )
        else:
            value = scalar(entry.type, entry.value)
        made.metadata[key.encode()] = value
    ids = {kind.name: number for number, kind in GGML_TYPES.items()}
    for tensor in header.tensors:
        made.tensors.append(
            RawTensor(tensor.name.encode(), list(tensor.shape), ids[tensor.type], Zeros(tensor.n_bytes))
        )
    return made


#
# changes
#


def make(random: Random) -> bytes:
    """One input: a file, or the parts of a split model with SPLIT between them."""
    base = random.choice(sound())
    files = [_copy(base)]
    if random.random() < 0.15:
        files = _split(files[0])
    for _ in range(random.choice((1, 1, 2, 2, 3, 5))):
        random.choice(CHANGES)(random, random.choice(files))
    heads = [file.head() for file in files]
    zeros = [sum(len(file.pad(tensor.data)) for tensor in file.tensors) for file in files]
    if random.random() < 0.2:
        chosen = random.randrange(len(files))
        heads[chosen] = damaged(random, heads[chosen])
        zeros[chosen] = random.choice((0, zeros[chosen], zeros[chosen], zeros[chosen] // 2, max(0, zeros[chosen] - 1)))
    return SPLIT.join(encoded(head, n) for head, n in zip(heads, zeros, strict=True))


def encoded(head: bytes, n_zeros: int) -> bytes:
    """One part of an input."""
    return head + HOLE + str(n_zeros).encode()


def _copy(base: RawGguf) -> RawGguf:
    tensors = [replace(tensor, shape=list(tensor.shape)) for tensor in base.tensors]
    return replace(base, metadata=dict(base.metadata), extra_entries=[], tensors=tensors)


def _split(whole: RawGguf) -> list[RawGguf]:
    half, n_tensors = len(whole.tensors) // 2, len(whole.tensors)
    second = RawGguf(tensors=whole.tensors[half:])
    whole.tensors = whole.tensors[:half]
    for i, part in enumerate((whole, second)):
        part.set("split.no", i, "uint16")
        part.set("split.count", 2, "uint16")
        part.set("split.tensors.count", n_tensors, "int32")
    return [whole, second]


def _count(random: Random, file: RawGguf) -> None:
    field = random.choice(("n_tensors", "n_kv", "version", "alignment", "magic"))
    if field == "magic":
        file.magic = random.choice((b"GGUX", b"", b"GG", b"FUGG"))
    elif field == "alignment":
        value = random.choice((1, 2, 16, 32, 64, 128, 4096, number(random)))
        file.set("general.alignment", value % (1 << 32), "uint32")
        file.alignment = value if 0 < value <= 4096 else 32
    else:
        setattr(file, field, number(random, len(file.tensors)))


def _scalar(random: Random, file: RawGguf) -> None:
    """Another value under a key: of its own type, or of another."""
    key = _key(random, file)
    if key is None:
        return
    (kind,) = struct.unpack_from("<I", file.metadata[key])
    name = _NAMES.get(kind, "uint32")
    if random.random() < 0.15 or name == "array":
        name = random.choice(sorted(TYPE_IDS.keys() - {"array"}))
    if name == "string":
        words = file.metadata[key][12:].decode("utf-8", "replace") if kind == TYPE_IDS["string"] else ""
        raw = text(random, words).encode("utf-8", "surrogatepass")
        file.metadata[key] = u32(TYPE_IDS["string"]) + string(raw)
    elif name.startswith("float"):
        width = struct.calcsize(FORMATS[name])
        pattern = random.choice((0, 1, 1 << (8 * width - 1), *FLOAT_BITS[width], random.getrandbits(8 * width)))
        file.metadata[key] = u32(TYPE_IDS[name]) + pattern.to_bytes(width, "little")
    else:
        width = struct.calcsize(FORMATS[name])
        known = int.from_bytes(file.metadata[key][4 : 4 + width], "little")
        file.metadata[key] = u32(TYPE_IDS[name]) + (number(random, known) % (1 << (8 * width))).to_bytes(
            width, "little"
        )


FLOAT_BITS = {4: (0x7FC00000, 0x7F800000, 0xFF800000, 0x3F800000), 8: (0x7FF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48)}


def _array(random: Random, file: RawGguf) -> None:
    """An array under a key: of so many elements, or of fewer or more than it says."""
    key = _key(random, file)
    if key is None:
        return
    name = random.choice(sorted(TYPE_IDS))
    claimed = random.choice((0, 1, 2, 3, 12, number(random)))
    n = claimed if claimed < 300 and random.random() < 0.8 else random.randrange(4)
    values = b""
    for _ in range(n):
        if name == "string":
            values += string(random.choice(TEXTS).encode("utf-8", "surrogatepass"))
        elif name == "array":
            values += u32(4) + u64(1) + u32(1)
        else:
            width = struct.calcsize(FORMATS[name])
            values += (random.choice(NUMBERS) % (1 << (8 * width))).to_bytes(width, "little")
    file.metadata[key] = u32(TYPE_IDS["array"]) + u32(TYPE_IDS[name]) + u64(claimed) + values


def _per_layer(random: Random, file: RawGguf) -> None:
    """A count per layer where one number may stand, and the other way round."""
    keys = [key for key in file.metadata if key.rpartition(b".")[2] in PER_LAYER]
    if keys:
        values = [
            random.choice((0, 1, 2, 32, 64, random.choice(NUMBERS))) % (1 << 31) for _ in range(random.randrange(5))
        ]
        file.metadata[random.choice(keys)] = array(random.choice(("uint32", "int32")), values)


PER_LAYER = (
    b"head_count",
    b"head_count_kv",
    b"feed_forward_length",
    b"expert_feed_forward_length",
    b"expert_used_count",
)


def _keys(random: Random, file: RawGguf) -> None:
    """Keys left out, renamed, doubled, or a stranger's put in."""
    key = _key(random, file)
    if key is None:
        return
    kind = random.randrange(5)
    if kind == 0:
        del file.metadata[key]
    elif kind == 1:
        file.metadata[text(random, key.decode("utf-8", "replace")).encode("utf-8", "surrogatepass")] = (
            file.metadata.pop(key)
        )
    elif kind == 2:
        file.record(key, file.metadata[key])
    elif kind == 3:
        other = _key(random, file)
        file.metadata[key] = file.metadata[other] if other is not None else b""
    else:
        stem = key.partition(b".")[0]
        name = random.choice(STRANGE_KEYS)
        file.metadata[stem + b"." + name] = scalar("uint32", number(random) % (1 << 32))


STRANGE_KEYS = (
    b"expert_count", b"expert_used_count", b"expert_group_count", b"expert_group_used_count", b"nextn_predict_layers",
    b"leading_dense_block_count", b"attention.key_length", b"attention.value_length", b"attention.key_length_mla",
    b"attention.kv_lora_rank", b"attention.sliding_window", b"rope.dimension_count", b"vocab_size",
)  # fmt: skip


def _architecture(random: Random, file: RawGguf) -> None:
    """Another architecture's name on the same tensors, its keys renamed with it."""
    entry = file.metadata.get(b"general.architecture")
    if entry is None or len(entry) < 12:
        return
    old, new = entry[12:], random.choice((*ARCHITECTURES, "llama", "olmo", "bert", "llama4", "clip", "x")).encode()
    file.metadata = {
        new + key[len(old) :] if key.startswith(old + b".") else key: value for key, value in file.metadata.items()
    }
    file.set("general.architecture", new.decode(), "string")


def _key(random: Random, file: RawGguf) -> bytes | None:
    return random.choice(list(file.metadata)) if file.metadata else None


def _tensor(random: Random, file: RawGguf) -> None:
    """One field of a tensor's header, as it stands."""
    if not file.tensors:
        return
    tensor = random.choice(file.tensors)
    kind = random.randrange(8)
    if kind == 0:
        tensor.n_dims = random.choice((0, 1, 2, 3, 4, 5, number(random)))
    elif kind == 1:
        tensor.offset = random.choice((number(random), 0, 32, 64))
    elif kind == 2:
        tensor.type_id = random.choice((*GGML_TYPES, number(random)))
    elif kind == 3:
        tensor.name_length = random.choice((0, 1, 63, 64, number(random)))
    elif kind == 4:
        file.tensors.remove(tensor)
    elif kind == 5:
        file.tensors.insert(random.randrange(len(file.tensors)), replace(tensor, shape=list(tensor.shape)))
    elif kind == 6:
        random.shuffle(file.tensors)
    else:
        tensor.name = text(random, tensor.name.decode("utf-8", "replace")).encode("utf-8", "surrogatepass")


def _reshape(random: Random, file: RawGguf) -> None:
    """Another shape or type, with data to match where they are not too many, so that what follows is in its place."""
    if not file.tensors:
        return
    tensor = random.choice(file.tensors)
    if random.random() < 0.5 and tensor.shape:
        tensor.shape[random.randrange(len(tensor.shape))] = random.choice(
            (0, 1, 2, 32, 33, 64, 96, 256, number(random))
        )
    elif random.random() < 0.5:
        tensor.shape = [random.choice((1, 2, 32, 64)) for _ in range(random.randrange(1, 5))]
    else:
        tensor.type_id = random.choice(list(GGML_TYPES))
    _fit(tensor)


def _role(random: Random, file: RawGguf) -> None:
    """A tensor under another role, layer or suffix, or a new one."""
    if not file.tensors:
        return
    layer = random.choice((0, 0, 0, 1, 2, 511, 999999999, 10**10))
    side = random.choice(("", "", "", "enc.", "dec."))
    suffix = random.choice((".weight", ".weight", ".weight", ".bias", ".scale", ""))
    name = f"{side}blk.{layer}.{random.choice(_ROLES)}{suffix}".encode()
    tensor = random.choice(file.tensors)
    if random.random() < 0.5:
        tensor.name = name
    else:
        file.tensors.append(replace(tensor, name=name, shape=list(tensor.shape)))
        total = file.metadata.get(b"split.tensors.count")
        if total is not None and len(total) == 8:
            file.set("split.tensors.count", (int.from_bytes(total[4:], "little") + 1) % (1 << 31), "int32")


def _fit(tensor: RawTensor) -> None:
    kind, n = GGML_TYPES.get(tensor.type_id), 1
    for extent in tensor.shape:
        n *= extent
    if kind is not None and 0 < n <= 8 * MOST_BYTES and kind.n_bytes(n) <= MOST_BYTES:
        tensor.data = Zeros(kind.n_bytes(n))


CHANGES = (
    _count, _scalar, _scalar, _scalar, _array, _per_layer, _keys, _keys, _architecture, _tensor, _tensor, _reshape,
    _reshape, _role,
)  # fmt: skip


#
# reading
#


def check(raw: bytes, folder: Path) -> None:
    """Read it and everything that follows from it: operators, where they may be cut, the report of `inspect`."""
    parts = raw.split(SPLIT)
    paths = []
    for i, part in enumerate(parts):
        path = folder / (f"m-{i + 1:05d}-of-{len(parts):05d}.gguf" if len(parts) > 1 else "m.gguf")
        head, hole, n_zeros = part.rpartition(HOLE)
        path.write_bytes(head if hole else part)
        if hole:
            os.truncate(path, len(head) + int(n_zeros))
        paths.append(path)
    found = read_gguf(paths[0])
    model, ops = model_info(found), operators(found)
    for operator in ops:
        assert cut_extent(operator) >= 1 and cut_granularity(operator) >= 1, f"{cut_axis(operator)} of {operator}"
        assert 0 < operator.active_fraction <= 1, f"{operator} is active in {operator.active_fraction}"
        assert operator.mul_mat.bytes == operator.bytes, f"{operator} is {operator.mul_mat.bytes} bytes"
    inspect_document(model, ops)
    model_lines(model)
    operator_table(ops)
