"""Ctrl-C, wherever it comes: it ends a call, is never lost, and the engine can be used again and closed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from e2e.placed import placed
from interrupts import interrupted_at, native_log_callback
from processes import PATIENCE_S
from seeds import ALL, FRESH, SEED

from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.device.opening import list_devices
from oallama.run.engine import Engine


def engine_on(device: str, model: Path) -> Engine:
    case = placed(model, device, lambda op: op.role.startswith("attn"))
    return Engine(case.model, case.plan, Options(threads=1), probed=True, progress=False)


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_ctrl_c_anywhere_in_a_call_leaves_the_engine_usable(device: str, f16: Path) -> None:
    """At each of several hundred moments, or a twentieth of them; with a worker a seventh."""
    step = (1 if ALL else 20) if device == "none" else (7 if ALL else 40)
    moment = FRESH % step
    with engine_on(device, f16) as engine:
        tokens = engine.tokenize("once upon")
        wanted = engine.generate(tokens, max_tokens=2, temperature=0).tokens

        def work() -> None:
            for _ in engine.stream(tokens, max_tokens=2, temperature=0):
                pass
            engine.logits(tokens)

        work()
        comes_so_far = True
        while comes_so_far:
            moment += step
            comes_so_far = interrupted_at(moment, work)
            assert engine.generate(tokens, max_tokens=2, temperature=0).tokens == wanted, f"moment {moment}, {FRESH}"
    assert moment > 300


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_ctrl_c_anywhere_in_loading_leaves_nothing_behind(device: str, f16: Path) -> None:
    """No worker, nor llama.cpp's log in our hands: what is logged next would be the end."""
    step = (61 if device == "none" else 251) * (1 if ALL else 12)
    case = placed(f16, device, lambda op: op.role.startswith("attn"))

    def load_and_close() -> None:
        Engine(case.model, case.plan, Options(threads=1), probed=True, progress=False).close()

    load_and_close()
    log_before = native_log_callback()
    moment, comes_so_far = FRESH % step, True
    while comes_so_far:
        moment += step
        comes_so_far = interrupted_at(moment, load_and_close)
        assert native_log_callback() == log_before, f"moment {moment}"
        assert not psutil.Process().children(), f"moment {moment}"
        assert not [known.name for known in list_devices() if known.backend == "RPC"], f"moment {moment}"
    assert moment > 300
    with engine_on(device, f16) as engine:
        assert engine.generate("once upon", max_tokens=2, temperature=0).n_gen == 2


def test_an_engine_can_be_closed_while_a_ctrl_c_ends_its_call(f16: Path) -> None:
    """As `with` does, while what was interrupted is still known: at each of several hundred moments, or some of
    them."""
    moment, comes_so_far = 0, True
    while comes_so_far:
        moment += 1 if ALL else 20
        closed: list[bool] = []
        with engine_on("none", f16) as engine:

            def work(engine: Engine = engine, closed: list[bool] = closed) -> None:
                try:
                    for _ in engine.stream("once upon", max_tokens=2, temperature=0):
                        pass
                    engine.call(list)
                except KeyboardInterrupt:
                    engine.close()
                    closed.append(True)
                    raise

            comes_so_far = interrupted_at(moment, work)
            if closed:
                with pytest.raises(UsageError, match="this engine is closed"):
                    engine.call(list)
    assert moment > 300


WORK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.placed import placed
from e2e.split_cases import ffn, split_case
from oallama.core.options import Options
from oallama.device.load_params import load_bridge
from oallama.run.engine import Engine
model, device = Path(sys.argv[2]), sys.argv[3]
splits = device == "cpu-pair"
case = split_case(model, device, ffn(0.5)) if splits else placed(model, device, lambda op: op.role.startswith("attn"))
def loaded():
    return Engine(case.model, case.plan, Options(threads=1), probed=True, progress=False)
"""

ONCE = (
    WORK
    + """
engine = loaded()
engine.close()
try:
    print("ready", flush=True)
    while True:
        with loaded() as engine:
            for piece in engine.stream("once", max_tokens=10**6, temperature=1.5):
                pass
except KeyboardInterrupt:
    assert engine._release.alive is False
    held = load_bridge().split().memory() if splits else None
    assert not splits or not any(getattr(held, name) for name in held.__slots__), held
    sys.exit(130)
"""
)

MANY = (
    WORK
    + """
def work():
    with loaded() as engine:
        for _ in engine.stream("once upon a time " * 8, max_tokens=3, temperature=1.5):
            pass
        engine.logits(engine.tokenize("once upon a time"))
work()
while True:
    try:
        print("ready", flush=True)
        while True:
            work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
)


def started(script: str, model: Path, device: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(model), device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("device", ["none", "rpc-worker", "cpu-pair"])
def test_a_ctrl_c_ends_a_program(f16: Path, device: str) -> None:
    with started(ONCE, f16, device) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    ("device", "n_times", "longest_s"), [("none", 60 if ALL else 20, 0.12), ("rpc-worker", 12 if ALL else 2, 0.8)]
)
def test_a_ctrl_c_is_never_lost(f16: Path, device: str, n_times: int, longest_s: float) -> None:
    """At many moments of loading, computing and freeing."""
    moments = random.Random(SEED or 1)
    with started(MANY, f16, device) as process:
        assert process.stdout is not None and process.stderr is not None
        limit = threading.Timer(PATIENCE_S, process.kill)  # a lost one leaves it at work for ever
        limit.start()
        n_told = 0
        while n_told < n_times and process.stdout.readline() == "ready\n":
            time.sleep(moments.random() * longest_s)
            process.send_signal(signal.SIGINT)
            n_told += process.stdout.readline() == "interrupted\n"
        limit.cancel()
        time.sleep(0.0 if n_told == n_times else 1.0)  # what has crashed says so
        ended = process.poll()
        process.kill()
        assert (n_told, ended, process.stderr.read()) == (n_times, None, "")
