"""`oallama serve` as a user starts it: over a stand-in for llama-server, and over llama-server where it is built."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.stock import NO_PROGRAMS, PROGRAMS, free_port, needs_programs, program
from e2e.stock_plans import split_plan
from e2e.stub import stub_program
from gguf_factory import write_llama_shape
from gguf_factory.projector import write_projector
from processes import PATIENCE_S, here, until

from ggml_bridge.library import find_plugin
from oallama.core.types import Workload
from oallama.placer import Placer
from oallama.profile.store import profile_to_json
from oallama.stores.default_model import FILE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / FILE
START_S = 120.0
get = functools.partial(httpx.get, timeout=PATIENCE_S)
post = functools.partial(httpx.post, timeout=PATIENCE_S)


@pytest.fixture
def stub(tmp_path: Path) -> str:
    return str(stub_program(tmp_path))


class Serving:
    """A running `oallama serve`. url, page: where llama-server listens, and where the placement is told."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.url = self.page = ""

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> None:
        """Until it says where it serves."""
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"serving at (http://\S+)/v1, placement at (http://\S+);", self.said)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        self.url, self.page = found[1], found[2]

    def placement(self) -> dict[str, Any]:
        told: dict[str, Any] = get(f"{self.page}/placement").json()
        return told

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.placement()["state"]
        return state

    def until(self, condition: Any) -> dict[str, Any]:
        deadline = time.monotonic() + START_S
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, (state, self.said)
            time.sleep(0.05)
        return state

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S)


@contextlib.contextmanager
def serving(tmp_path: Path, server: str, *options: object, model: Path = MODEL, **settings: str) -> Iterator[Serving]:
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "oallama", "serve", str(model), "--port", "0", "--llama-server", server]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *map(str, options)], cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **settings}
        )
        try:
            made = Serving(process, log)
            made.wait()
            yield made
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_S)


def refused(*options: object, code: int = 2) -> str:
    """The one line that it says instead."""
    said = here("serve", MODEL, *options, code=code).stderr
    assert len(said.splitlines()) == 1
    return said


#
# without llama-server
#


def test_what_cannot_be_served_is_one_sentence(stub: str, tmp_path: Path) -> None:
    asked = ("--llama-server", stub)
    assert "--api-key" in refused("--host", "0.0.0.0", *asked)
    assert "empty" in refused("--host", "0.0.0.0", "--api-key", "", *asked)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("--port", port, *asked, code=1)
    assert f"127.0.0.1:{port}" in said and "--port" in said
    refused("--host", "no.such.host.invalid", *asked)
    assert "oallama setup" in refused("--port", 0, "--llama-server", tmp_path / "llama-server", code=1)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\n", encoding="utf-8")
    other.chmod(0o755)
    assert "ggml" in refused("--port", 0, "--llama-server", other, code=1)
    for device in ("emulated:scale=1", "cpu-pair"):
        assert f"no device {device.partition(':')[0]}" in refused("--port", 0, *asked, "--device", device)


def test_the_key_is_llama_servers_and_on_no_command_line(stub: str, tmp_path: Path) -> None:
    port = free_port()
    asked = ("--device", "none", "--host", "0.0.0.0", "--placement-port", port)
    with serving(tmp_path, stub, *asked, OALLAMA_API_KEY="s3cret") as server:
        assert server.client("s3cret").models.list().data[0].id == FILE
        with pytest.raises(openai.AuthenticationError):
            server.client("other").models.list()
        told = server.placement()
        assert told["live"]["generation"]["tokens"] == 30  # we ask with the key
        assert "s3cret" not in str(psutil.Process(told["state"]["pid"]).cmdline())
        assert server.page == f"http://127.0.0.1:{port}"


def test_a_plan_of_slices_alone_has_its_device(stub: str, tmp_path: Path) -> None:
    """Though no layer is on it."""
    split_plan(tmp_path / "plan.json", "rpc-worker", slices_only=True)
    with serving(tmp_path, stub, "--plan", tmp_path / "plan.json") as server:
        assert server.state()["on_device"]
        assert server.placement()["device"].startswith("rpc://127.0.0.1:")


def test_a_plan_is_served_with_the_context_that_is_asked_for(stub: str, tmp_path: Path) -> None:
    Placer.load(MODEL, device="none", threads=1).plan(
        "cpu", workload=Workload(n_prompt=32, n_gen=8, n_ctx=256), measure=False
    ).save(tmp_path / "plan.json")
    asked = ("--plan", tmp_path / "plan.json", "-c", 512, "-ub", 64, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
    with serving(tmp_path, stub, *asked) as server:
        words = psutil.Process(server.state()["pid"]).cmdline()
    told = {option: words[words.index(option) + 1] for option in ("-c", "-ub", "-fa", "-ctk", "-ctv")}
    assert told == {"-c": "512", "-ub": "64", "-fa": "on", "-ctk": "q8_0", "-ctv": "q8_0"}


def test_it_says_what_tuning_is_predicted_to_gain(stub: str, tmp_path: Path) -> None:
    """Where the machine was measured, and nothing against stock llama.cpp."""
    model, profile = write_llama_shape(tmp_path / "model.gguf", 2, 256, 512, 4, 2, 300), tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_to_json(slow_cpu_fast_card(model, 1e9))), encoding="utf-8")
    asked = ("--device", "rpc-worker:1", "--vram", "1GiB", "-t", "1", "--profile", profile)
    with serving(tmp_path, stub, *asked, model=model, OALLAMA_CACHE_DIR=str(tmp_path / "cache")) as server:
        first = server.said.splitlines()[0]
    assert re.search(
        r"stock llama.cpp's own placement; (another one is predicted to be at most \S+ times|no other)", first
    )
    assert f": `oallama tune {model} --device rpc-worker:1 --vram 1024MiB -t 1 -p " in first
    assert first.endswith("`, or --tune before")


def test_a_model_of_a_hostile_name_is_escaped(stub: str, tmp_path: Path) -> None:
    own, name = b"oallama stories", b"<img src=a>'\"/>"
    assert len(own) == len(name) and own in MODEL.read_bytes()
    hostile = tmp_path / "<b onload=alert(1)>'\".gguf"
    hostile.write_bytes(MODEL.read_bytes().replace(own, name))
    with serving(tmp_path, stub, "--device", "none", model=hostile) as server:
        page = get(server.page).text
        assert "<img" not in page and "<b " not in page and "&lt;img src=a&gt;" in page
        assert server.client().models.list().data[0].id == hostile.name


#
# with llama-server
#


@pytest.fixture(scope="module")
def on_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if PROGRAMS is None:
        pytest.skip(NO_PROGRAMS)
    folder = tmp_path_factory.mktemp("serve")
    with serving(
        folder, program("llama-server"), "--device", "rpc-worker", "-c", "512", "-n", "64", "-p", "64"
    ) as server:
        yield server


def test_openais_client_chats_streams_completes_and_embeds(on_worker: Serving) -> None:
    client = on_worker.client()
    asked: dict[str, Any] = {"model": FILE, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(prompt="Once upon a time", **asked).choices[0].text
    parts = client.completions.create(prompt="Once upon a time", stream=True, **asked)
    assert whole and "".join(part.choices[0].text for part in parts) == whole
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "A story"}], **asked)
    assert chat.choices[0].message.content
    vectors = client.embeddings.create(model=FILE, input=["a brave duck", "a brave duck", "the end"]).data
    assert vectors[0].embedding == pytest.approx(vectors[1].embedding, abs=1e-3)
    assert vectors[0].embedding != pytest.approx(vectors[2].embedding, abs=1e-3)


@pytest.mark.thorough
def test_many_requests_one_after_another_leave_it_as_it_was(on_worker: Serving) -> None:
    """Of four clients at once; whatever is held grows with the first of them."""
    asked: dict[str, Any] = {"model": FILE, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    pid = on_worker.state()["pid"]

    def one(_: int) -> str:
        return on_worker.client().completions.create(**asked).choices[0].text

    def answered(n: int) -> int:
        with ThreadPoolExecutor(4) as clients:
            assert all(clients.map(one, range(n)))
        return int(psutil.Process(pid).memory_info().rss)

    before, after = answered(40), answered(400)
    state = on_worker.state()
    assert (state["pid"], state["phase"], state["restarts"]) == (pid, "ready", 0)
    assert after - before < 32 << 20


@pytest.mark.parametrize(("origin", "allowed"), [("http://localhost:5173", True), ("https://evil.com", False)])
def test_a_page_of_another_origin_may_not_read(on_worker: Serving, origin: str, allowed: bool) -> None:
    for answer in (
        get(f"{on_worker.url}/v1/models", headers={"Origin": origin}),
        httpx.options(f"{on_worker.url}/v1/chat/completions", headers={"Origin": origin}, timeout=PATIENCE_S),
    ):
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)


def test_the_placement_tells_what_was_measured(on_worker: Serving) -> None:
    client = on_worker.client()
    client.completions.create(model=FILE, prompt="Once upon a time", max_tokens=8)
    told = on_worker.placement()
    assert told["live"]["generation"]["tokens"] >= 8 and told["live"]["generation"]["tokens_per_s"] > 0
    assert told["device"].startswith("rpc://127.0.0.1:") and told["state"]["on_device"]
    assert {row["on"] for row in told["operators"]} <= {"CPU", "GPU", "both"}
    assert get(on_worker.page).headers["Content-Security-Policy"]
    assert get(f"{on_worker.page}/placement", headers={"Host": "evil.com"}).status_code == 403


def picture() -> str:
    """A small grey PNG as a data URL."""
    rows = b"".join(b"\0" + bytes([90]) * 56 for _ in range(56))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 56, 56, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@pytest.mark.thorough
@needs_programs
@pytest.mark.parametrize(("device", "asked", "side"), [
    ("none", (), "on the CPU"),
    ("rpc-worker:1", (), "on the device, as the plan leaves"),
    ("rpc-worker:1", ("--mmproj-offload",), "on the device, kept free there"),
    ("rpc-worker:1", ("--no-mmproj-offload",), "on the CPU"),
])  # fmt: skip
def test_a_picture_is_taken_where_a_projector_is_given(
    tmp_path: Path, device: str, asked: tuple[str, ...], side: str
) -> None:
    path = write_projector(tmp_path / "mmproj.gguf")
    options = ("--device", device, "--mmproj", path, *asked)
    with serving(tmp_path, program("llama-server"), *options) as server:
        assert f"to encode a picture of 56 x 56 in, {side}" in server.said
        notes = server.placement()["plan"]["notes"]
        assert side in notes[-1]
        content = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "What is it?"}]
        answer = server.client().chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": content}],  # type: ignore[arg-type, misc, list-item]
            max_tokens=2,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens > 16  # a token for each patch
        words = psutil.Process(server.state()["pid"]).cmdline()
        assert ("--mmproj-offload" in words, "--no-mmproj-offload" in words) == ("device" in side, "CPU" in side)


@needs_programs
def test_a_plan_that_splits_operators_is_served_in_the_plug_in_and_without_its_device_on_the_cpu(
    tmp_path: Path,
) -> None:
    plan = tmp_path / "plan.json"
    split_plan(plan, "rpc-worker")
    with serving(tmp_path, program("llama-server"), "--plan", plan, "--log", tmp_path / "log") as server:
        asked: dict[str, Any] = {"model": FILE, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        split = server.client().completions.create(**asked).choices[0].text
        until(lambda: any(row["measured"] for row in server.placement()["operators"]))
        told = server.placement()
        blocks = [row for row in told["operators"] if row["measured"]]
        assert {row["role"] for row in blocks} == {"ffn_gate"} and len(blocks) == told["model"]["n_layer"]
        for time in blocks[0]["measured"]:
            parts = time["cpu_s"] + time["wait_s"] + time["other_s"]
            assert 0 < time["seconds"] == pytest.approx(parts)
        assert sum(row["on"] == "both" for row in told["operators"]) == 3 * told["model"]["n_layer"]
        mapped = {Path(each.path).name for each in psutil.Process(told["state"]["pid"]).memory_maps()}
        assert find_plugin().name in mapped
        os.kill(server.state()["pid"], signal.SIGKILL)  # its worker lives on and serves the next
        server.until(lambda state: state["restarts"] == 1 and state["phase"] == "ready")
        assert server.state()["on_device"]
        assert server.client().completions.create(**asked).choices[0].text == split
        children = psutil.Process(server.process.pid).children()
        next(child for child in children if "ggml_bridge.rpc_server" in child.cmdline()).kill()
        server.until(lambda state: not state["on_device"] and state["phase"] == "ready")
        assert server.client().completions.create(**asked).choices[0].text == split
