"""llama-server: how it is found and started, where it may listen, what it and its plug-in tell, the placement page."""

import http.client
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import placement_records as records
import pytest
from worlds import placed, some_plan, weight

from ggml_bridge.library import library_folder, soname
from oallama.cli.serve import parse_key
from oallama.core.errors import BridgeError, DeviceError, UsageError
from oallama.run.address import Address, host_name, is_local, reserved_address
from oallama.run.program import (
    ServerSettings,
    clean_environment,
    find_program,
    launch,
    prompt_cache_mib,
    served_plan,
)
from oallama.serve.live import live_of
from oallama.serve.placement_server import placement_server

# ---- found and started


def program(folder, with_ggml=True):
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "llama-server"
    made.write_text("#!/bin/sh\n", encoding="utf-8")
    made.chmod(0o755)
    base = folder / soname("ggml-base")
    if with_ggml and not base.exists():
        base.symlink_to(library_folder() / soname("ggml-base"))
    return made


def test_what_set_up_put_beside_the_libraries_is_used_before_that_of_path(tmp_path, monkeypatch):
    program(tmp_path / "lib").unlink()
    monkeypatch.setattr("oallama.run.program.library_folder", lambda: tmp_path / "lib")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(BridgeError, match=r"neither beside llama\.cpp's libraries nor on PATH; `oallama setup` builds"):
        find_program(None)
    on_path = program(tmp_path / "path")
    assert find_program(None) == on_path
    beside = program(tmp_path / "lib")
    assert find_program(None) == beside
    asked = program(tmp_path / "bin")
    assert find_program(str(asked)) == asked
    with pytest.raises(BridgeError, match="no program"):
        find_program(str(tmp_path / "nothing"))
    with pytest.raises(BridgeError, match="has no ggml beside it, but plans need "):
        find_program(str(program(tmp_path / "of" / "old", with_ggml=False)))


SETTINGS = ServerSettings(
    Address("127.0.0.1", 8080), n_parallel=4, threads=2, n_batch=None, name="m.gguf", pooling="mean"
)
SPLIT = records.served()
WHOLE = replace(SPLIT.plan, operators=tuple(p if p.gg in (0, 1) else replace(p, gg=0.0, cg=0.0, cc=1.0)
                                            for p in SPLIT.plan.operators))  # fmt: skip


def test_a_plan_that_only_streams_for_prompts_keeps_its_device():
    on_cpu = replace(WHOLE, n_gpu_layers=0, operators=tuple(replace(p, gg=0.0, cc=1.0) for p in WHOLE.operators))
    streams = replace(on_cpu, token_assignment=((64, 0), (512, 256)))
    assert served_plan(on_cpu, SPLIT.operators, "CUDA0")[0].device == "none"
    assert served_plan(streams, SPLIT.operators, "CUDA0")[0].device == "CUDA0"


def launched(folder, plan=WHOLE, environment=None, counts=False, program="/opt/llama-server", **settings):
    names = [operator.name for operator in SPLIT.operators]
    return launch(
        Path(program), plan, SPLIT.operators, SPLIT.model.n_layer, names, replace(SETTINGS, **settings),
        folder, {"HOME": "/h", **(environment or {})}, counts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "has", "has_not"),
    [
        ({}, "--host 127.0.0.1 --port 8080 --cors-origins localhost", "--cache-ram"),
        ({}, "--parallel 4 --kv-unified --threads 2 --metrics --alias m.gguf", "--mmproj"),
        ({}, f"--embeddings --batch-size {WHOLE.workload.n_ubatch} --pooling mean", None),  # it would lower it anyway
        ({"pooling": "model"}, "--embeddings", "--pooling"),
        ({"pooling": None, "n_batch": 1024}, "--batch-size 1024", "--embeddings"),
        ({"cache_mib": 100}, "--cache-ram 100", "--ctx-checkpoints"),
        ({"reuses_prefix": False}, "--ctx-checkpoints 0", None),
        ({"projector": "/p.gguf", "projector_on_device": True}, "--mmproj /p.gguf --mmproj-offload", None),
        ({"projector": "/p.gguf"}, "--mmproj /p.gguf --no-mmproj-offload", "--mmproj-offload"),
        ({"address": Address("0.0.0.0", 1, "s3cret")}, "--host 0.0.0.0 --port 1", "s3cret"),
    ],
)
def test_it_is_started_with_the_plan_as_asked_for(tmp_path, settings, has, has_not):
    words = " ".join(launched(tmp_path, **settings).command) + " "
    assert words.startswith("/opt/llama-server ") and f" {has} " in words
    assert has_not is None or f" {has_not} " not in words
    for part in (f"-m {WHOLE.model_path}", "--rpc 127.0.0.1:9", "--device RPC0", "-c 512", "--fit off"):
        assert f" {part} " in words


def test_a_prompt_is_read_in_batches_that_somebody_who_leaves_can_wait_for(tmp_path):
    """llama-server looks up only between batches: of a micro-batch, and of few tokens on the CPU alone."""
    workload = replace(WHOLE.workload, n_ubatch=256)
    on_card = launched(tmp_path, replace(WHOLE, workload=workload), pooling=None).command
    on_cpu = launched(tmp_path, replace(WHOLE, workload=workload, device="none", n_gpu_layers=0), pooling=None).command
    assert [words[words.index("--batch-size") + 1] for words in (on_card, on_cpu)] == ["256", "64"]


def test_the_key_is_told_to_it_alone_and_variables_behind_our_back_to_nobody(tmp_path):
    keys = {"OALLAMA_API_KEY": "other", "LLAMA_API_KEY": "other"}
    assert launched(tmp_path, environment=keys).environment.keys() & keys.keys() == set()
    made = launched(tmp_path, environment=keys, address=Address("0.0.0.0", 1, "s3cret")).environment
    assert made["LLAMA_API_KEY"] == "s3cret" and "OALLAMA_API_KEY" not in made
    behind = ("LLAMA_ARG_PORT", "LLAMA_API_KEY", "OALLAMA_API_KEY", "GGML_BACKEND_PATH", "OALLAMA_PLAN",
              "OALLAMA_EXTRA_BACKENDS", "OALLAMA_EMULATED", "OALLAMA_REPORT", "AIP_MODE",
              "MTMD_BACKEND_DEVICE")  # fmt: skip
    kept = {"HOME": "/h", "LLAMA_CPP_LIB_PATH": "/kept"}
    assert clean_environment({**kept, **dict.fromkeys(behind, "x")}) == {**kept, "GGML_NO_BACKTRACE": "1"}


def test_a_plan_that_splits_is_written_for_the_plug_in(tmp_path):
    made = launched(tmp_path, SPLIT.plan)
    assert made.environment["OALLAMA_PLAN"] == str(tmp_path / "plan.oallama")
    assert made.environment["OALLAMA_REPORT"] == str(tmp_path / "report-%p.json")
    assert "libggml-oallama" in made.environment["GGML_BACKEND_PATH"]
    assert (tmp_path / "plan.oallama").read_text(encoding="utf-8").startswith("oallama-plan 1\n")
    assert "OALLAMA_REPORT" not in launched(tmp_path).environment, "stock llama.cpp runs it alone"


def test_a_back_end_of_the_users_is_loaded_by_ours_where_that_is_needed(tmp_path):
    own, ours = ({"GGML_BACKEND_PATH": f"/opt/libggml-{name}.so"} for name in ("mine", "oallama"))
    assert launched(tmp_path, environment=own).environment["GGML_BACKEND_PATH"] == "/opt/libggml-mine.so"
    both = launched(tmp_path, SPLIT.plan, environment=own).environment
    assert "libggml-oallama" in both["GGML_BACKEND_PATH"] and both["OALLAMA_EXTRA_BACKENDS"] == "/opt/libggml-mine.so"
    assert "GGML_BACKEND_PATH" not in launched(tmp_path, environment=ours).environment


def test_the_emulated_card_is_a_back_end_that_the_plug_in_loads(tmp_path):
    card = "emulated:rtx3060-12,vram=64MiB,scale=9,values=real"
    made = launched(tmp_path, replace(WHOLE, device=card))
    assert "libggml-emulated" in made.environment["OALLAMA_EXTRA_BACKENDS"] and made.uses_device
    assert "memory_bytes 67108864" in Path(made.environment["OALLAMA_EMULATED"]).read_text(encoding="utf-8")
    assert "OALLAMA_REPORT" in made.environment, "which says how well it kept time"
    both = launched(tmp_path, replace(WHOLE, device=card), {"GGML_BACKEND_PATH": "/opt/libggml-mine.so"}).environment
    assert both["OALLAMA_EXTRA_BACKENDS"] == f"/opt/libggml-mine.so:{made.environment['OALLAMA_EXTRA_BACKENDS']}"


def test_experts_on_the_host_are_the_plug_ins_where_their_uses_are_counted(tmp_path):
    experts = weight(role="ffn_up_exps", k=256, n=256, layer=0, n_expert=8, used=2)
    plan = some_plan([placed(experts.name)], device="none")

    def of(counts):
        made = launch(Path("/opt/llama-server"), plan, [experts], 1, [experts.name], SETTINGS, tmp_path, {}, counts)
        return " ".join(made.command), made.environment

    command, environment = of(counts=True)
    assert "ffn_up_exps\\.weight$=OALLAMA_Split" in command and "OALLAMA_REPORT" in environment
    text = (tmp_path / "plan.oallama").read_text(encoding="utf-8")
    assert "\ncount 1\n" in text and "device" not in text
    command, environment = of(counts=False)
    assert "OALLAMA_Split" not in command and "OALLAMA_REPORT" not in environment


@pytest.mark.parametrize(("left", "mib"), [(2**40, 8192), (8192 * 2**20 - 1, 8191), (5 * 2**20, 5), (0, 0)])
def test_the_prompt_cache_takes_no_more_than_is_left(left, mib):
    assert prompt_cache_mib(left) == mib


# ---- what it tells


def test_live_numbers_are_read_out_of_the_metrics_and_what_is_not_told_is_nothing():
    text = (
        "# HELP llamacpp:prompt_tokens_total x\n# TYPE llamacpp:prompt_tokens_total counter\n"
        "llamacpp:prompt_tokens_total 100\nllamacpp:prompt_seconds_total 0.5\nllamacpp:tokens_predicted_total 0\n"
        "llamacpp:tokens_predicted_seconds_total 0\nllamacpp:prompt_tokens_cached_total 7\n"
        "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    )
    nothing = {"tokens": 0, "seconds": 0.0, "tokens_per_s": None}
    assert live_of(text) == {
        "prompt": {"tokens": 100, "seconds": 0.5, "tokens_per_s": 200.0},
        "generation": nothing, "prompt_tokens_cached": 7, "processing": 2, "waiting": 1,
    }  # fmt: skip
    for text in ("", "llamacpp:prompt_tokens_total nan\n", "llamacpp:requests_processing -inf\n", "\x00"):
        assert live_of(text) == {
            "prompt": nothing, "generation": nothing, "prompt_tokens_cached": 0, "processing": 0, "waiting": 0
        }  # fmt: skip


# ---- where it may listen


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


def test_a_port_that_is_free_is_chosen_and_an_address_that_others_reach_needs_a_key():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(UsageError, match="--api-key"), reserved_address(host, 0, None):
            pass
        with reserved_address(host, 0, "k") as chosen:
            assert chosen.url.startswith(("http://127.0.0.1:", "http://[::1]:"))
    with reserved_address("localhost", 0, None) as chosen:
        assert is_local(chosen.host) and chosen.port > 0
        assert not chosen.is_healthy(os.getpid(), 1.0), "nobody answers"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((chosen.host, chosen.port))
        taken = rf"127.0.0.1:{chosen.port}.*--port"
        with (
            socket.create_server((chosen.host, chosen.port)),  # as llama-server may
            pytest.raises(DeviceError, match=taken),
            reserved_address("127.0.0.1", chosen.port, None),
        ):
            pass
    with pytest.raises(UsageError, match="is not an address"), reserved_address("no.such.host.invalid", 0, None):
        pass


@pytest.fixture
def heard():
    """(address, keys): a server of this process at an address with a key, and what requests bring as theirs."""
    keys = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            keys.append((self.path, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"answer")

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        def get_request(self):
            keys.append("connected")
            return super().get_request()

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Address("127.0.0.1", server.server_port, "s3cret"), keys
        server.shutdown()


def test_the_key_is_sent_for_numbers_alone_and_to_the_process_that_is_meant(heard):
    address, keys = heard
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert not address.is_healthy(other.pid, 1.0) and address.metrics(other.pid, 1.0) is None
        assert not keys, "a stranger at the port is not even connected to"
        other.communicate(b"\n")
    assert address.is_healthy(os.getpid(), 60.0) and address.metrics(os.getpid(), 60.0) == "answer"
    asked = [key for key in keys if key != "connected"]
    assert asked == [("/health", None), ("/metrics", "Bearer s3cret")]


def test_a_connection_that_another_process_may_have_taken_brings_no_key(heard, monkeypatch):
    """It ended between the question and the connection, and another may have the port by then."""
    address, keys = heard
    found = iter([True, False])
    monkeypatch.setattr("oallama.run.address.listens", lambda pid, port: next(found))
    assert address.metrics(os.getpid(), 60.0) is None
    assert not [key for key in keys if key != "connected"]


def test_a_key_is_one_key_of_llama_servers():
    assert parse_key(" a b ") == "a b"
    for text in ("", " ", "a,b", 'a"b'):
        with pytest.raises(ValueError, match="the API key"):
            parse_key(text)


# ---- the placement page


@pytest.fixture(scope="module")
def ask():
    """(method, path, Host header) -> (status, headers, text) of the page."""
    with placement_server(lambda: {"a": 1}, lambda: ("<p>é", "default-src 'none'")) as url:

        def asked(method, path, host="localhost"):
            connection = http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1]), timeout=60)
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

        yield asked


def test_the_page_and_its_numbers_are_told_and_nothing_else(ask):
    status, headers, text = ask("GET", "/")
    assert (status, text, headers["Content-Security-Policy"]) == (200, "<p>é", "default-src 'none'")
    status, headers, text = ask("GET", "/placement?x=1")
    assert (status, text, headers["Content-Type"]) == (200, '{"a": 1}', "application/json")
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers
    assert ask("GET", "/other")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(method, "/placement")[0] == 501


@pytest.mark.parametrize("host", ["evil.com", f"evil.com:{80}", "", "192.168.0.1"])
def test_a_website_that_gives_this_address_a_name_is_refused(ask, host):
    assert ask("GET", "/placement", host)[0] == 403
