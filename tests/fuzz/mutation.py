"""Changes to inputs: numbers, texts, bytes and trees that readers get wrong. All by the given random source."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (
    0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 255, 1000, 65537, 10**9,
    *((1 << bits) + more for bits in (8, 15, 16, 24, 31, 32, 40, 61, 63, 64) for more in (-1, 0, 1)),
)  # fmt: skip
REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 1e-300, 5e-324, 1e15, 1e300, 1.7e308, 0.1, 1 / 3)
TEXTS = (
    "", " ", "\0", "\n", "a\nb", "\x1b[2J", "-", "--help", "../x", "/dev/null", "%s", "{}", "a" * 70, "a" * 5000, "ä",
    "\u202e", "\ud800", "١٢", "1", "-1", "0", "1e400", "9" * 400 + ".5", "9" * 5000, "nan", "inf", "1_0", "auto",
    "none", "CPU", "on", "true", "null", "NaN", "Infinity", "0x10", "1,", ",", "=", ":", "blk.0.attn_q.weight",
)  # fmt: skip


def number(random: Random, known: int = 0) -> int:
    """A whole number that overflows something, a small one, or one beside `known`."""
    near = max(0, known + random.choice((-32, -1, 1, 32, known, -known // 2)))
    return random.choice((near, random.randrange(40), random.choice(NUMBERS), random.choice(NUMBERS)))


def text(random: Random, known: str = "") -> str:
    """A text that readers get wrong, or `known` with a part of it changed."""
    if not known or random.random() < 0.4:
        return random.choice(TEXTS)
    start = random.randrange(len(known) + 1)
    end = min(len(known), start + random.choice((0, 1, 1, 2, 8)))
    return known[:start] + random.choice(("", random.choice(TEXTS), random.choice(known))) + known[end:]


def damaged(random: Random, raw: bytes) -> bytes:
    """Bytes cut, overwritten, put in, left out or doubled."""
    position, width = random.randrange(len(raw) + 1), random.choice((1, 2, 4, 8, 64))
    head, tail = raw[:position], raw[position:]
    source = random.randrange(len(raw) + 1)
    return random.choice(
        (
            head,
            head + random.randbytes(1) + tail[1:],
            head + random.randbytes(width) + tail,
            head + tail[width:],
            head + (random.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little") + tail[width:],
            head + raw[source : source + width] + tail,
        )
    )


#
# trees of dictionaries, lists and values
#


def changed(random: Random, sound: Sequence[Any]) -> Any:
    """One of the sound trees, with one to four of its keys and values changed."""
    tree = copy.deepcopy(random.choice(sound))
    for _ in range(random.choice((1, 1, 2, 3, 4))):
        if tree:
            _change(random, tree, _path(random, tree), random.choice(sound))
    return tree


def _path(random: Random, tree: Any) -> list[Any]:
    """Keys that lead to something in it; what is deep in large parts is as likely as what is in small ones."""
    path = []
    while isinstance(tree, dict | list) and tree and not (path and random.random() < 0.05):
        path.append(random.choice(list(tree)) if isinstance(tree, dict) else random.randrange(len(tree)))
        tree = tree[path[-1]]
    return path


def _at(tree: Any, path: list[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _like(random: Random, tree: Any, path: list[Any]) -> Any:
    """What a sibling has under the same keys, at any places of lists; anything where none has."""
    found = tree
    for key in path:
        if isinstance(found, list) and found:
            found = random.choice(found)
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return _at(tree, _path(random, tree))
    return found


def _change(random: Random, tree: Any, path: list[Any], other: Any) -> None:
    *above, key = path
    holder, kind = _at(tree, above), random.randrange(12)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[text(random, key)] = holder.pop(key)
    elif kind == 1:
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind < 5:
        holder[key] = copy.deepcopy(_like(random, random.choice((tree, other)), path))
    else:
        holder[key] = _value(random, holder[key])


def _value(random: Random, known: Any) -> Any:
    """Something in place of a value: near it, of another type, or no JSON at all."""
    near: Sequence[Any] = ()
    if isinstance(known, bool):
        near = (not known,)
    elif isinstance(known, int):
        near = (number(random, known), number(random, known), -number(random, known), 10**30, 10**400, [known] * 2)
    elif isinstance(known, float):
        near = (*REALS, -known, known * 10, known + 1e-9, 10**400)
    elif isinstance(known, str):
        near = (text(random, known),)
    elif isinstance(known, list) and known:
        near = (known + known[:1], known[::-1], known[1:], known * 2, known[:1] * 70)
    if near and random.random() < 0.5:
        return random.choice(near)
    if random.random() < 0.1:
        return Raw(random.choice(RAW))
    others = (None, True, False, 0, -1, 10**30, *REALS, [], {}, [[]], [None], {"": None}, str(known)[:50])
    return random.choice((*others, text(random), number(random)))


class Raw(str):
    """JSON that `json` would not write: put in as it stands."""


RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "9" * 4000, "-0", "1E+2", "01", "tru", "",
    '{"a":' * 300 + "1" + "}" * 300, "[" * 100000, '"\\ud800"', '"\\u0000"',
    *("[" * depth + "]" * depth for depth in range(930, 1000, 5)),
)  # fmt: skip


def damaged_json(random: Random, sound: Sequence[Any]) -> bytes:
    """One of the JSON documents with keys, values or bytes changed."""
    written = written_json(changed(random, sound)).encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        written = damaged(random, written)
    if random.random() < 0.02:
        written = random.choice((b"\xef\xbb\xbf" + written, written + b"\xff", b"\xff\xfe" + written))
    return written


def written_json(tree: Any) -> str:
    """As json.dumps, but for Raw."""
    if isinstance(tree, Raw):
        return tree
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {written_json(value)}' for key, value in tree.items())}}}"
    if isinstance(tree, list):
        return f"[{', '.join(map(written_json, tree))}]"
    return json.dumps(tree)
