"""The steps of a run, in the order in which they matter. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.machine import backend_of
from experiments.models import Shape

from gpu_steps.scale import Scale

GIB = 1 << 30
SCHEINFER_CAPS = (12 * GIB, 24 * GIB)


@dataclass(frozen=True)
class Step:
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


def steps_of(scale: Scale, device: str, n_cores: int, policies: tuple[str, ...]) -> tuple[Step, ...]:
    """All steps, the most telling first. device: a --device text. n_cores: CPUs that may be used. policies: those of
    this version. A model's profile is a step of its own before its first comparison."""
    q4, f16 = scale.oato_q4, scale.oato_f16
    made = [
        Step("machine", "what this machine is", "machine", 5),
        Step("doctor", "oallama doctor", "doctor", 20),
        *_correctness(scale),
        *_thread_profiles(scale, n_cores),
        Step("device", "copies beside computing, slices, pinned memory", "device", 25, _device_settings(scale)),
        _oato_step(scale, q4, "50%", policies),
        Step("timeline", "where a token and a prompt go", "timeline", 30, _timeline(scale), (q4,), ("doctor",)),
        _profile(scale, f16),
        _oato_step(scale, f16, "50%", policies),
        *(_oato_step(scale, shape, share, policies) for shape in (f16, q4) for share in ("25%", "75%")),
    ]  # fmt: skip
    for shape in (scale.mixtral, scale.llama70b):
        made += [_profile(scale, shape), *(_scheinfer_step(scale, shape, cap, policies) for cap in SCHEINFER_CAPS)]
    settings = {**_timeline(scale), "backend": backend_of(device)}
    made.append(Step("switches", "ggml's switches, on and off", "switches", 90, settings, (q4,), ("doctor",)))
    return tuple(_scaled(step, scale.seconds) for step in {step.id: step for step in made}.values())


def _scaled(step: Step, factor: float) -> Step:
    return Step(step.id, step.title, step.kind, step.seconds * factor, step.settings, step.models, step.needs)


def _correctness(scale: Scale) -> list[Step]:
    settings = {"types": list(scale.types)}
    return [
        Step(f"correctness-{mode}", f"{title}, against the CPU", "correctness", seconds, {"mode": mode, **settings})
        for mode, title, seconds in (
            ("split", "split FFNs of all types", 25),
            ("stream", "streamed slices", 25),
            ("tokens", "tokens assigned to the device", 25),
        )
    ]


def _profile(scale: Scale, shape: Shape, threads: int = 0) -> Step:
    """threads 0: those of the arms."""
    settings = {"model": shape.name, "threads": threads, "tokens": list(scale.profile_tokens)}
    name = f"profile-{shape.name}" + (f"-{threads}t" if threads else "")
    title = f"profile of {shape.name}, " + (f"{threads} threads" if threads else "threads as the arms have")
    return Step(name, title, "profile", 45, settings, (shape,), ("doctor",))


def _thread_profiles(scale: Scale, n_cores: int) -> list[Step]:
    """Every number of threads on the quantised model, most first: the plans are made with that."""
    return [_profile(scale, scale.oato_q4, n) for n in sorted({min(n, n_cores) for n in scale.threads}, reverse=True)]


def _arms(policies: tuple[str, ...], *wanted: str) -> list[str]:
    """The wanted arms that this version knows."""
    return [arm for arm in wanted if arm.startswith("stock") or arm in policies]


def _oato_step(scale: Scale, shape: Shape, share: str, policies: tuple[str, ...]) -> Step:
    work = scale.oato
    arms = _arms(policies, "stock-fit", "stock-ngl", "oato", "split", *(["auto"] if share == "50%" else []))
    title = f"{shape.name}, {share} of the weights, {work.n_prompt} + {work.n_gen} tokens"
    settings = {
        "model": shape.name, "arms": arms, "cap": ["--gpu-weights", share], "shown_cap": share, "paper": "oato",
        "n_prompt": work.n_prompt, "n_gen": work.n_gen, "repetitions": scale.repetitions,
    }  # fmt: skip
    return Step(f"oato-{shape.name}-{share[:-1]}", title, "ab", 75, settings, (shape,), ("doctor",))


def _scheinfer_step(scale: Scale, shape: Shape, cap: int, policies: tuple[str, ...]) -> Step:
    """The paper's cap, for as many layers as there are: a model of a quarter of the layers gets a quarter of it. Where
    caps are not applied, 25 and 50 % of the weights stand for 12 and 24 GiB."""
    work = scale.scheinfer
    arms = ["stock-fit", "stock-ngl", *(["stock-ncmoe"] if "moe" in shape.like or "mixtral" in shape.like else [])]
    arms = _arms(policies, *arms, "oato", "split", "scheinfer", "auto")
    shown = f"{cap // GIB} GiB"
    share = "25%" if cap == min(SCHEINFER_CAPS) else "50%"
    given = ["--vram", str(round(cap * shape.share)), "--vram-fill", "1"] if scale.caps else ["--gpu-weights", share]
    settings = {
        "model": shape.name, "arms": arms, "cap": given, "shown_cap": shown if scale.caps else f"{share} for {shown}",
        "n_prompt": work.n_prompt, "n_gen": work.n_gen, "repetitions": scale.repetitions, "paper": "scheinfer",
    }  # fmt: skip
    title = f"{shape.name}, {settings['shown_cap']}, {work.n_prompt} + {work.n_gen} tokens"
    return Step(f"scheinfer-{shape.name}-{cap // GIB}", title, "ab", 160, settings, (shape,), ("doctor",))


def _device_settings(scale: Scale) -> dict[str, Any]:
    return {"n_bytes": scale.overlap_bytes, "n_tokens": scale.overlap_tokens, "ffn": list(scale.ffn)}


def _timeline(scale: Scale) -> dict[str, Any]:
    return {"model": scale.oato_q4.name, "n_prompt": scale.scheinfer.n_prompt, "n_gen": scale.oato.n_gen, "share": 0.25}
