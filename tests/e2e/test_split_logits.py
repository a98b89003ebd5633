"""Whole models with the split backend against stock llama.cpp, teacher-forced: on one side alone bit for bit, on both
sides within what the order of sums can change.

The bounds are for NMSE of logits. F16 and F32 weights: both sides multiply the same numbers and differ in the order of
sums only; 1e-6, as for whole operators on a device (test_engine.py). Quantised weights: ggml quantises the activations
as well (Q8_0 in blocks of 32, Q8_K in blocks of 256), and a cut at block boundaries leaves every block as it was, so a
single mul-mat still differs in the order of its sums only. But a difference in the last bit of its result can move an
activation of the next mul-mat to another of 127 steps, up to 0.4 % of its block's largest value; and in a model of
experts it can send a token to another expert. Over Q4_0, Q4_K, Q6_K and Q8_0, four seeds each, the worst was 6e-5 for
the dense architectures and 6e-4 with experts (qwen3moe). Two of llama.cpp's own kernels for the same weights, plain and
repacked, differ by up to 9e-5 and 4e-4 on these models. QUANTISED_NMSE lies above that; a wrong kernel, cut or join
is far above it: it gives 0.1 to 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.logits import ARCHITECTURES, EXACT_NMSE, QUANTISED_NMSE, TOKENS, movable, nmse
from e2e.placed import Placed, placed
from e2e.plugin_runs import context_of, loaded, logits_of, logits_of_sequences, pattern_of, with_plugin
from e2e.split_cases import everything, ffn, split_placements, written
from gguf_factory import ARCHITECTURES as KNOWN
from llama_cpp import llama_cpp as api
from seeds import ALL

from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.device.opening import device_pointer, open_device

pytestmark = pytest.mark.usefixtures("prober")

DEVICES = ("cpu-pair", "rpc-worker", "emulated:vram=2GiB,scale=1,values=real")


def cases(*types: str) -> list[tuple[str, str, str]]:
    """(architecture, type, device): all, or each architecture with one type on the card, and two on each device."""
    return [
        (arch, weight_type, device)
        for device in DEVICES
        for i, arch in enumerate(ARCHITECTURES)
        for weight_type in types
        if ALL or (weight_type == types[i % len(types)] and (device == DEVICES[-1] or arch in ("llama", "qwen3moe")))
    ]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """ggml's name of an open device."""
    with open_device(request.param) as opened:
        yield opened.name


def model(models: Path, arch: str, weight_type: str) -> Placed:
    return placed(written(models, arch, weight_type=weight_type))


def plain(device: str) -> dict[str, bool]:
    """A second CPU backend keeps its weights plain, so the CPU it is compared with must, too. Beside a device with
    pinned memory, stock llama.cpp keeps host weights there, and plain."""
    return {"use_extra_bufts": False} if device in ("CPU", "Emulated0") else {}


def whole_on(case: Placed, given: list[str], device: str) -> np.ndarray:
    """Logits of stock llama.cpp with the same operators placed whole: on the device, by tensor overrides."""
    there = device != "CPU"
    overrides = [(pattern_of(given), load_bridge().buft(device))] if there else []
    with loaded(Path(case.model.path), overrides, [device_pointer(device)] * there, **plain(device)) as context:
        return logits_of(context, TOKENS)


@pytest.mark.parametrize(("arch", "weight_type"), sorted({case[:2] for case in cases("F16", "Q4_0", "Q4_K")}))
def test_all_cc_is_bit_identical_to_stock(arch: str, weight_type: str, models: Path) -> None:
    case = model(models, arch, weight_type)
    given = [operator.name for operator in case.operators if movable(operator)]
    with loaded(Path(case.model.path)) as context:
        wanted = logits_of(context, TOKENS)
    with with_plugin(case, split_placements(case.operators, everything(0)), given, "CPU") as context:
        assert np.array_equal(logits_of(context, TOKENS), wanted)


@pytest.mark.parametrize(("arch", "weight_type", "device"), cases("F16", "Q4_0"), indirect=["device"])
def test_all_gg_is_bit_identical_to_the_device(arch: str, weight_type: str, device: str, models: Path) -> None:
    case = model(models, arch, weight_type)
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with with_plugin(case, split_placements(case.operators, ffn(1)), given, device, **plain(device)) as context:
        found = logits_of(context, TOKENS)
    assert np.array_equal(found, whole_on(case, given, device))


@pytest.mark.parametrize(("arch", "weight_type", "device"), cases("F32", "F16", "Q4_0"), indirect=["device"])
def test_a_split_computes_the_same(arch: str, weight_type: str, device: str, models: Path) -> None:
    bound = QUANTISED_NMSE if weight_type == "Q4_0" else EXACT_NMSE
    case = model(models, arch, weight_type)
    with loaded(Path(case.model.path)) as context:
        wanted = logits_of(context, TOKENS)
    given = [operator.name for operator in case.operators if movable(operator)]
    before = load_bridge().split().stats()
    for share in (everything(0.25), ffn(0.5)):
        placements = split_placements(case.operators, share)
        with with_plugin(case, placements, given, device) as context:
            assert nmse(logits_of(context, TOKENS), wanted) <= bound
    done = load_bridge().split().stats() - before
    assert done.bytes_in > 0 and done.bytes_out > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shares", [{}, {"ffn_gate": 0.25, "ffn_down": 0.75}], ids=["cut-alike", "cut-apart"])
@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_mul_mats_of_an_ffn_may_be_cut_apart(
    arch: str, shares: dict[str, float], streamed: bool, device: str, models: Path
) -> None:
    case = model(models, arch, "F16")
    with loaded(Path(case.model.path)) as context:
        wanted = logits_of(context, TOKENS[:64])
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    cut = split_placements(case.operators, lambda o: shares.get(o.role, 0.5) if is_ffn(o) else None)
    cut = tuple(replace(p, gg=0.0, cg=p.gg) if streamed and p.gg else p for p in cut)
    before = load_bridge().split().stats()
    with with_plugin(case, cut, given, device) as context:
        assert nmse(logits_of(context, TOKENS[:64]), wanted) <= EXACT_NMSE
    n_phases = (load_bridge().split().stats() - before).n_phases
    assert (n_phases == case.model.n_layer) == (not shares), "what is cut alike is one block"


@pytest.mark.parametrize("arch", [arch for arch in KNOWN if arch not in (*ARCHITECTURES, "t5")])
def test_other_architectures_compute_the_same(arch: str, models: Path) -> None:
    """But for t5, whose decoder stock llama.cpp does not run without an encoded text."""
    case = model(models, arch, "F16")
    with loaded(Path(case.model.path)) as context:
        wanted = logits_of(context, TOKENS)
    given = [operator.name for operator in case.operators if movable(operator)]
    with with_plugin(case, split_placements(case.operators, everything(0.5)), given, "CPU") as context:
        assert nmse(logits_of(context, TOKENS), wanted) <= EXACT_NMSE


@pytest.mark.parametrize(("arch", "weight_type"), [("llama", "F16"), ("qwen3moe", "F16"), ("gpt2", "F32")])
def test_several_sequences_in_a_batch(arch: str, weight_type: str, device: str, models: Path) -> None:
    case = model(models, arch, weight_type)
    sequences = [TOKENS[start : start + 12] for start in (0, 20, 40, 60)]
    given = [operator.name for operator in case.operators if movable(operator)]
    with loaded(Path(case.model.path), n_seq=len(sequences)) as context:
        wanted = logits_of_sequences(context, sequences)
    placements = split_placements(case.operators, everything(0.5))
    with with_plugin(case, placements, given, device, n_seq=len(sequences)) as context:
        found = logits_of_sequences(context, sequences)
    assert nmse(found, wanted) <= EXACT_NMSE
    assert nmse(found[0], wanted[1]) > 0.1, "the sequences differ, so the comparison says something"


def test_two_contexts_of_one_model(device: str, models: Path) -> None:
    case = model(models, "llama", "F16")
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    with with_plugin(case, split_placements(case.operators, ffn(0.5)), given, device) as first:
        alone = logits_of(first, TOKENS)
        with context_of(Path(case.model.path), api.llama_get_model(first), n_threads=2) as second:
            assert nmse(logits_of(second, TOKENS), alone) <= EXACT_NMSE
            assert np.array_equal(logits_of(first, TOKENS), alone)
        assert np.array_equal(logits_of(first, TOKENS), alone)
