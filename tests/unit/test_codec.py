"""Dataclasses as JSON and back, and JSON that is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.codec import CodecError, Count, Mark, Positive, Size, from_json, parse_json, to_json


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    size: tuple[Size, Size]


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Annotated[Inner, Mark.FLAT]
    n: Count
    seconds: Annotated[tuple[Positive, ...], Mark.NOT_EMPTY]
    others: dict[str, Inner] = field(default_factory=dict)
    pairs: tuple[tuple[int, float], ...] = ()
    near: Inner | None = None
    note: Annotated[str | None, Mark.OMIT_DEFAULT] = None
    listed: Annotated[tuple[str, ...], Mark.REQUIRED] = ()
    absent: Annotated[Inner | None, Mark.OMIT_DEFAULT] = None

    JSON_KEYS: ClassVar = (
        "n", "double", "name", "size", "kind", "seconds", "others", "pairs", "near", "note", "listed", "absent",
    )  # fmt: skip

    @property
    def double(self) -> int:
        return 2 * self.n


sizes, reals = st.integers(1, 99), st.floats(allow_nan=False, allow_infinity=False, width=32)
inners = st.builds(Inner, st.sampled_from(["a", "b"]), st.tuples(sizes, sizes))
outers = st.builds(
    Outer, st.text(), inners, st.integers(0, 2**63 - 1), st.lists(st.floats(1e-9, 1e9), min_size=1).map(tuple),
    st.dictionaries(st.text(), inners), st.lists(st.tuples(st.integers(1 - 2**63, 2**63 - 1), reals)).map(tuple),
    st.none() | inners, st.none() | st.text(), st.lists(st.text()).map(tuple),
)  # fmt: skip
EXAMPLE = Outer("x", Inner("a", (1, 2)), 3, (0.5,), {"k": Inner("b", (3, 4))}, ((1, -2.0),))


@given(outers)
def test_json_gives_back_the_same_record(record: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(record))), "it") == record


def test_keys_are_written_in_their_order_with_properties_and_without_defaults_left_out() -> None:
    document = to_json(EXAMPLE)
    assert list(document) == ["n", "double", "name", "size", "kind", "seconds", "others", "pairs", "near", "listed"]
    assert document["double"] == 6 and document["size"] == [1, 2] and document["near"] is None
    assert document["others"] == {"k": {"kind": "b", "size": [3, 4]}} and document["pairs"] == [[1, -2.0]]


def test_defaults_and_unknown_keys() -> None:
    document = {"name": "x", "kind": "a", "size": [1, 2], "n": 3, "seconds": [1], "listed": [], "colour": "blue"}
    assert from_json(Outer, document, "it") == Outer("x", Inner("a", (1, 2)), 3, (1.0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "it: name must be a string, not None"),
        ({"name": ...}, "it: name is missing"),
        ({"listed": ...}, "it: listed is missing"),
        ({"n": -1}, "it: n must be at least 0, not -1"),
        ({"n": True}, "it: n must be a whole number, not True"),
        ({"kind": "c"}, "it: kind must be one of a, b, not 'c'"),
        ({"size": [1]}, "it: size must be a list of 2 values, not [1]"),
        ({"size": [1, 0]}, "it: size[1] must be above 0, not 0"),
        ({"seconds": []}, "it: seconds must be a non-empty list, not []"),
        ({"seconds": [1.0, 0.0]}, r"it: seconds[1] must be above 0, not 0.0"),
        ({"seconds": [1.0, float("nan")]}, r"it: seconds[1] must be a number, not nan"),
        ({"others": []}, "it: others must be an object, not []"),
        ({"others": {"k": 5}}, "it.others.k must be an object, not 5"),
        ({"others": {"\x1b[2J": 5}}, r"it.others.'\x1b[2J' must be an object, not 5"),
        ({"others": {"k" * 99: 5}}, f"it.others.'{'k' * 36}... must be an object, not 5"),
        ({"others": {"k": {"kind": 1, "size": [1, 1]}}}, "it.others.k: kind must be one of a, b, not 1"),
        ({"pairs": [[1, 2.0], [1]]}, "it: pairs[1] must be a list of 2 values, not [1]"),
        ({"near": []}, "it.near must be an object, not []"),
        ({"n": "x" * 99}, f"it: n must be a whole number, not '{'x' * 36}..."),
        ({"n": 2**63}, "it: n must be a whole number of 64 bits, not 9223372036854775808"),
    ],
)
def test_faults_name_their_path(changes: dict[str, Any], message: str) -> None:
    document = {key: value for key, value in {**to_json(EXAMPLE), **changes}.items() if value is not ...}
    with pytest.raises(CodecError) as error:
        from_json(Outer, document, "it")
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "[1e999]", "[" * 100_000, "9" * 5000, "", b"\xff"])
def test_json_that_could_not_be_written_again_is_refused(text: str | bytes) -> None:
    with pytest.raises(CodecError):
        parse_json(text)
