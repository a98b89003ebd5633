"""Mutations of inputs: numbers, texts, bytes and JSON that readers get wrong. All by the given random source."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NUMBERS = tuple(
    sorted(
        {0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 255, 1000, 65537, 10**9}
        | {(1 << bits) + more for bits in (8, 15, 16, 24, 31, 32, 40, 61, 63, 64) for more in (-1, 0, 1)}
    )
)
REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 1e-300, 5e-324, 1e15, 1e300, 1.7e308, 0.1, 1 / 3)
TEXTS = (
    *("", " ", "\0", "\n", "a\nb", "\x1b[2J", "-", "--help", "../x", "/dev/null", "%s", "{}", "a" * 70, "a" * 5000),
    *(
        "ä",
        "\u202e",
        "\ud800",
        "١٢",
        "1",
        "-1",
        "0",
        "1e400",
        "9" * 400 + ".5",
        "9" * 5000,
        "nan",
        "inf",
        "1_0",
        "auto",
    ),
    *("none", "CPU", "on", "true", "null", "NaN", "Infinity", "0x10", "1,", ",", "=", ":", "blk.0.attn_q.weight"),
)


def number(random: Random, known: int = 0) -> int:
    """A whole number that overflows something, or one beside `known`."""
    if random.random() < 0.3:
        return max(0, known + random.choice((-32, -1, 1, 32, known, -known // 2)))
    return random.choice(NUMBERS)


def text(random: Random, known: str = "") -> str:
    """A text that readers get wrong, or `known` with a part of it changed."""
    if not known or random.random() < 0.4:
        return random.choice(TEXTS)
    start = random.randrange(len(known) + 1)
    end = min(len(known), start + random.choice((0, 1, 1, 2, 8)))
    return known[:start] + random.choice(("", random.choice(TEXTS), random.choice(known))) + known[end:]


def damaged(random: Random, raw: bytes, within: int = 0) -> bytes:
    """Bytes cut, flipped, put in, left out or overwritten; in the first `within` of them where that is not 0."""
    size = min(within or len(raw), len(raw))
    if not size:
        return bytes(random.randrange(256) for _ in range(random.randrange(9)))
    position = random.randrange(size)
    kind = random.randrange(6)
    if kind == 0:
        return raw[:position]
    if kind == 1:
        return raw[:position] + bytes((raw[position] ^ (1 << random.randrange(8)),)) + raw[position + 1 :]
    if kind == 2:
        return raw[:position] + random.randbytes(random.randrange(1, 9)) + raw[position:]
    if kind == 3:
        return raw[:position] + raw[position + random.choice((1, 1, 4, 8, 64)) :]
    if kind == 4:
        width = random.choice((1, 2, 4, 8))
        value = random.choice(NUMBERS) % (1 << (8 * width))
        return raw[:position] + value.to_bytes(width, "little") + raw[position + width :]
    source, n = random.randrange(size), random.randrange(1, 65)
    return raw[:position] + raw[source : source + n] + raw[position:]


#
# JSON
#


class Raw:
    """JSON that `json` would not write: put in as it stands."""

    def __init__(self, text: str) -> None:
        self.text = text


RAW = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "9" * 4000, "-0", "1E+2", "01", "tru", ""),
    *("[" * depth + "]" * depth for depth in range(930, 1000, 5)),
    *('{"a":' * 300 + "1" + "}" * 300, "[" * 100000, '"\\ud800"', '"\\u0000"'),
)


def json_value(random: Random, known: Any) -> Any:
    """Something in place of a value: near it, of another type, or no JSON at all."""
    kind = random.randrange(10)
    if kind < 4:
        if isinstance(known, bool):
            return not known
        if isinstance(known, int):
            return random.choice(
                (
                    number(random, known),
                    -number(random, known),
                    10**30,
                    10**400,
                    known + 0.5 if abs(known) < 1e300 else 0.5,
                )
            )
        if isinstance(known, float):
            return random.choice((*REALS, -known, known * 10, known + 1e-9, 10**400))
        if isinstance(known, str):
            return text(random, known)
        if isinstance(known, list) and known:
            return random.choice((known + known[:1], known[::-1], known[1:], known * 2, known[:1] * 70))
    if kind == 9:
        return Raw(random.choice(RAW))
    return random.choice(
        (None, True, False, 0, -1, 10**30, *REALS, [], {}, [[]], [None], {"": None}, str(known)[:50], text(random))
    )


def damaged_json(random: Random, sound: str) -> bytes:
    """A JSON document with one to four of its values, keys or bytes changed."""
    document = json.loads(sound)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _change(random, document)
    raws: list[str] = []
    written = _written(document, raws)
    for i, raw in enumerate(raws):
        written = written.replace(f'"\x01raw{i}"', raw).replace(f'"\\u0001raw{i}"', raw)
    encoded = written.encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        encoded = damaged(random, encoded)
    if random.random() < 0.02:
        encoded = random.choice(
            (b"\xef\xbb\xbf" + encoded, encoded + b"\xff", written.encode("utf-16", "surrogatepass"))
        )
    return encoded


def _written(document: Any, raws: list[str]) -> str:
    def default(value: Any) -> str:
        raws.append(value.text)
        return f"\x01raw{len(raws) - 1}"

    return json.dumps(document, default=default)


def _nodes(value: Any, found: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        _nodes(item, found)


def _change(random: Random, document: Any) -> None:
    found: list[tuple[Any, Any]] = []
    _nodes(document, found)
    if not found:
        return
    holder, key = random.choice(found)
    kind = random.randrange(12)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[text(random, key)] = holder.pop(key)
    elif kind == 2:
        other, there = random.choice(found)
        holder[key] = copy.deepcopy(other[there])
    elif kind == 3 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = json_value(random, holder[key])
