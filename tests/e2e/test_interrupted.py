"""Ctrl-C, wherever it comes: it ends a call, is never lost, and the engine can be used again and closed."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from e2e.forced import Forced, attention, forced
from e2e.script import started
from interrupts import interrupted_often, native_log_callback
from processes import PATIENCE_S
from seeds import ALL, FRESH

from oallama.core.errors import UsageError
from oallama.device.opening import list_devices


def with_attention_on(device: str, model: Path) -> Forced:
    return forced(model, device, whole=None if device == "none" else attention)


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_ctrl_c_anywhere_in_a_call_leaves_the_engine_usable(device: str, f16: Path) -> None:
    """At each of several hundred moments, or a twentieth of them; with a worker a seventh."""
    with with_attention_on(device, f16).engine() as engine:
        tokens = engine.tokenize("once upon")
        wanted = engine.generate(tokens, max_tokens=2, temperature=0).tokens

        def work() -> None:
            list(engine.stream(tokens, max_tokens=2, temperature=0))
            engine.logits(tokens)

        work()
        moment = 0
        for moment in interrupted_often(work, step=(1 if ALL else 20) if device == "none" else (7 if ALL else 40)):
            assert engine.generate(tokens, max_tokens=2, temperature=0).tokens == wanted, f"moment {moment}"
    assert moment > 300


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_ctrl_c_anywhere_in_loading_leaves_nothing_behind(device: str, f16: Path) -> None:
    """No worker, nor llama.cpp's log in our hands: what is logged next would be the end."""
    case = with_attention_on(device, f16)
    case.engine().close()
    log_before, moment = native_log_callback(), 0
    step = (61 if device == "none" else 251) * (1 if ALL else 12)
    for moment in interrupted_often(lambda: case.engine().close(), step):
        assert native_log_callback() == log_before, f"moment {moment}"
        assert not psutil.Process().children(), f"moment {moment}"
        assert not [known.name for known in list_devices() if known.backend == "RPC"], f"moment {moment}"
    assert moment > 300
    with case.engine() as engine:
        assert engine.generate("once upon", max_tokens=2, temperature=0).n_gen == 2


def test_an_engine_can_be_closed_while_a_ctrl_c_ends_its_call(f16: Path) -> None:
    """As `with` does, while what was interrupted is still known."""
    case = with_attention_on("none", f16)
    engine = case.engine()
    n_closed = 0

    def work() -> None:
        nonlocal n_closed
        try:
            list(engine.stream("once upon", max_tokens=2, temperature=0))
            engine.call(list)
        except KeyboardInterrupt:
            engine.close()
            n_closed += 1
            raise

    step = 1 if ALL else 20
    for _ in interrupted_often(work, step):
        engine.close()
        with pytest.raises(UsageError, match="this engine is closed"):
            engine.call(list)
        engine = case.engine()
    engine.close()
    assert n_closed > 200 // step


PROGRAM = """
splits, n_times = device == "cpu-pair", int(words[0])
case = forced(model, device, ffn(0.5)) if splits else forced(model, device, whole={"none": None}.get(device, attention))
def work():
    with case.engine() as engine:
        for _ in engine.stream("once upon a time " * 8, max_tokens=3, temperature=1.5):
            pass
        engine.logits(engine.tokenize("once upon a time"))
work()
for _ in range(n_times):
    try:
        print("ready", flush=True)
        while True:
            work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
held = load_bridge().split().memory() if splits else None
assert not splits or not any(getattr(held, name) for name in held.__slots__), held
"""


@pytest.mark.parametrize(
    ("device", "n_times", "longest_s"),
    [("none", 60 if ALL else 20, 0.12), ("rpc-worker", 12 if ALL else 2, 0.8), ("cpu-pair", 12 if ALL else 2, 0.8)],
)
def test_a_ctrl_c_is_never_lost(f16: Path, device: str, n_times: int, longest_s: float) -> None:
    """At many moments of loading, computing and freeing; a program then ends as if none had come."""
    moments = random.Random(FRESH)
    with started(PROGRAM, f16, device, n_times) as process:
        assert process.stdout is not None and process.stderr is not None
        limit = threading.Timer(PATIENCE_S, process.kill)  # a lost one leaves it at work for ever
        limit.start()
        n_told = 0
        while process.stdout.readline() == "ready\n":
            time.sleep(moments.random() * longest_s)
            process.send_signal(signal.SIGINT)
            n_told += process.stdout.readline() == "interrupted\n"
        limit.cancel()
        said = process.stderr.read()
    assert (n_told, process.returncode, said) == (n_times, 0, "")
