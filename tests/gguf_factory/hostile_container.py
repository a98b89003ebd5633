"""Hostile files whose container lies: header, metadata records, tensor records, data section."""

from __future__ import annotations

from gguf_factory.raw import RawGguf, array, scalar, string, u32, u64

_BIG = 2**64 - 1
_Q = "blk.0.attn_q.weight"


def _double_key(g: RawGguf) -> None:
    g.record(b"llama.block_count", scalar("uint32", 1))


def _overlap(g: RawGguf) -> None:
    g.change(_Q, offset=0)


def _no_data(g: RawGguf) -> bytes:
    head = g.head()
    return head[: len(head) - 1 - (len(head) % 7)]


# kind: (phrase our error must hold, what to do to a valid file; bytes returned replace the whole file)
CASES = {
    "empty file": ("the file is empty", lambda g: b""),
    "magic cut": ("not a GGUF file", lambda g: b"GG"),
    "other magic": ("not a GGUF file (it begins with 'GGML')", lambda g: g.let(magic=b"GGML")),
    "text file": ("not a GGUF file", lambda g: b"#!/bin/sh\necho hello\n"),
    "zip file": ("not a GGUF file", lambda g: b"PK\x03\x04" + bytes(100)),
    "only the magic": ("the file ends inside the version", lambda g: b"GGUF"),
    "counts cut": ("the file ends inside the metadata count", lambda g: g.encode()[:20]),
    "version 0": ("GGUF version 0 is unknown", lambda g: g.let(version=0)),
    "version 1": ("GGUF version 1 is no longer read", lambda g: g.let(version=1)),
    "version from the future": ("GGUF version 4 is unknown", lambda g: g.let(version=4)),
    "big-endian": ("the file is big-endian", lambda g: g.let(version=3 << 24)),
    # CVE-2024-21836, -23605: counts that overflow an allocation
    "tensor count 2^64-1": ("tensors are claimed, more than", lambda g: g.let(n_tensors=_BIG)),
    "tensor count 2^63": ("tensors are claimed, more than", lambda g: g.let(n_tensors=2**63)),
    "tensor count that wraps times a record": ("tensors are claimed", lambda g: g.let(n_tensors=2**64 // 368 + 1)),
    "key count 2^64-1": ("metadata keys are claimed, more than", lambda g: g.let(n_kv=_BIG)),
    "key count above the file": ("metadata keys are claimed, more than", lambda g: g.let(n_kv=10**6)),
    "one key too many": ("the name of tensor 0 claims", lambda g: g.let(n_kv=len(g.metadata) + 1)),
    "one tensor too many": ("which is empty or not plain ASCII", lambda g: g.let(n_tensors=len(g.tensors) + 1)),
    # CVE-2024-21825, -21802, -23496; ggml#24884: strings and keys
    "empty key": ("metadata key 18 is empty", lambda g: g.record(b"", scalar("uint32", 1))),
    "key length 2^64-1": ("bytes, more than the 65535 allowed", lambda g: g.extra_entries.append(u64(_BIG) + b"x" * 8)),
    "key of 70000 bytes": ("more than the 65535 allowed", lambda g: g.record(b"k" * 70000, scalar("uint32", 1))),
    "key twice": ("'llama.block_count' is there twice", _double_key),
    "key not UTF-8": ("is not UTF-8", lambda g: g.record(b"\xff\xfe", scalar("uint32", 1))),
    "key with a terminal escape": ("unprintable characters", lambda g: g.record(b"\x1b[2J", scalar("uint32", 1))),
    "key with a zero": ("unprintable characters", lambda g: g.record(b"a\0b", scalar("uint32", 1))),
    "value type 13": ("has the unknown value type 13", lambda g: g.set_raw(b"x", u32(13) + bytes(8))),
    "value type 2^32-1": ("has the unknown value type 4294967295", lambda g: g.set_raw(b"x", u32(_BIG) + bytes(8))),
    "string length 2^64-1": ("claims 18446744073709551615 bytes", lambda g: g.set_raw(b"x", u32(8) + u64(_BIG))),
    "string longer than the file": ("more than the file has left", lambda g: g.set_raw(b"x", u32(8) + u64(2**40))),
    "bool of value 2": ("is a bool of value 2", lambda g: g.set_raw(b"x", u32(7) + b"\x02")),
    "array of arrays": ("is an array of arrays", lambda g: g.set_raw(b"x", u32(9) + u32(9) + u64(1))),
    "array of an unknown type": (
        "an array of the unknown type 99",
        lambda g: g.set_raw(b"x", u32(9) + u32(99) + u64(1)),
    ),
    "array of 2^64-1": ("more than the file has left", lambda g: g.set_raw(b"x", u32(9) + u32(4) + u64(_BIG))),
    "array count that wraps": ("more than the file has left", lambda g: g.set_raw(b"x", u32(9) + u32(10) + u64(2**61))),
    "string array of 2^61": ("more than the file has left", lambda g: g.set_raw(b"x", u32(9) + u32(8) + u64(2**61))),
    "string array with an endless string": (
        "a string in the value of 'x' claims",
        lambda g: g.set_raw(b"x", u32(9) + u32(8) + u64(2) + string("ok") + u64(_BIG - 7)),
    ),
    "string array whose lengths wrap to zero": (
        "a string in the value of 'x' claims",
        lambda g: g.set_raw(b"x", u32(9) + u32(8) + u64(3) + u64(2**64 - 8) + u64(2**64 - 8) + u64(0)),
    ),
    # alignment: GHSA-g4cc-763q-h9h6, llama.cpp#24997
    "alignment 0": ("instead of a power of two", lambda g: g.set("general.alignment", 0)),
    "alignment 48": ("instead of a power of two", lambda g: g.set("general.alignment", 48)),
    "alignment 2^31": ("instead of a power of two", lambda g: g.set("general.alignment", 2**31)),
    "alignment 8": ("less than the 32 ggml needs", lambda g: (g.set("general.alignment", 8), g.let(alignment=8))),
    "alignment as uint64": ("is a uint64 instead", lambda g: g.set("general.alignment", 32, "uint64")),
    "alignment as array": ("instead of a uint32", lambda g: g.set_raw(b"general.alignment", array("uint32", [32]))),
    # tensor records
    "tensor name empty": ("which is empty or not plain ASCII", lambda g: g.change(_Q, name=b"")),
    "tensor name of 64 bytes": ("more than the 63 allowed", lambda g: g.change(_Q, name=b"n" * 64)),
    "tensor name length 2^64-1": ("more than the 63 allowed", lambda g: g.change(_Q, name_length=_BIG)),
    "tensor name with a line break": ("not plain ASCII", lambda g: g.change(_Q, name=b"blk.0\nattn_q")),
    "tensor name with a zero": ("not plain ASCII", lambda g: g.change(_Q, name=b"blk.0.attn_q.weight\0x")),
    "tensor name with a space": ("not plain ASCII", lambda g: g.change(_Q, name=b"-ot x=CPU --help")),
    "tensor name not ASCII": ("not plain ASCII", lambda g: g.change(_Q, name="blk.0.ättn_q".encode())),
    "tensor twice": ("is there twice", lambda g: g.change(_Q, name=b"blk.0.attn_output.weight")),
    "no dimensions": ("has 0 dimensions", lambda g: g.change(_Q, shape=[])),
    "five dimensions": ("has 5 dimensions", lambda g: g.change(_Q, shape=[64, 64, 1, 1, 1])),
    "2^32-1 dimensions": ("has 4294967295 dimensions", lambda g: g.change(_Q, n_dims=2**32 - 1)),
    "dimension 0": ("has no elements", lambda g: g.change(_Q, shape=[64, 0])),
    "dimension -1": ("larger than 64 bits can count", lambda g: g.change(_Q, shape=[64, _BIG])),
    # CVE-2025-53630, CVE-2026-27940, -33298: products and sizes that wrap
    "elements that wrap to 0": ("larger than 64 bits can count", lambda g: g.change(_Q, shape=[2**32, 2**32])),
    "elements that wrap to 4096": ("larger than 64 bits", lambda g: g.change(_Q, shape=[64, 2**58 + 64])),
    "bytes that wrap": ("larger than 64 bits can count", lambda g: g.change(_Q, shape=[2**31, 2**30])),
    "padded size that wraps": ("bytes beyond the end of the file", lambda g: g.change(_Q, shape=[2**61 - 1])),
    "ggml type 43": ("unknown or removed ggml type 43", lambda g: g.change(_Q, type_id=43)),
    "ggml type removed": ("unknown or removed ggml type 4", lambda g: g.change(_Q, type_id=4)),
    "ggml type -1": ("unknown or removed ggml type 4294967295", lambda g: g.change(_Q, type_id=-1)),
    "rows that are no whole blocks": ("no multiple of Q4_0's block", lambda g: g.change(_Q, shape=[48, 64], type_id=2)),
    # CVE-2026-7482: data outside the file or over each other
    "offset not aligned": ("not aligned to 32", lambda g: g.change(_Q, offset=67600 + 8)),
    "data over each other": ("overlaps the tensor before it", _overlap),
    "data with a gap": ("leaves a gap before it", lambda g: g.change(_Q, offset=2**20)),
    "offset 2^64-32": ("leaves a gap before it", lambda g: g.change(_Q, offset=2**64 - 32)),
    "last byte missing": ("beyond the end of the file", lambda g: g.encode()[:-1]),
    "data missing": ("the file ends before its tensor data", _no_data),
    "cut in a tensor header": ("the file ends inside the header of tensor", lambda g: g.head()[:-30]),
    "cut in the vocabulary": ("more than the file has left", lambda g: g.head()[:1500]),
}
