"""What a placement does to a model's answers: KL divergence from stock llama.cpp and top-1 agreement over given tokens,
as llama-perplexity --kl-divergence has them, and texts drawn from the same seeds, for every policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.generation import prompt_of

from measure.measure import Measure, MeasureStep, name_of, numbers
from oallama import Placer, Plan
from oallama.core.profile import Profile
from oallama.device.card import Card, Host
from oallama.place.decide import CANDIDATES
from oallama.place.published import PUBLISHED
from oallama.profile.described import described

Floats = npt.NDArray[np.float64]

WINDOW = 256  # tokens, each window from an empty context
PROMPT, ANSWER = 16, 32  # tokens of a drawn text
NOISE = "stock, plain layout"
"""Stock llama.cpp against itself with its other CPU kernels: what is no fault of a placement."""

# Slow enough, and with latencies short enough, that a model of a few MB is cut as a large one is on a usual PC.
_HOST = Host("a slow CPU", bytes_per_s=2e8, flops_per_s=5e8, source="scripts/measure divergence")
_CARD = Card(
    "small", "a small card", 1 << 30, bytes_per_s=2e11, flops_per_s=1e13, flops_float_per_s=5e12, kernel_s=1e-7,
    launch_s=5e-7, launch_node_s=1e-8, copy_s=5e-7, copy_issue_s=1e-7, synchronize_s=1e-7,
    pinned_bytes_per_s=1e9, pageable_bytes_per_s=5e8,
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """What stock llama.cpp makes of a model on the CPU: windows of tokens that it drew, its log-probabilities
    [n_tokens, n_vocab] in each, and its texts by seed."""

    windows: tuple[tuple[int, ...], ...]
    log_p: tuple[Floats, ...]
    texts: tuple[str, ...]


@cache
def reference(path: str, threads: int, n_tokens: int, n_texts: int) -> Reference:
    import llama_cpp

    def stock(**options: Any) -> llama_cpp.Llama:
        return llama_cpp.Llama(path, n_ctx=2 * WINDOW, n_threads=threads, n_threads_batch=threads, verbose=False,
                               flash_attn=False, **options)  # fmt: skip

    llama = stock(logits_all=True)
    rng = np.random.default_rng(1)
    windows: list[tuple[int, ...]] = []
    log_p: list[Floats] = []
    for seed in range(-(-n_tokens // WINDOW)):
        tokens = prompt_of(2, llama.n_vocab(), seed)
        llama.reset()
        llama.eval(tokens)
        while len(tokens) < WINDOW:
            p = np.exp(log_softmax(np.array(llama.scores[len(tokens) - 1])))
            tokens.append(int(rng.choice(len(p), p=p / p.sum())))
            llama.eval(tokens[-1:])
        llama.reset()
        llama.eval(tokens)  # at once, as it is compared
        windows.append(tuple(tokens))
        log_p.append(log_softmax(np.array(llama.scores[:WINDOW])))
    llama.close()
    placer = Placer.load(path, device="none", threads=threads, flash_attn="off")
    with placer.engine(placer.cpu_plan(placer.workload(WINDOW, ANSWER, 2 * WINDOW))) as engine:
        for window, expected in zip(windows, log_p, strict=True):
            if not np.array_equal(log_softmax(engine.logits(window)), expected):
                raise SystemExit("the CPU plan's logits are not stock llama.cpp's, so its texts may not be either")
        return Reference(tuple(windows), tuple(log_p), texts_of(engine, windows, n_texts))


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergence(expected: Floats, found: Floats) -> Floats:
    """KL(expected || found) in nats of each row of log-probabilities."""
    result: Floats = (np.exp(expected) * (expected - found)).sum(axis=-1)
    return result


def texts_of(engine: Any, windows: Sequence[Sequence[int]], n_texts: int) -> tuple[str, ...]:
    """Texts drawn at temperature 0.8 from seeds 0, 1, …, each from the beginning of some window."""
    return tuple(
        engine.generate(windows[seed % len(windows)][:PROMPT], max_tokens=ANSWER, temperature=0.8, seed=seed).text
        for seed in range(n_texts)
    )


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    for path in options.files:
        routed = any(operator.op == "MUL_MAT_ID" for operator in Placer.load(path, device="none").operators)
        for policy in (NOISE, *CANDIDATES, *PUBLISHED):
            if policy == "fiddler" and not routed:
                continue  # it places experts, and there are none
            yield MeasureStep(f"{name_of(path)}, {policy}", path, partial(_measure, path, policy, options))


def _measure(path: str, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    (threads,) = options.threads
    wanted = reference(path, threads, options.tokens, options.texts)
    device, share = ("none", None) if policy == NOISE else (options.device, options.gpu_weights)
    placer = Placer.load(path, device=device, threads=threads, gpu_weights=share, flash_attn="off",
                         profile=None if policy == NOISE else profile_of(path))  # fmt: skip
    if policy == NOISE:
        plan = plain(placer.cpu_plan(placer.workload(WINDOW, ANSWER, 2 * WINDOW)))
    else:
        plan = placer.plan(policy, WINDOW, ANSWER, 2 * WINDOW)
    kl, same, texts = [], [], []
    with placer.engine(plan) as engine:
        for tokens, expected in zip(wanted.windows, wanted.log_p, strict=True):
            found = log_softmax(engine.logits(tokens))
            kl.append(divergence(expected, found))
            same.append(expected.argmax(axis=-1) == found.argmax(axis=-1))
        texts = [texts_of(engine, wanted.windows, options.texts) for _ in range(2)]
        placed = engine.plan.operators
    nats = np.concatenate(kl)
    return {
        "policy": policy,
        "device": device,
        "gg": sum(p.gg == 1 for p in placed),
        "cut": sum(p.gg < 1 and p.cc < 1 for p in placed),
        "cc": sum(p.cc == 1 for p in placed),
        "n_tokens": len(nats),
        "kl_nats": {"mean": float(nats.mean()), "p99": float(np.quantile(nats, 0.99)), "max": float(nats.max())},
        "same_top_1": float(np.concatenate(same).mean()),
        "n_texts": options.texts,
        "texts_as_stock": sum(a == b for a, b in zip(texts[0], wanted.texts, strict=True)),
        "texts_repeated": sum(a == b for a, b in zip(*texts, strict=True)),
    }


def profile_of(path: str) -> Profile:
    placer = Placer.load(path, device="none")
    return described(_HOST, _CARD, placer.model, placer.operators, (1, 32, 512))


def plain(plan: Plan) -> Plan:
    """The same with every weight in the plain layout."""
    from dataclasses import replace

    operators = tuple(replace(p, layout="CPU") for p in plan.operators)
    return replace(plan, operators=operators)


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    return [
        (step, f"{row['gg']} / {row['cut']} / {row['cc']}", row["n_tokens"],
         *(f"{row['kl_nats'][key]:.1e}" for key in ("mean", "p99", "max")), f"{row['same_top_1']:.2%}",
         f"{row['texts_as_stock']} of {row['n_texts']}", f"{row['texts_repeated']} of {row['n_texts']}")
        for step, row in found
    ]  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="MODEL")
    parser.add_argument("--device", default="emulated:vram=1GiB,scale=1,values=real")
    parser.add_argument("-t", "--threads", type=numbers, default=[1], metavar="N", help="of the CPU (default: 1)")
    parser.add_argument("--gpu-weights", default="50%", metavar="SHARE", help="of the weights (default: 50%%)")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=20)


MEASURE = Measure(
    "KL divergence, top-1 agreement and texts of every policy against stock llama.cpp on the CPU", _add_options,
    _steps,
    ("model, policy", "operators GG / cut / CC", "tokens", "mean KL (nats)", "99 %", "max", "same top 1",
     "texts as stock's", "texts again the same"), _rows,
)  # fmt: skip
