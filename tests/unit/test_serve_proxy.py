"""The application on our port over a stand-in for llama-server: what is passed on, what is refused, what breaks off."""

import asyncio
import functools
import gc
import json
import os
import signal
import socket
import sys

import httpx
import openai
import placed_server
import pytest
from processes import PATIENCE_S, until
from serving import Stub
from starlette.requests import Request
from starlette.responses import Response

from oallama.serve import proxy as proxy_module
from oallama.serve import server as server_module
from oallama.serve.upstream import Answer

get = functools.partial(httpx.get, timeout=PATIENCE_S)


@pytest.fixture(params=["asyncio", "uvloop"])
def served(tmp_path, request):
    loops = pytest.importorskip(request.param)
    with placed_server.running(Stub(tmp_path), new_loop=loops.new_event_loop) as server:
        yield server


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_event_loop_is_the_fast_one_where_that_is_installed(monkeypatch, is_installed):
    if is_installed:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    found = []

    async def main():
        found.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    server_module.run(main())
    assert found == ["uvloop" if is_installed else "asyncio"]


def post(server, path, **options):
    return httpx.post(server.url + path, timeout=PATIENCE_S, **options)


def test_a_request_and_its_answer_are_passed_on_as_they_are(served):
    answer = post(served, "/echo/a%20b?x=1&y=%2F", content=b"\x00raw", headers={"X-Mine": "kept", "Accept": "text/x"})
    told = answer.json()
    assert told["path"] == "/echo/a%20b?x=1&y=%2F"
    assert told["body"] == "\x00raw"
    assert told["headers"]["x-mine"] == "kept" and told["headers"]["accept"] == "text/x"
    assert answer.headers["x-of-the-stub"] == "kept"
    assert answer.headers["content-type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize("path", ["/echo/../a", "/echo#b", "/echo//a/./b?x=#", "/echo%2e%2e"])
def test_a_path_is_passed_on_as_the_client_wrote_it(served, path):
    asked = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    answer = raw(served, asked.encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["path"] == path


def test_llama_servers_own_errors_come_through(served):
    answer = get(served.url + "/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_our_key_does_not_reach_llama_server(tmp_path):
    with placed_server.running(Stub(tmp_path), key="k1") as server:
        headers = post(server, "/echo", headers={"Authorization": "Bearer k1"}).json()["headers"]
        assert not {"authorization", "x-api-key"} & {name.lower() for name in headers}
        assert get(server.url + "/v1/models").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="k2", max_retries=0).models.list()


def test_openais_client_streams(served):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
    assert "".join(part.choices[0].delta.content for part in stream) == "Once upon a time."


def test_pieces_come_as_they_are_made(served):
    body = {"messages": [], "stream": True}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = list(answer.iter_raw())
    assert len(pieces) > 1
    assert served.proxy.heard(PATIENCE_S) and not served.proxy.heard(0)
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_many_clients_at_once(served):
    async def ask(client):
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        return "".join([part.choices[0].delta.content async for part in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client) for _ in range(16)))

    assert asyncio.run(all_of_them()) == ["Once upon a time."] * 16


def test_a_stream_that_breaks_off_ends_with_an_error_and_not_as_if_it_were_whole(served):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="m", messages=[], stream=True, extra_body={"die_after": 2})
    pieces = []
    with pytest.raises(openai.APIError, match="started again"):
        for part in stream:
            pieces.append(part.choices[0].delta.content)
    assert pieces == ["Once", " upon"]


def test_after_an_abort_requests_are_told_so_and_later_answered(served):
    assert post(served, "/abort").status_code == 503
    asked = []

    def answered():
        asked.append(get(served.url + "/v1/models"))
        return asked[-1].status_code == 200

    until(answered)
    for each in asked[:-1]:
        assert each.status_code == 503 and each.json()["error"]["type"] == "unavailable_error"
        assert each.headers["retry-after"] == "2"
    assert get(served.url + "/placement").json()["state"]["restarts"] == 1


def test_while_the_model_loads_requests_are_told_so(tmp_path):
    stub = Stub(tmp_path)
    stub.order("loading")
    with placed_server.running(stub, wait=False) as server:
        answer = get(server.url + "/health")
        assert answer.status_code == 503 and "being loaded" in answer.json()["error"]["message"]
        assert get(server.url + "/placement").json()["live"] is None
        assert get(server.url + "/placement.html").status_code == 200


def test_a_client_that_goes_ends_its_request_there_too(served):
    began, ended = served.stub.folder / "slow-began", served.stub.folder / "slow-ended"
    with socket.create_connection((served.host, served.port), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(began.exists)
    until(lambda: ended.exists() and ended.read_text(encoding="utf-8"))
    assert ended.read_text(encoding="utf-8") == "True"


def test_no_request_is_held_until_the_garbage_collection(served):
    """In a server with much else in memory that comes after thousands of requests. Answered, and given up."""
    stream = {"json": {"messages": [], "stream": True}, "timeout": PATIENCE_S}

    def n_held():
        return sum(isinstance(one, Request | Response | Answer) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert post(served, "/echo", content=b"x" * 1000).status_code == 200
            with httpx.stream("POST", served.url + "/v1/chat/completions", **stream) as answer:
                assert next(answer.iter_raw())
        until(lambda: not n_held())
    finally:
        gc.enable()


def test_a_client_that_goes_while_much_is_sent_to_it_is_not_told_of(served, caplog):
    async def run():
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        theirs.close()
        for _ in range(10):
            transport.write(b"a part")
        transport.close()

    asyncio.run(run())
    assert "socket.send()" not in caplog.text


def test_a_body_that_is_too_long_is_refused_by_its_length_and_by_its_bytes(served, monkeypatch):
    monkeypatch.setattr(served.proxy, "_most_body_bytes", 1000)
    assert post(served, "/echo", content=b"x" * 1000).status_code == 200
    for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
        answer = post(served, "/echo", content=content)
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_does_not_come_is_given_up(served, monkeypatch):
    monkeypatch.setattr(proxy_module, "BODY_S", 0.2)
    assert raw(served, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab").startswith(
        b"HTTP/1.1 408"
    )


def test_headers_that_do_not_come_are_given_up(served, monkeypatch):
    monkeypatch.setattr(server_module, "REQUEST_S", 0.2)
    assert raw(served, b"GET /v1/models HTTP/1.1\r\nHo") == b""
    assert raw(served, b"") == b""


def test_what_is_no_http_is_refused(served):
    assert raw(served, b"\x16\x03\x01\x02\x00\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_what_is_no_http_behind_a_head_ends_the_connection_and_no_more(served, caplog):
    assert raw(served, b"HEAD / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n")
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def raw(server, sent):
    """All that comes back until the connection is closed."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_no_path_reaches_a_file(served):
    for path in ("/../../etc/passwd", "/placement/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
        answer = raw(served, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404"), answer


def test_the_start_page_is_the_placement_where_llama_server_has_none(served):
    answer = get(served.url + "/", follow_redirects=True)
    assert answer.status_code == 200 and answer.url.path == "/placement.html"


def test_the_placement_page_has_a_strict_policy_of_its_own(served):
    answer = get(served.url + "/placement.html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


def test_the_placement_tells_what_was_measured(served):
    told = get(served.url + "/placement").json()
    assert told["live"]["generation"] == {"tokens": 30, "seconds": 1.5, "tokens_per_s": 20.0}
    assert told["live"]["prompt"]["tokens_per_s"] is None
    assert told["state"]["phase"] == "ready"


def test_the_page_follows_a_lost_device(tmp_path):
    stub = Stub(tmp_path)
    with placed_server.running(stub, device="RPC0") as server:
        assert get(server.url + "/placement").json()["device"] == "rpc://127.0.0.1:9"
        stub.order("fail-device")
        os.kill(get(server.url + "/placement").json()["state"]["pid"], signal.SIGKILL)

        def told_of_the_cpu():
            told = get(server.url + "/placement").json()
            return told if told["state"]["phase"] == "ready" and not told["state"]["on_device"] else None

        told = until(told_of_the_cpu)
        assert told["device"] == "none" and {row["on"] for row in told["operators"]} == {"CPU"}
        assert "the device was lost" in told["state"]["said"]
        assert json.dumps(told)  # no NaN


def test_where_there_is_nothing_to_measure_it_is_said(served):
    answer = post(served, "/placement/tune")
    assert answer.status_code == 409 and "nothing to measure" in answer.json()["error"]["message"]
    assert get(served.url + "/placement/tune").status_code == 404
