"""A device that goes, or hangs: each command and each call from Python ends in one sentence and exit code 1, whether
the command itself uses the device or a child does."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.cut_proxy import CutProxy
from e2e.faults import Place
from gguf_factory import write_gguf
from seeds import ALL, SEED

from ggml_bridge.rpc import RpcServer
from oallama.device.native_abort import RPC_SILENCE_S, sentence_of

PLACED = "--temp 0 -t 1 --profile {profile} --policy layers"
COMMANDS = {
    "profile": "profile {model} -t 1 --tokens 1 --json",
    "plan": "plan {model} -t 1 -p 16 -n 4 --profile {profile} --policy oato -o plan.json",
    "run": f"run {{model}} -p hi -n 4 {PLACED}",
    "chat": f"chat {{model}} -n 4 {PLACED}",
    "bench": "bench {model} -t 1 --arms stock-ngl,layers --profile {profile} -p 8 -n 0 -r 2",
    "tune": "tune {model} -t 1 -p 16 -n 4 --time 1 --profile {profile}",
}
if not ALL:
    COMMANDS = {"run": COMMANDS["run"]}
LEAST_COMMANDS = 20  # that each of them sends to its server
LOST = sentence_of("ggml-rpc.cpp")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_that_goes_is_one_sentence(name: str, place: Place) -> None:
    """At the first command that it gets, and at another on the way."""
    seed = f"{name} {SEED}"
    print("seed:", seed)
    for fails_at in (1, random.Random(seed).randint(2, LEAST_COMMANDS)):
        print("fails at", fails_at)
        with RpcServer() as server, CutProxy(server.endpoint, fails_at) as proxy:
            command = COMMANDS[name] + " --device rpc://{endpoint}"
            place.start(name, command=command, endpoint=proxy.endpoint).must_end(1)
    place.must_hold_whole_files()


@pytest.mark.thorough
def test_a_server_that_hangs_is_one_sentence_after_a_minute(place: Place) -> None:
    """All commands at once, each with a server of its own. At a greeting it takes 5 s."""
    seed = f"hangs {SEED}"
    print("seed:", seed)
    draw = random.Random(seed)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        for name, words in COMMANDS.items():
            server = stack.enter_context(RpcServer())
            proxy = stack.enter_context(CutProxy(server.endpoint, draw.randint(2, LEAST_COMMANDS), silent=True))
            place.start(name, command=words + " --device rpc://{endpoint}", endpoint=proxy.endpoint)
        for started in place.started:
            _, said = started.must_end(1)
            assert re.search(
                rf"did not answer for {RPC_SILENCE_S:.0f} s|no RPC server answers at .* within 5 s", said
            ), said
    assert time.monotonic() - begun > RPC_SILENCE_S


CALLS = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.placed import placed
from e2e.split_cases import ffn, split_case
from ggml_bridge.rpc import RpcServer
from oallama.core.options import Options
from oallama.device.rpc_link import limit_silence
from oallama.run.engine import Engine
model, call, how = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
case = placed(model, "rpc-worker", lambda op: op.role.startswith("attn"))
if call == "split":
    case = split_case(model, "rpc-worker", ffn(0.5))
server = RpcServer()
print(server.pid, flush=True)
engine = Engine(case.model, case.plan, Options(threads=1, device=f"rpc://{server.endpoint}"), probed=True)
limit_silence(server.endpoint, 1)
calls = {
    "generate": lambda: engine.generate("once", max_tokens=100, temperature=1.0),
    "logits": lambda: engine.logits(list(range(100))),
    "llama": lambda: (engine.llama.reset(), engine.llama.eval(list(range(100)))),
}
threading.Timer(0.2, os.kill, [server.pid, signal.Signals[how]]).start()
while True:
    calls.get(call, calls["generate"])()
"""


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.thorough), "SIGSTOP"])
@pytest.mark.parametrize("call", ["generate", "logits", "llama", "split"] if ALL else ["split"])
def test_a_call_from_python_ends_the_process(call: str, how: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "f16.gguf", "llama", weight_type="F16")
    command = [sys.executable, "-c", CALLS, str(Path(__file__).parents[1]), str(model), call, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGKILL)  # one that is stopped does not end with its parent
    assert (done.returncode, done.stderr) == (1, f"oallama: {LOST}\n")
