"""Who may ask the server what: the key, other websites, and how many at once."""

import asyncio
import base64

import httpx
import pytest
from starlette.responses import PlainTextResponse

from oallama.cli.serve import parse_key
from oallama.serve.access import Access, bearer, host_name, is_local, password

KEY = "s3cret-key"


async def app(scope, receive, send):
    await PlainTextResponse("in")(scope, receive, send)


def status(access, path="/v1/models", method="GET", host="127.0.0.1:8080", **headers):
    async def asked():
        transport = httpx.ASGITransport(app=access)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(asked())


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_a_key_opens_and_a_missing_or_wrong_one_does_not():
    access = Access(app, KEY)
    assert status(access, authorization=f"Bearer {KEY}").text == "in"
    assert status(access, authorization=f"bearer {KEY}").text == "in"
    assert status(access, x_api_key=KEY).text == "in"  # Anthropic's clients
    for headers in (
        {},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x_api_key": ""},
    ):
        refused = status(access, **headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "authentication_error"
        assert "Bearer KEY" in refused.json()["error"]["message"]


def test_a_key_in_other_letters_than_ascii_is_compared_too():
    access = Access(app, "schlüssel")
    assert status(access, authorization="Bearer schlüssel".encode()).text == "in"
    assert status(access, authorization="Bearer schlussel").status_code == 401
    assert status(access, "/placement", authorization=basic(":schlüssel")).text == "in"


def test_health_needs_no_key_and_nothing_else_is_like_it():
    access = Access(app, KEY)
    assert status(access, "/health").text == "in"
    assert status(access, "/v1/health").text == "in"
    for path in ("/health/", "//health", "/health/../v1/models", "/metrics", "/slots", "/"):
        assert status(access, path).status_code == 401


@pytest.mark.parametrize(("path", "method"), [("/health", "POST"), ("/v1/health", "GET"), ("/v1/models", "OPTIONS")])
def test_without_the_key_no_body_is_taken(path, method):
    access = Access(app, KEY)
    for headers in ({"content_length": "1"}, {"content_length": "99999999"}, {"transfer_encoding": "chunked"}):
        refused = status(access, path, method, **headers)
        assert refused.status_code == 413 and refused.headers["connection"] == "close"
        assert status(access, path, method, authorization=f"Bearer {KEY}", **headers).text == "in"
        assert status(Access(app, None), path, method, **headers).text == "in"
    assert status(access, path, method, content_length="0").text == "in"
    assert status(access, "/v1/models", "POST", content_length="1").status_code == 401


def test_a_browser_may_send_the_key_as_a_password_to_look_at_the_placement_and_for_nothing_else():
    access = Access(app, KEY)
    for path in ("/placement", "/placement.html"):
        asked = status(access, path)
        assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
        assert status(access, path, authorization=basic(f"anybody:{KEY}")).text == "in"
        assert status(access, path, authorization=basic(f"{KEY}:")).status_code == 401
    # what a browser sends by itself must not start anything
    assert status(access, "/v1/chat/completions", "POST", authorization=basic(f":{KEY}")).status_code == 401
    assert status(access, "/placement", "POST", authorization=basic(f":{KEY}")).status_code == 401


@pytest.mark.parametrize("text", ["", "Basic", "Basic ====", "Basic \xff", basic("no colon"), "Bearer x"])
def test_a_password_that_is_none_is_empty(text):
    assert password(text) == ""


def test_bearer_is_the_text_behind_the_scheme():
    assert (bearer("Bearer a b"), bearer("Bearer  a "), bearer("Basic a"), bearer("")) == ("a b", "a", "", "")


def test_blanks_around_a_key_are_none_of_it():
    assert status(Access(app, parse_key(" k \n")), authorization="Bearer k").text == "in"
    with pytest.raises(ValueError, match="empty"):
        parse_key(" ")


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.9.9.9:1", "[::1]:8080", "x.localhost"])
def test_without_a_key_this_machine_may_ask(host):
    assert status(Access(app, None), host=host).text == "in"


@pytest.mark.parametrize("host", ["evil.example:8080", "192.168.1.2:8080", "127.0.0.1.evil.example", "10.0.0.1"])
def test_without_a_key_a_name_that_a_website_gave_this_machine_is_refused(host):
    refused = status(Access(app, None), host=host)
    assert refused.status_code == 403
    assert "--api-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example", "file://", "http://["]
)
def test_without_a_key_a_website_may_not_ask(origin):
    refused = status(Access(app, None), "/v1/chat/completions", "POST", origin=origin)
    assert refused.status_code == 403
    assert status(Access(app, KEY), origin=origin, authorization=f"Bearer {KEY}").text == "in"


def test_without_a_key_a_page_of_this_machine_may_ask():
    assert status(Access(app, None), origin="http://localhost:3000").text == "in"


def test_no_more_requests_than_the_limit_and_all_again_later():
    async def asked():
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            begun.set()
            await go_on.wait()
            await app(scope, receive, send)

        access = Access(slow, None, most_requests=1)
        transport = httpx.ASGITransport(app=access)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.create_task(client.get("/v1/models"))
            await begun.wait()
            second = await client.get("/v1/models")
            health = asyncio.create_task(client.get("/health"))
            await asyncio.sleep(0)
            go_on.set()
            third = await client.get("/v1/models") if (await first).status_code == 200 else None
            return (await first).status_code, second, (await health).status_code, third

    first, second, health, third = asyncio.run(asked())
    assert (first, health, third.status_code) == (200, 200, 200)
    assert second.status_code == 503 and second.headers["retry-after"] == "1"
    assert second.json()["error"]["type"] == "unavailable_error"


def test_what_strangers_may_ask_takes_no_place_from_those_with_the_key():
    async def asked():
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            if scope["path"] == "/health" or scope["method"] == "OPTIONS":
                begun.set()
                await go_on.wait()
            await app(scope, receive, send)

        transport = httpx.ASGITransport(app=Access(slow, KEY, most_requests=1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            waiting = []
            for method, path in (("GET", "/health"), ("POST", "/health"), ("OPTIONS", "/v1/models")):
                begun.clear()
                waiting.append(asyncio.create_task(client.request(method, path)))
                await begun.wait()
            with_key = await client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
            go_on.set()
            return with_key.status_code, [(await each).status_code for each in waiting]

    assert asyncio.run(asyncio.wait_for(asked(), 60)) == (200, [200, 200, 200])


@pytest.mark.parametrize(
    ("name", "local"),
    [("localhost", True), ("::1", True), ("127.0.0.53", True), ("0.0.0.0", False), ("::", False), ("", False)],
)
def test_local_names(name, local):
    assert is_local(name) is local


def test_a_host_header_that_is_none_has_no_name():
    assert host_name("[::1") == ""
    assert host_name("") == ""
