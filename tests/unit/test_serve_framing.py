"""Bodies of answers taken apart, however their bytes come in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.serve.framing import Chunked, Counted, FramingError

EVENT = b'data: {"content":"\r\n"}\n\n'


def chunked(payloads, ending=b"0\r\n\r\n"):
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in payloads) + ending


def taken(body, raw, cuts):
    ends = [*sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return b"".join(body.payload(raw[start:end]) for start, end in zip([0, *ends], ends, strict=False))


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_chunks_are_the_same_wherever_their_bytes_are_cut(payloads, cuts):
    body = Chunked()
    assert taken(body, chunked(payloads), cuts) == b"".join(payloads)
    assert body.is_whole


def test_chunks_that_come_together_leave_together():
    assert Chunked().payload(chunked([EVENT, EVENT], ending=b"")) == EVENT + EVENT


def test_extensions_and_trailers_are_left_out():
    body = Chunked()
    assert body.payload(b"3;name=value\r\nabc\r\n0\r\nX-Later: 1\r\n\r\nmore") == b"abc"
    assert body.is_whole


@pytest.mark.parametrize("raw", [chunked([EVENT], ending=b""), chunked([EVENT], ending=b"0\r\n"), b"5\r\nabc"])
def test_a_part_is_not_the_whole(raw):
    body = Chunked()
    body.payload(raw)
    assert not body.is_whole


@pytest.mark.parametrize("raw", [b"x\r\n", b"-1\r\na", b"0x1\r\na", b"1_0\r\n", b"\r\n", b"1\r\nab\r\n", b"f" * 9000])
def test_what_are_no_chunks_is_refused(raw):
    with pytest.raises(FramingError):
        Chunked().payload(raw)


@given(st.binary(max_size=40), st.integers(0, 50), st.lists(st.integers(0, 400), max_size=4))
def test_a_counted_body_ends_where_it_should(raw, length, cuts):
    body = Counted(length)
    assert taken(body, raw, cuts) == raw[:length]
    assert body.is_whole == (len(raw) >= length)
