"""The correctness steps: small models of every type, computed by CPU and device together, against the CPU.

Models and plans are those of the project's own tests. Modes: `split`, half of each FFN on the device (CC and GG);
`stream`, a quarter of it streamed there (CC, CG, GG); `tokens`, part of each batch whose CC the device computes as well
(n_g).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.child import ROOT, add_tests

add_tests()

N_TOKENS = 40
EXPERTS = ("llama-moe", "qwen3moe")
BOUNDS = {"F32": 1e-4, "": 1e-3, "experts": 1e-2}
"""NMSE of logits against stock llama.cpp on the CPU. A device multiplies F32 with less (TF32), and unpacks quantised
weights where the CPU quantises the activations; in a small model a rounding can send a token to another expert. A wrong
kernel, cut or join gives 0.1 to 2."""

NO_NUMBER = 1e9
"""In place of NaN and infinity, which JSON has no word for."""

TOKEN_TABLE = ((1, 0), (8, 4), (N_TOKENS, 24))


def cases(types: list[str]) -> Iterator[tuple[str, str]]:
    """(architecture, type): dense in all types, experts in the usual ones."""
    for weight_type in types:
        yield "llama", weight_type
    for arch in EXPERTS:
        for weight_type in ("F16", "Q4_0"):
            if weight_type in types:
                yield arch, weight_type
    if "Q8_0" in types:
        yield "phi3", "Q8_0"  # gate and up in one weight


def bound(arch: str, weight_type: str) -> float:
    return BOUNDS["experts"] if "moe" in arch else BOUNDS.get(weight_type, BOUNDS[""])


def compare(path: Path, device: str, mode: str) -> dict[str, Any]:
    """NMSE of one token and of a batch. Raises what loading raises; AssertionError where it did not lie as planned."""
    import numpy as np
    from e2e.placed import placed
    from e2e.plugin_runs import loaded, logits_of, with_plugin
    from e2e.split_cases import ffn, split_placements

    from oallama.core.types import StreamSettings
    from oallama.cost.blocks import is_ffn
    from oallama.device.load_params import load_bridge
    from oallama.plan.plan import Plan

    case = placed(path)
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    placements = split_placements(case.operators, ffn(0.5), "CPU" if mode == "tokens" else None)
    if mode == "stream":
        placements = tuple(replace(p, gg=p.gg / 2, cg=p.gg / 2) if 0 < p.gg < 1 else p for p in placements)
    if mode == "tokens":
        record = replace(case.plan, token_assignment=TOKEN_TABLE, streaming=StreamSettings())
        case = replace(case, plan=Plan.of(record))
    rng = np.random.default_rng(7)
    tokens = [int(token) for token in rng.integers(0, 300, N_TOKENS)]
    with loaded(path) as context:
        wanted = {n: logits_of(context, tokens[:n]) for n in (1, N_TOKENS)}
    split = load_bridge().split()
    before = split.stats()
    with with_plugin(case, placements, given, device) as context:
        found = {n: logits_of(context, tokens[:n]) for n in (1, N_TOKENS)}
    done = split.stats() - before

    def nmse(n: int) -> float:
        value = float(np.square(found[n] - wanted[n]).sum() / np.square(wanted[n]).sum())
        return value if np.isfinite(value) else NO_NUMBER

    return {"nmse_decode": nmse(1), "nmse_prefill": nmse(N_TOKENS), "bytes_in": done.bytes_in,
            "bytes_streamed": done.bytes_streamed}  # fmt: skip


def verdict(found: dict[str, Any], mode: str, limit: float) -> str:
    """`ok`, or what is wrong. A case in which the device got nothing proves nothing."""
    if not all(found[key] <= limit for key in ("nmse_decode", "nmse_prefill")):  # NaN is no number below it
        return "differs"
    if found["bytes_in"] == 0:
        return "the device computed nothing"
    return "nothing was streamed" if mode != "split" and found["bytes_streamed"] == 0 else "ok"


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a case. settings: device, mode, types."""
    from gguf_factory import write_gguf

    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device

    mode = settings["mode"]
    with native_log(), tempfile.TemporaryDirectory() as folder, open_device(settings["device"]) as device:
        for arch, weight_type in cases(settings["types"]):
            start = time.monotonic()
            row: dict[str, Any] = {"arch": arch, "type": weight_type, "bound": bound(arch, weight_type)}
            try:
                sizes = {} if arch == "phi3" else {"n_ff": 1024}
                path = write_gguf(Path(folder, "case.gguf"), arch, weight_type=weight_type, **sizes)
                found = compare(path, device.name, mode)
                row |= {**found, "verdict": verdict(found, mode, row["bound"])}
            except Exception as error:  # a type that one side does not have must not keep the others from being tried
                row["verdict"] = f"{type(error).__name__}: {error}".splitlines()[0].replace(str(ROOT), "")[:300]
            row["seconds"] = round(time.monotonic() - start, 3)
            yield row
