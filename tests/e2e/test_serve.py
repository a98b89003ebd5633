"""`oallama serve` as a user starts it: over a stand-in for llama-server, and over llama-server where it is built."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from e2e.described_card import profile_file, slow_cpu_fast_card
from e2e.forced import written
from e2e.stock import NO_PROGRAMS, PROGRAMS, free_port, needs_programs, program
from e2e.stock_plans import split_plan
from e2e.stub import stub_program
from gguf_factory import write_llama_shape
from gguf_factory.projector import write_projector
from processes import COMMAND, PATIENCE_S, ROOT, here, until
from rpc_server import RpcServer

from ggml_bridge.library import find_plugin
from oallama.core.types import Workload
from oallama.placer import Given, Placer
from oallama.stores.default_model import FILE

MODEL = ROOT / "models" / FILE
get = functools.partial(httpx.get, timeout=PATIENCE_S)


@pytest.fixture
def stub(tmp_path: Path) -> str:
    return str(stub_program(tmp_path))


class Serving:
    """A running `oallama serve`. url, page: where llama-server listens, and where the placement is told."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        until(lambda: process.poll() is not None or "serving at" in self.said)
        said = re.search(r"serving at (http://\S+)/v1, placement at (http://\S+);", self.said)
        assert said, self.said
        self.url, self.page = said.groups()

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def placement(self) -> dict[str, Any]:
        return dict(get(f"{self.page}/placement").json())

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.placement["state"])

    def words(self) -> list[str]:
        """The command line of its llama-server."""
        return list(psutil.Process(self.state["pid"]).cmdline())

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S)


@contextlib.contextmanager
def serving(tmp_path: Path, server: str, *options: object, model: Path = MODEL, **settings: str) -> Iterator[Serving]:
    log = tmp_path / "serve.log"
    command = [*COMMAND, "serve", model, "--port", "0", "--llama-server", server, *options]
    environment = {**os.environ, **settings}
    with (
        log.open("wb") as out,
        subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=out, stderr=out, env=environment) as process,
    ):
        try:
            yield Serving(process, log)
        finally:
            process.terminate()


#
# without llama-server
#


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "--api-key"), (("--host", "0.0.0.0", "--api-key", ""), "empty"),
        (("--port", 9, "--placement-port", 9), "--port and --placement-port are both 9; give two ports"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_sentence(stub: str, options: tuple[object, ...], said: str) -> None:
    told = here("serve", MODEL, "--port", 0, "--llama-server", stub, *options, code=2).stderr
    assert said in told and len(told.splitlines()) == 1


def test_the_key_is_llama_servers_and_on_no_command_line(stub: str, tmp_path: Path) -> None:
    port = free_port()
    asked = ("--device", "none", "--host", "0.0.0.0", "--placement-port", port)
    with serving(tmp_path, stub, *asked, OALLAMA_API_KEY="s3cret") as server:
        assert server.client("s3cret").models.list().data[0].id == FILE
        with pytest.raises(openai.AuthenticationError):
            server.client("other").models.list()
        assert server.placement["live"]["generation"]["tokens"] == 30  # we ask with the key
        assert "s3cret" not in str(server.words())
        assert server.page == f"http://127.0.0.1:{port}"


def test_a_plan_of_slices_alone_has_its_device(stub: str, tmp_path: Path) -> None:
    """Though no layer is on it."""
    split_plan(tmp_path / "plan.json", "rpc-worker", slices_only=True)
    with serving(tmp_path, stub, "--plan", tmp_path / "plan.json", "--device", "rpc-worker") as server:
        assert server.state["on_device"] and server.placement["device"].startswith("rpc://127.0.0.1:")


def test_a_plan_is_served_with_the_context_that_is_asked_for(stub: str, tmp_path: Path) -> None:
    Placer.load(MODEL, device="none", threads=1).plan(
        "cpu", workload=Workload(n_prompt=32, n_gen=8, n_ctx=256), measure=False
    ).save(tmp_path / "plan.json")
    asked = ("--plan", tmp_path / "plan.json", "-c", 512, "-ub", 64, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
    with serving(tmp_path, stub, *asked) as server:
        words = server.words()
    told = {option: words[words.index(option) + 1] for option in ("-c", "-ub", "-fa", "-ctk", "-ctv")}
    assert told == {"-c": "512", "-ub": "64", "-fa": "on", "-ctk": "q8_0", "-ctv": "q8_0"}


def test_it_says_what_tuning_is_predicted_to_gain(stub: str, tmp_path: Path) -> None:
    """Where the machine was measured, and nothing against stock llama.cpp."""
    model = write_llama_shape(tmp_path / "model.gguf", 2, 256, 512, 4, 2, 300)
    profile = profile_file(slow_cpu_fast_card(model, 1e9), tmp_path)
    asked = ("--device", "rpc-worker:1", "--vram", "1GiB", "-t", "1", "--profile", profile)
    with serving(tmp_path, stub, *asked, model=model, OALLAMA_CACHE_DIR=str(tmp_path / "cache")) as server:
        first = server.said.splitlines()[0]
    assert re.search(r"using llama.cpp's placement; (another placement may be up to \S+× faster|no other)", first)
    assert f": `oallama tune {model} --device rpc-worker:1 --vram 1024MiB --threads 1 --profile {profile}`" in first
    assert first.endswith("`, or --tune before")


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
    pid = on_worker.state["pid"]

    def one(_: int) -> str:
        return on_worker.client().completions.create(**asked).choices[0].text

    def answered(n: int) -> int:
        with ThreadPoolExecutor(4) as clients:
            assert all(clients.map(one, range(n)))
        return int(psutil.Process(pid).memory_info().rss)

    before, after = answered(40), answered(400)
    state = on_worker.state
    assert (state["pid"], state["status"], state["restarts"]) == (pid, "ready", 0)
    assert after - before < 32 << 20


@pytest.mark.parametrize(("origin", "allowed"), [("http://localhost:5173", True), ("https://evil.com", False)])
def test_a_page_of_another_origin_may_not_read(on_worker: Serving, origin: str, allowed: bool) -> None:
    asked = {"headers": {"Origin": origin}, "timeout": PATIENCE_S}
    for answer in (
        httpx.get(f"{on_worker.url}/v1/models", **asked),
        httpx.options(f"{on_worker.url}/v1/chat", **asked),
    ):
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)


def test_the_placement_tells_what_was_measured(on_worker: Serving) -> None:
    on_worker.client().completions.create(model=FILE, prompt="Once upon a time", max_tokens=8)
    told = on_worker.placement
    assert told["live"]["generation"]["tokens"] >= 8 and told["live"]["generation"]["tokens_per_s"] > 0
    assert told["device"].startswith("rpc://127.0.0.1:") and told["state"]["on_device"]
    assert {row["on"] for row in told["operators"]} <= {"CPU", "GPU", "split"}


PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.mark.thorough
@needs_programs
@pytest.mark.parametrize(("device", "asked", "side"), [
    ("none", (), "on the CPU"),
    ("rpc-worker:1", (), "on the device, as the plan leaves"),
    ("rpc-worker:1", ("--mmproj-offload",), "on the device, in reserved memory"),
    ("rpc-worker:1", ("--no-mmproj-offload",), "on the CPU"),
])  # fmt: skip
def test_a_picture_is_taken_where_a_projector_is_given(
    tmp_path: Path, device: str, asked: tuple[str, ...], side: str
) -> None:
    path = write_projector(tmp_path / "mmproj.gguf")
    options = ("--device", device, "--mmproj", path, *asked)
    with serving(tmp_path, program("llama-server"), *options) as server:
        assert f"to encode a picture of 56 x 56, {side}" in server.said
        assert side in server.placement["plan"]["notes"][-1]
        content = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is it?"}]
        answer = server.client().chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": content}],  # type: ignore[arg-type, misc, list-item]
            max_tokens=2,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens > 16  # a token for each patch
        words = server.words()
        assert ("--mmproj-offload" in words, "--no-mmproj-offload" in words) == ("device" in side, "CPU" in side)


@needs_programs
def test_a_plan_that_splits_operators_is_served_in_the_plug_in_and_without_its_device_on_the_cpu(
    tmp_path: Path,
) -> None:
    plan = tmp_path / "plan.json"
    with RpcServer() as worker, contextlib.ExitStack() as stack:
        device = f"rpc://{worker.endpoint}"
        split_plan(plan, device)
        options = ("--plan", plan, "--device", device, "--log", tmp_path / "log")
        server = stack.enter_context(serving(tmp_path, program("llama-server"), *options))
        asked: dict[str, Any] = {"model": FILE, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        split = server.client().completions.create(**asked).choices[0].text
        until(lambda: any(row["measured"] for row in server.placement["operators"]))
        told = server.placement
        blocks = [row for row in told["operators"] if row["measured"]]
        assert {row["role"] for row in blocks} == {"ffn_gate"} and len(blocks) == told["model"]["n_layer"]
        for time in blocks[0]["measured"]:
            parts = time["cpu_s"] + time["wait_s"] + time["other_s"]
            assert 0 < time["seconds"] == pytest.approx(parts)
        assert sum(row["on"] == "split" for row in told["operators"]) == 3 * told["model"]["n_layer"]
        assert told["back_end"]["usable"] and told["back_end"]["stats"]["n_graphs"] > 0
        mapped = {Path(each.path).name for each in psutil.Process(told["state"]["pid"]).memory_maps()}
        assert find_plugin().name in mapped
        os.kill(server.state["pid"], signal.SIGKILL)  # the RPC server serves the next
        until(lambda: server.state["restarts"] == 1 and server.state["status"] == "ready")
        assert server.state["on_device"]
        assert server.client().completions.create(**asked).choices[0].text == split
        worker.close()
        with contextlib.suppress(openai.APIError):  # which shows that the device is gone
            server.client().completions.create(**asked)
        until(lambda: not server.state["on_device"] and server.state["status"] == "ready")
        assert server.client().completions.create(**asked).choices[0].text == split


@needs_programs
@pytest.mark.thorough  # two starts of llama-server; with its stand-in: tests/unit/test_serve_supervisor.py
def test_an_rpc_server_that_dies_while_it_answers_is_gone_on_without(tmp_path: Path) -> None:
    """One sentence says so. The client whose answer it cost is told by its connection."""
    with RpcServer(threads=1) as worker:
        card = "emulated:rtx3060,vram=2GiB,scale=1,values=real"
        device = f"{card},rpc://{worker.endpoint}"
        placer = Placer.load(MODEL, device=device, threads=1, n_ctx=256)
        for member in placer.members:
            member._profile = slow_cpu_fast_card(MODEL, 1e9)
        n_layer = placer.model.n_layer
        names = [o.name for o in placer.operators if o.layer_in(n_layer) > 0 and o.name != "token_embd.weight"]
        given = Given(names, n_layer, device_layers=(n_layer - 3, 3))
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(placer.plan(given, workload=placer.workload(64, 32, 256)).to_json()))
        options = ("--device", device, "--plan", plan, "-c", 256, "-t", 1)
        with serving(tmp_path, program("llama-server"), *options) as server:
            asked: dict[str, Any] = {"model": FILE, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
            before = server.client().completions.create(**asked).choices[0].text
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
                for _ in server.client().completions.create(**{**asked, "max_tokens": 200}, stream=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        psutil.Process(worker.pid).kill()
            until(lambda: server.state["device_lost"] and server.state["status"] == "ready")
            told = [line for line in server.said.splitlines() if "llama-server" in line or "lost" in line]
            assert len(told) == 1 and f"cannot reach an RPC server at {worker.endpoint}" in told[0], server.said
            assert server.state["restarts"] == 1 and "--rpc" not in server.words()
            assert server.client().completions.create(**asked).choices[0].text == before


@needs_programs
def test_a_plan_is_served_beside_the_emulated_card_which_says_how_it_kept_time(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    split_plan(plan, "emulated:rtx3060-12,vram=64MiB,scale=9,values=real,fail_alloc=7")
    with serving(tmp_path, program("llama-server"), "--plan", plan) as server:
        assert re.search(r"warning: not as planned: Emulated0 has no room for \d+ bytes of weights", server.said)
        asked: dict[str, Any] = {"model": FILE, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        assert server.client().completions.create(**asked).choices[0].text
        until(lambda: server.placement["back_end"]["emulated"]["bytes_in"] > 0)
        assert server.placement["back_end"]["emulated"]["late_s"] >= 0


@needs_programs
def test_experts_of_a_model_on_the_cpu_are_counted(tmp_path: Path, models: Path) -> None:
    model = written(models, "llama-moe", n_expert_used=2)
    options = ("--device", "none", "--count-experts", "-c", 256, "-p", 64, "-n", 32)
    with serving(tmp_path, program("llama-server"), *options, model=model, OALLAMA_CACHE_DIR=str(tmp_path)) as server:
        server.client().completions.create(model="any", prompt=list(range(5, 45)), max_tokens=6)
        server.process.terminate()
        server.process.wait(PATIENCE_S)
    (file,) = tmp_path.glob("routing-*.json")
    counts = json.loads(file.read_text(encoding="utf-8"))
    assert counts["prompt"][0]["n_tokens"] >= 40 and counts["decode"][0]["n_tokens"] >= 5
