"""One request to a server at a socket: what it gets, what comes back, and how both can end early."""

import asyncio
import contextlib

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE_S

from oallama.serve.upstream import MOST_WAITING_BYTES, Answer, BrokenOff, UpstreamRequest

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def server(folder, serve):
    path = str(folder / "s.sock")
    async with await asyncio.start_unix_server(serve, path):
        yield path


def answers(raw, closes=True):
    """Sends this whatever is asked."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        if not closes:
            await reader.read()
        writer.close()

    return serve


def told(folder, serve, asked=None):
    """(status, body) of the answer."""

    async def run():
        async with server(folder, serve) as path:
            answer = Answer(asked or UpstreamRequest("GET", b"/"))
            try:
                await answer.begin(path)
                return answer.status, await answer.whole()
            finally:
                answer.close()

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize(
    "raw, closes",
    [
        (OK + b"Content-Length: 2\r\n\r\nhi", False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi", False),
        (OK + b"\r\nhi", True),
    ],
)
def test_a_body_ends_by_its_length_by_its_last_chunk_or_with_the_connection(tmp_path, raw, closes):
    assert told(tmp_path, answers(raw, closes)) == (200, b"hi")


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_chunks_are_the_same_wherever_their_bytes_are_cut(payloads, cuts):
    chunks = b"".join(b"%x;more=1\r\n%b\r\n" % (len(each), each) for each in payloads)
    raw = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Later: 1\r\n\r\n"
    ends = [*sorted(cut % len(raw) for cut in cuts), len(raw)]
    answer = Answer(UpstreamRequest("GET", b"/"))
    for start, end in zip([0, *ends], ends, strict=False):
        answer.data_received(raw[start:end])
    answer.data_received(b"more")
    assert (answer.status, asyncio.run(answer.whole())) == (200, b"".join(payloads))


@pytest.mark.parametrize("method, status", [("HEAD", b"200 OK"), ("GET", b"204 No Content"), ("GET", b"304 X")])
def test_some_answers_have_no_body(tmp_path, method, status):
    raw = b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\n\r\n"
    assert told(tmp_path, answers(raw, closes=False), UpstreamRequest(method, b"/"))[1] == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        OK,
        OK + b"Content-Length: 3\r\n\r\nhi",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"hi\r\n\r\n",
    ],
)
def test_an_answer_that_is_not_whole_is_none(tmp_path, raw):
    with pytest.raises(BrokenOff):
        told(tmp_path, answers(raw))


def test_chunks_without_sizes_end_the_answer(tmp_path):
    with pytest.raises(BrokenOff):
        told(tmp_path, answers(OK + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n", closes=False))


def test_where_nobody_listens_there_is_no_answer(tmp_path):
    async def run():
        await Answer(UpstreamRequest("GET", b"/")).begin(str(tmp_path / "nobody.sock"))

    with pytest.raises(BrokenOff):
        asyncio.run(run())


def test_a_body_is_sent_with_its_length(tmp_path):
    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        writer.write(OK + b"\r\n" + await reader.readexactly(length))
        writer.close()

    body = bytes(range(256)) * 20_000
    assert told(tmp_path, serve, UpstreamRequest("POST", b"/", body=body)) == (200, body)
    assert told(tmp_path, serve, UpstreamRequest("POST", b"/")) == (200, b"")


def test_what_http_cannot_say_is_refused():
    async def run():
        Answer(UpstreamRequest("GET", b"/a b"))

    with pytest.raises(h11.LocalProtocolError):
        asyncio.run(run())


def test_one_that_is_closed_while_it_is_waited_for_is_broken_off(tmp_path):
    async def run():
        async with server(tmp_path, answers(OK + b"Content-Length: 3\r\n\r\nhi", closes=False)) as path:
            answer = Answer(UpstreamRequest("GET", b"/"))
            await answer.begin(path)
            assert await answer.part() == b"hi"
            asyncio.get_running_loop().call_soon(answer.close)
            with pytest.raises(BrokenOff):
                await answer.part()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_server_waits_for_a_slow_reader(tmp_path):
    n_parts, part = 400, b"x" * (1 << 16)
    sent = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % (n_parts * len(part)))
        for _ in range(n_parts):
            writer.write(part)
            await writer.drain()
            sent.append(len(part))
        await reader.read()
        writer.close()

    async def run():
        async with server(tmp_path, serve) as path:
            answer = Answer(UpstreamRequest("GET", b"/"))
            await answer.begin(path)
            before = -1
            while before != len(sent) or not sent:  # until it sends no more
                before = len(sent)
                await asyncio.sleep(0.2)
            assert sum(sent) < 20 * MOST_WAITING_BYTES
            assert len(await answer.whole()) == n_parts * len(part)
            answer.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
