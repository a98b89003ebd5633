"""Where llama-server may listen, and the placement page over a real port."""

import http.client
import socket

import pytest

from oallama.cli.serve import parse_key
from oallama.core.errors import DeviceError, UsageError
from oallama.serve.address import Address, free_address, host_name, is_local
from oallama.serve.placement import placement_server


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost:8080", True), ("LOCALHOST", True), ("a.localhost", True), ("127.8.9.1:1", True), ("[::1]:80", True),
        ("", False), ("localhost.evil.com", False), ("evil.com", False), ("0.0.0.0", False), ("192.168.0.1", False),
        ("[::1", False), ("[", False), ("127.0.0.1.nip.io", False),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_local(host, local):
    assert is_local(host_name(host)) == local


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(UsageError, match="--api-key"):
        free_address(host, 0, None)
    assert free_address(host, 0, "k").url.startswith(("http://127.0.0.1:", "http://[::1]:"))


def test_a_port_that_is_free_is_chosen_and_one_in_use_refused():
    chosen = free_address("localhost", 0, None)
    assert is_local(chosen.host) and chosen.port > 0
    taken = rf"127.0.0.1:{chosen.port}.*--port"
    with socket.create_server(("127.0.0.1", chosen.port)), pytest.raises(DeviceError, match=taken):
        free_address("127.0.0.1", chosen.port, None)
    with pytest.raises(UsageError, match="is no address"):
        free_address("no.such.host.invalid", 0, None)


def test_nobody_who_answers_is_none():
    assert free_address("127.0.0.1", 0, None).get("/health", 1.0) is None


def test_a_key_is_one_key_of_llama_servers():
    assert parse_key(" a b ") == "a b"
    for text in ("", " ", "a,b", 'a"b'):
        with pytest.raises(ValueError, match="the API key"):
            parse_key(text)


@pytest.fixture(scope="module")
def page():
    with placement_server(lambda: {"a": 1}, lambda: ("<p>é", "default-src 'none'")) as url:
        yield Address("127.0.0.1", int(url.rsplit(":", 1)[1]))


def asked(page, method, path, host="localhost"):
    connection = http.client.HTTPConnection(page.host, page.port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_the_page_and_its_numbers_are_answered(page):
    status, headers, text = asked(page, "GET", "/")
    assert (status, text, headers["Content-Security-Policy"]) == (200, "<p>é", "default-src 'none'")
    status, headers, text = asked(page, "GET", "/placement?x=1")
    assert (status, text, headers["Content-Type"]) == (200, '{"a": 1}', "application/json")
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.com", f"evil.com:{80}", "", "192.168.0.1"])
def test_a_website_that_gives_this_address_a_name_is_refused(page, host):
    assert asked(page, "GET", "/placement", host)[0] == 403


def test_it_only_tells(page):
    assert asked(page, "GET", "/other")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(page, method, "/placement")[0] == 501
