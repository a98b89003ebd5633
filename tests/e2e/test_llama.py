"""placer.llama: a llama_cpp.Llama in this process, placed by a plan."""

from __future__ import annotations

import gc
import inspect
import itertools
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.forced import ffn, forced
from e2e.logits import TOKENS, Llama, assert_stock, placed_logits

from oallama.core.errors import PlanError, UsageError
from oallama.device.load_params import load_bridge
from oallama.placer.placer import DECIDED, LLAMA_OPTIONS

CARD = "emulated:rtx3060-12,vram=64MiB,scale=9,values=real"


def test_it_is_a_llama_that_computes_what_the_plan_says(f16: Path) -> None:
    case, n_graphs = forced(f16, CARD, ffn(0.5)), load_bridge().split().stats().n_graphs
    with case.llama() as llama:
        assert isinstance(llama, Llama)
        assert_stock(placed_logits(llama, TOKENS), f16, TOKENS)
        assert llama.plan.operators == case.plan.operators and llama.device == "Emulated0" and llama.warnings == ()
        assert llama.memory.device_bytes > 0
        assert llama.split is not None
        slices = llama.split.plan.slices()
        assert {each.name.split(".")[-2] for each in slices if each.loaded} == {"ffn_gate", "ffn_up", "ffn_down"}
        assert load_bridge().split().stats().n_graphs > n_graphs
        llama.reset()
        found = llama.create_completion([5, 6, 7], max_tokens=3, temperature=0, logprobs=1)
        assert found["choices"][0]["logprobs"]["tokens"]
    load_bridge().emulated().unregister()  # raises where something of the model still lives there


def test_arguments_are_llama_cpps(q4_0: Path) -> None:
    case = forced(q4_0)
    with case.placer.llama(case.plan, n_ctx=128, n_batch=32, n_threads=1, seed=3, chat_format="chatml") as llama:
        assert (llama.n_ctx(), llama.n_batch, llama.n_threads, llama.chat_format) == (256, 32, 1, "chatml")
        assert not llama._logits_all
    with case.placer.llama(case.plan, embedding=True) as llama:
        assert len(llama.embed("once")) > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n_gpu_layers": 3}, "set n_gpu_layers"), ({"type_k": 8}, "set type_k"),
        ({"model_path": "x"}, "set model_path"), ({"logit_all": True}, "unknown Llama argument 'logit_all'"),
        ({"n_ctx": "many"}, "n_ctx"),
    ],
)  # fmt: skip
def test_what_the_plan_decides_and_what_no_llama_takes_is_refused(
    q4_0: Path, arguments: dict[str, Any], says: str
) -> None:
    case = forced(q4_0, probe=False)
    with pytest.raises(UsageError, match=says):
        case.placer.llama(case.plan, **arguments)


def test_every_argument_that_places_is_known() -> None:
    """A new one of llama-cpp-python must be looked at: whether the plan decides it."""
    known = set(inspect.signature(Llama).parameters)
    assert known >= DECIDED | set(LLAMA_OPTIONS)
    rest = known - DECIDED - set(LLAMA_OPTIONS)
    assert not [name for name in rest if any(word in name for word in ("gpu", "split", "mmap", "mlock", "offload"))]


def test_a_plan_of_another_model_is_refused(q4_0: Path, f16: Path) -> None:
    with pytest.raises(PlanError):
        forced(q4_0, probe=False).placer.llama(forced(f16, probe=False).plan)


def test_a_ctrl_c_ends_an_answer_of_a_device_that_llama_server_has_not(q4_0: Path) -> None:
    """At the next token, and the model can be used again. No logit_bias: llama_cpp would call Python through ctypes for
    each token, and an interrupt that arrives there is lost."""
    with forced(q4_0, "cpu-pair", ffn(0.5)).llama() as llama:
        wanted = placed_logits(llama, TOKENS)
        interrupt = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                for _ in itertools.islice(llama.generate([5, 6, 7], temp=0.0), 200):
                    pass
        interrupt.join()
        assert np.array_equal(placed_logits(llama, TOKENS), wanted)


def test_it_is_freed_when_it_is_closed_or_forgotten(f16: Path) -> None:
    case = forced(f16, CARD, ffn(0.5))
    llama = case.llama()
    llama.close()
    llama.close()
    with pytest.raises(UsageError, match="closed"):
        llama.eval([1])
    llama = case.llama()
    np.testing.assert_equal(placed_logits(llama, TOKENS[:3]).shape[0], 3)
    del llama
    gc.collect()
    device = load_bridge().emulated()
    assert device.stats().device_bytes == 0
    device.unregister()
