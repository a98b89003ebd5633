"""The steps of a run, in the order in which they matter. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.machine import backend_of
from experiments.models import Shape

from gpu_steps import copy_queue_case
from gpu_steps.scale import GIB, Scale, TokenCounts

SCHEINFER_CAPS = (12 * GIB, 24 * GIB)
UBATCHES = (512, 2048)
CPU_PROMPT = 512
"""The longest prompt that the CPU alone is given as well: beyond, it would take the time of all other arms together."""


@dataclass(frozen=True)
class GpuStep:
    """One step. kind: which function runs it, with `settings`; seconds: what it is thought to take on a large card.

    models: what has to be written first. needs: steps without whose success it says nothing.
    """

    id: str
    title: str
    kind: str
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    models: tuple[Shape, ...] = ()
    needs: tuple[str, ...] = ()


def steps_of(scale: Scale, device: str, n_cores: int, policies: tuple[str, ...]) -> tuple[GpuStep, ...]:
    """All steps, the most telling first: is it right, does the copy queue wait as the plans suppose, is it faster where
    all have the same memory; then the papers' cells. What a rented hour has no time for is at the end. A model's
    profile is a step of its own before its first comparison. device: a --device text. n_cores: CPUs that may be
    used. policies: those of this version."""
    q4, f16 = scale.oato_q4, scale.oato_f16
    first_profile, *other_profiles = _thread_profiles(scale, n_cores)
    first_cap, *other_caps = [_memory_step(scale, f16, cap, policies) for cap in _memory_caps(scale, f16)]
    few, many = (_scheinfer_steps(scale, cap, policies) for cap in SCHEINFER_CAPS)
    made = [
        GpuStep("machine", "what this machine is", "machine", 5),
        GpuStep("doctor", "oallama doctor", "doctor", 20),
        *_correctness(scale.types),
        GpuStep("copy-queue", "small copies beside streamed weights", "copies", 20, dict(copy_queue_case.SETTINGS)),
        first_profile,
        *(_memory_step(scale, q4, cap, policies) for cap in _memory_caps(scale, q4)),
        GpuStep("timeline", "where a token and a prompt go", "timeline", 30, _timeline(scale), (q4,), ("doctor",)),
        *(_memory_step(scale, q4, _memory_caps(scale, q4)[0], policies, n_ubatch) for n_ubatch in UBATCHES),
        GpuStep("device", "copies beside computing, slices, pinned memory", "device", 25, _device_settings(scale)),
        _oato_step(scale, q4, "50%", policies),
        _profile(scale, f16),
        _oato_step(scale, f16, "50%", policies),
        *other_caps,
        *few,
        *(_oato_step(scale, f16, share, policies) for share in ("25%", "75%")),
        *_correctness(scale.other_types, "-others", 15),
        GpuStep("switches", "ggml's switches, on and off", "switches", 90,
             {**_timeline(scale), "backend": backend_of(device)}, (q4,), ("doctor",)),
        *many,
        first_cap,
        *(_oato_step(scale, q4, share, policies) for share in ("25%", "75%")),
        *other_profiles,
    ]  # fmt: skip
    return tuple(_scaled(step, scale.seconds) for step in {step.id: step for step in made}.values())


def _scaled(step: GpuStep, factor: float) -> GpuStep:
    return GpuStep(step.id, step.title, step.kind, step.seconds * factor, step.settings, step.models, step.needs)


def _correctness(types: tuple[str, ...], suffix: str = "", seconds: float = 10) -> list[GpuStep]:
    """In every mode; [] without types."""
    titles = {"split": "split FFNs", "stream": "streamed slices", "tokens": "tokens assigned to the device"}
    which = "the other types" if suffix else "the types in common use"
    return [
        GpuStep(f"correctness-{mode}{suffix}", f"{title} of {which}, against the CPU", "correctness", seconds,
             {"mode": mode, "types": list(types)})
        for mode, title in titles.items() if types
    ]  # fmt: skip


def _profile(scale: Scale, shape: Shape, threads: int = 0) -> GpuStep:
    """threads 0: those of the arms."""
    settings = {"model": shape.name, "threads": threads, "tokens": list(scale.profile_tokens)}
    name = f"profile-{shape.name}" + (f"-{threads}t" if threads else "")
    title = f"profile of {shape.name}, " + (f"{threads} threads" if threads else "threads as the arms have")
    return GpuStep(name, title, "profile", 45, settings, (shape,), ("doctor",))


def _thread_profiles(scale: Scale, n_cores: int) -> list[GpuStep]:
    """Every number of threads on the quantised model, most first: the plans are made with that."""
    return [_profile(scale, scale.oato_q4, n) for n in sorted({min(n, n_cores) for n in scale.threads}, reverse=True)]


def _arms(policies: tuple[str, ...], *wanted: str) -> list[str]:
    """The wanted arms that this version knows."""
    return [arm for arm in wanted if arm.startswith("stock") or arm in policies]


def _stock(shape: Shape, work: TokenCounts) -> list[str]:
    """Stock llama.cpp's arms."""
    experts = "moe" in shape.like or "mixtral" in shape.like
    alone = work.n_prompt <= CPU_PROMPT
    return ["stock-fit", "stock-ngl", *(["stock-ncmoe"] if experts else []), *(["stock-cpu"] if alone else [])]


def _ab(
    scale: Scale, shape: Shape, work: TokenCounts, policies: tuple[str, ...], arms: list[str], cap: list[str],
    shown: str, name: str, seconds: float, unit: str = "", paper: str = "", n_ubatch: int | None = None,
) -> GpuStep:  # fmt: skip
    """All arms in one cell, as `oallama bench` compares them. of: what the cap is a share of, or counts."""
    settings: dict[str, Any] = {
        "model": shape.name, "arms": _arms(policies, *_stock(shape, work), "layers", "oato", "split", *arms),
        "cap": cap, "shown_cap": shown, "paper": paper, "n_prompt": work.n_prompt, "n_gen": work.n_gen,
        "repetitions": scale.repetitions, **({} if n_ubatch is None else {"n_ubatch": n_ubatch}),
    }  # fmt: skip
    title = f"{shape.name}, {shown}{unit}, {work.n_prompt} + {work.n_gen} tokens"
    title += "" if n_ubatch is None else f", -ub {n_ubatch}"
    return GpuStep(name, title, "ab", seconds, settings, (shape,), ("doctor",))


def _oato_step(scale: Scale, shape: Shape, share: str, policies: tuple[str, ...]) -> GpuStep:
    arms = ["auto"] if share == "50%" else []
    return _ab(scale, shape, scale.oato, policies, arms, ["--gpu-weights", share], share,
               f"oato-{shape.name}-{share[:-1]}", 95, " of the weights", "oato")  # fmt: skip


def _memory_caps(scale: Scale, shape: Shape) -> list[int]:
    """Those that the model does not fit in."""
    return [cap for cap in scale.memory_caps if _scaled_cap(scale, shape, cap) < shape.n_bytes]


def _scaled_cap(scale: Scale, shape: Shape, cap: int) -> int:
    """For as many layers as there are: a model of a quarter of the layers gets a quarter of the cap."""
    return round(cap * shape.share) if scale.caps else cap


def _memory_step(
    scale: Scale, shape: Shape, cap: int, policies: tuple[str, ...], n_ubatch: int | None = None
) -> GpuStep:
    """All arms under the same device memory, buffers and KV cache included. n_ubatch: with a prompt longer than that,
    and micro-batches of so many tokens."""
    work = scale.oato if n_ubatch is None else scale.ubatch
    given = _scaled_cap(scale, shape, cap)
    shown = f"{cap // GIB} GiB" if cap >= GIB else f"{cap >> 20} MiB"
    shown += "" if given == cap else f" × {shape.share:.3g}"
    name = f"memory-{shape.name}-" + (f"{cap // GIB}g" if cap >= GIB else f"{cap >> 20}m")
    name += "" if n_ubatch is None else f"-ub{n_ubatch}"
    arms = ["scheinfer", *(["auto"] if n_ubatch is None else [])]
    given_cap = ["--vram", str(given), "--vram-fill", "1"]
    return _ab(scale, shape, work, policies, arms, given_cap, shown, name, 115, " of device memory", n_ubatch=n_ubatch)


def _scheinfer_steps(scale: Scale, cap: int, policies: tuple[str, ...]) -> list[GpuStep]:
    """Both models, each behind its profile."""
    shapes = (scale.mixtral, scale.llama70b)
    return [step for s in shapes for step in (_profile(scale, s), _scheinfer_step(scale, s, cap, policies))]


def _scheinfer_step(scale: Scale, shape: Shape, cap: int, policies: tuple[str, ...]) -> GpuStep:
    """The paper's cap. Where caps are not applied, 25 and 50 % of the weights stand for 12 and 24 GiB."""
    share, shown = "25%" if cap == min(SCHEINFER_CAPS) else "50%", f"{cap // GIB} GiB"
    given = ["--gpu-weights", share]
    if scale.caps:
        given = ["--vram", str(_scaled_cap(scale, shape, cap)), "--vram-fill", "1"]
    return _ab(scale, shape, scale.scheinfer, policies, ["scheinfer", "auto"], given,
               shown if scale.caps else f"{share} for {shown}", f"scheinfer-{shape.name}-{cap // GIB}", 170,
               paper="scheinfer")  # fmt: skip


def _device_settings(scale: Scale) -> dict[str, Any]:
    return {"n_bytes": scale.overlap_bytes, "n_tokens": scale.overlap_tokens, "ffn": list(scale.ffn)}


def _timeline(scale: Scale) -> dict[str, Any]:
    return {"model": scale.oato_q4.name, "n_prompt": scale.scheinfer.n_prompt, "n_gen": scale.oato.n_gen, "share": 0.25}
