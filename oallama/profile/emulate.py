"""The machine-dependent settings of an emulated device: its scale, and its core.

`scale` divides a card's rates by how much slower this CPU is than the CPU of a usual computer with such a card
(device/cards.py, USUAL_PC), or than the CPU in the given profile of a real card. This CPU's rates are measured once and
cached, so that all processes and later runs have the same device. Rates measured beside other programs are used while
these run, or permanently once `oallama tune` has results with them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oallama.core.codec import NotNegative, Positive, from_json
from oallama.core.errors import BridgeError, ProfileError, UsageError
from oallama.core.files import cache_folder
from oallama.core.profile import Profile, ProfileCase
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, PLAIN_LAYOUT
from oallama.device.card import Card, Host
from oallama.device.cards import USUAL_PC
from oallama.device.child import ask_child
from oallama.device.cpu import allowed_cpus, default_threads, thread_counts
from oallama.device.emulated import PARAMETERS, Emulated, card_of, card_parameters
from oallama.device.emulated_link import check_room
from oallama.device.spec import DeviceSpec
from oallama.profile.busy import busy_percent, others_percent
from oallama.profile.machine import fingerprint
from oallama.profile.store import measuring_lock, read_in_cache, read_profile, write_in_cache, write_text_in_cache

K, N = 4096, 11008  # of the matrix whose rates stand for the CPU's: LLaMA-2-7B's gate
TYPE = "Q4_0"
BATCH = 128
LARGE_BATCH = 64  # from so many tokens on, flop/s decide a kernel's time, not bytes/s
TIMEOUT_S = 120.0
_KEY_PARTS = ("cpu", "cpu_features", "ggml_cpu_build", "ggml_version", "n_threads")


def resolved(
    spec: DeviceSpec, n_threads: int | None, rates: Callable[[int], Host] | None = None
) -> tuple[DeviceSpec, int]:
    """The spec with all settings filled in, and the number of CPU threads, which leaves cores for emulated devices.
    Other devices are unchanged.

    rates: measures the CPU (tests). Raises UsageError for a core that is not there or not free, and for a file that
    does not describe a device; BridgeError.
    """
    if spec.emulated is None:
        return spec, n_threads or default_threads()
    if spec.others:
        rates = functools.cache(rates or this_host)  # the same for all, whatever begins or ends meanwhile
        pairs = [resolved(one, n_threads, rates) for one in spec.each]
        return replace(pairs[0][0], others=tuple(one for one, _ in pairs[1:])), min(threads for _, threads in pairs)
    cpus = sorted(allowed_cpus())
    core = cpus[-1] if spec.emulated.cpus is None else spec.emulated.cpus
    n_free = len(set(cpus) - {core})
    threads = n_threads or max(1, min(default_threads(), n_free))
    timed = spec.emulated.values != "real"
    if spec.emulated.cpus is not None and core not in cpus and core >= (os.cpu_count() or 1):
        raise UsageError(f"--device {spec}: unknown core {core}; choose from {', '.join(map(str, cpus))}")
    if timed and n_free < threads:
        raise UsageError(
            f"--device {spec}: the device needs its own core, but --threads {threads} uses all "
            f"{len(cpus)} cores of this process; use --threads {n_free}"
            if n_free
            else f"--device {spec}: the device needs its own core, but this process may only use one; "
            "add values=real, whose timings are meaningless"
        )
    if spec.emulated.values == "real" and not spec.emulated.is_file:  # before anything is measured for it
        check_room(spec.emulated, card_of(spec.emulated).memory_bytes)
    emulated = replace(spec.emulated, cpus=core if n_free else None)
    if emulated.scale is None or emulated.source.endswith(".json"):
        emulated = _scaled(emulated, threads, rates or this_host)
    return replace(spec, emulated=emulated), threads


def _scaled(emulated: Emulated, n_threads: int, rates: Callable[[int], Host]) -> Emulated:
    profile = _profile_of_card(emulated) if emulated.source.endswith(".json") else None
    if emulated.scale is None:
        target_host = USUAL_PC if profile is None else host_of(profile)
        this_machine = rates(n_threads)
        by_bytes = _rounded(target_host.bytes_per_s / this_machine.bytes_per_s)
        emulated = replace(emulated, scale=(by_bytes, _rounded(target_host.flops_per_s / this_machine.flops_per_s)))
    if profile is None:
        return emulated
    return replace(emulated, source=kept_parameters(profile_parameters(profile, emulated)))


def _rounded(factor: float) -> float:
    """Three digits; a CPU that is faster than the usual one leaves the card as it is."""
    return float(f"{max(1.0, factor):.3g}")


#
# the CPU here
#


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Measured rates of a CPU. others_cpu_percent: its use by other programs meanwhile."""

    bytes_per_s: Positive
    flops_per_s: Positive
    others_cpu_percent: NotNegative


def this_host(n_threads: int, say: Callable[[str], None] = lambda sentence: None) -> Host:
    """Rates of this machine's CPU with n_threads threads: weight bytes/s in decode in its fastest layout, flop/s in
    prompts in the plain layout, in which a host with a card computes.

    Measured once for a CPU, a build of ggml and a number of threads. Rates measured beside other programs are measured
    again once these end, unless keep_rates was called. say: called with a note on either. Raises BridgeError,
    ProfileError, UsageError as busy_percent does.
    """
    cpu, path = _rates_file(n_threads)
    rates = _serving_rates(path)
    if rates is None:
        with measuring_lock(path.parent, lambda: None):
            rates = _serving_rates(path)
            if rates is None:
                say(f"measuring the CPU with {n_threads} threads (once, some seconds)")
                answer = ask_child(
                    "oallama.profile.emulate", {"n_threads": n_threads}, TIMEOUT_S,
                    lambda reason: BridgeError(f"cannot measure the CPU's rates: {reason}"), BridgeError,
                )  # fmt: skip
                rates = from_json(CpuRates, answer, "rates")
                _keep_rates(path, rates)
    if rates.others_cpu_percent > busy_percent():
        say(
            f"note: the CPU was timed while other programs used {rates.others_cpu_percent:.0f} % of it, "
            "so it may seem too slow; it is timed again once they end"
        )
    return Host(cpu, rates.bytes_per_s, rates.flops_per_s, "measured here")


def keep_rates(n_threads: int) -> None:
    """Keep the rates of this_host permanently, as results were measured with a device that is scaled by them, and would
    not be found with another scale."""
    _, path = _rates_file(n_threads)
    rates = read_in_cache(CpuRates, path)
    if rates is not None:
        _keep_rates(path, replace(rates, others_cpu_percent=0.0))


def usual_threads(rates: Callable[[int], Host], counts: Sequence[int] | None = None) -> int:
    """The number of threads with the most weight bytes/s in decode, the smallest of equal ones, among those worth
    trying. A single candidate is not measured. rates: measures and caches the CPU's rates (this_host); counts: for
    tests. If they cannot be measured: one thread per physical core."""
    tried = thread_counts() if counts is None else counts
    if len(tried) < 2:
        return tried[0] if tried else default_threads()
    try:
        decoded = {count: rates(count).bytes_per_s for count in sorted(tried)}
    except (BridgeError, ProfileError):
        return max(tried)
    return max(decoded, key=lambda count: decoded[count])  # the first of equal ones


def _rates_file(n_threads: int) -> tuple[str, Path]:
    """(the CPU's name, the file of its rates)."""
    machine = fingerprint(n_threads, "none")
    parts = {name: machine.get(name) for name in _KEY_PARTS}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return str(parts["cpu"]), cache_folder() / f"cpu-rates-v2-{key}.json"


def _serving_rates(path: Path) -> CpuRates | None:
    """The cached rates; None without any, or if other programs ran during the measurement but do not now."""
    rates = read_in_cache(CpuRates, path)
    if rates is None or rates.others_cpu_percent <= busy_percent():
        return rates
    return rates if others_percent() > busy_percent() else None


def _keep_rates(path: Path, rates: CpuRates) -> None:
    with contextlib.suppress(ProfileError):  # measured again next time
        write_in_cache(path, rates)


def _handle(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    """The child's side: the best of some runs, as other programs can only slow them down; and the CPU use of other
    programs before and after."""
    import ggml_bridge
    from ggml_bridge.timing import WORKING_SET_BYTES

    bridge = ggml_bridge.load()
    n_threads = request["n_threads"]
    weight_bytes = K * N * 18 / 32

    def best_s(layout: str, n_tokens: int, runs: int) -> float:
        cold_bytes = WORKING_SET_BYTES if n_tokens == 1 else 0
        with bridge.mul_mat(CPU_DEVICE, layout, TYPE, K, N, 1, 0, n_tokens, cold_bytes, n_threads) as timer:
            return min(timer.run(runs))

    layouts = {PLAIN_LAYOUT, *(name for name in bridge.cpu_layouts() if bridge.layout_supports(name, TYPE, K, N))}
    before_percent = others_percent()
    rates = {
        "bytes_per_s": max(weight_bytes / best_s(layout, 1, 30) for layout in layouts),
        "flops_per_s": 2.0 * K * N * BATCH / best_s(PLAIN_LAYOUT, BATCH, 3),
    }
    return {**rates, "others_cpu_percent": max(before_percent, others_percent())}


#
# a real card's profile
#


def _profile_of_card(emulated: Emulated) -> Profile:
    given = [name for name in ("link", "gbps", "tflops", "latency") if getattr(emulated, name) is not None]
    if given:
        raise UsageError(f"--device {emulated}: {', '.join(given)} apply only to presets; a profile has its own values")
    try:
        profile = read_profile(Path(emulated.source))
    except ProfileError as error:
        raise UsageError(f"--device {emulated}: {error}") from None
    if profile.device == CPU_DEVICE or not profile.link:
        raise UsageError(f"--device {emulated}: this profile has only a CPU; use a profile measured with a card")
    return profile


def host_of(profile: Profile) -> Host:
    """The CPU in the profile of a card."""
    on_cpu = [case for case in profile.cases if case.device == CPU_DEVICE]
    decode = [case.gb_per_s for case in on_cpu if case.n_tokens == 1]
    prompts = [case.gflops for case in on_cpu if case.n_tokens >= LARGE_BATCH]
    plain = [case.gflops for case in on_cpu if case.n_tokens >= LARGE_BATCH and case.layout == PLAIN_LAYOUT]
    if not decode or not prompts:
        raise UsageError("this profile has no CPU timings of one token and of a prompt; give scale=")
    name = str(profile.fingerprint.get("cpu"))
    return Host(name, 1e9 * max(decode), 1e9 * max(plain or prompts), "its profile")


def profile_parameters(profile: Profile, emulated: Emulated) -> str:
    """libggml-emulated's parameters for the card that a profile is of, scaled: its rates for what was not timed, and
    every copy and kernel that was."""
    by_bytes, by_flops = emulated.scale or (1.0, 1.0)
    on_device = [c for c in profile.cases if c.device == profile.device and c.layout == DEVICE_LAYOUT]
    if not on_device:
        raise UsageError(f"--device {emulated}: this profile has no timings of its device")
    memory = emulated.vram or profile.fingerprint.get("device_memory_bytes")
    if not isinstance(memory, int) or memory <= 0:
        raise UsageError(f"--device {emulated}: this profile lacks the card's memory; give vram=")
    if missing := {"h2d_pinned", "h2d_pageable", "d2h"} - profile.link.keys():
        raise UsageError(f"--device {emulated}: this profile has no timings of the copies {', '.join(sorted(missing))}")
    flops_per_s = 1e9 * max(case.gflops for case in on_device)
    issue = profile.link.get("issue_pinned")
    issue_s = issue.alpha_s if issue else 0.0
    launch_s = profile.launch_issue_s or 0.0
    synchronize_s = max(0.0, profile.launch_s - launch_s) / 2  # the rest of an empty launch: its kernel, and the wait
    s_per_byte = {name: max(fit.beta_s_per_byte, 1e-15) for name, fit in profile.link.items()}
    card = Card(
        name=profile.device,
        description=str(profile.fingerprint.get("device_description") or profile.device),
        memory_bytes=memory,
        bytes_per_s=1e9 * max(case.gb_per_s for case in on_device),
        flops_per_s=flops_per_s,
        flops_float_per_s=flops_per_s,
        kernel_s=synchronize_s,
        launch_s=launch_s,
        launch_node_s=0.0,
        copy_s=0.0,
        copy_issue_s=issue_s,
        synchronize_s=synchronize_s,
        pinned_bytes_per_s=1 / s_per_byte["h2d_pinned"],
        pageable_bytes_per_s=1 / s_per_byte["h2d_pageable"],
    )
    lines = []
    out_pinned = "d2h_pinned" if "d2h_pinned" in profile.link else "d2h"  # older profiles
    for way, name in (
        ("in pinned", "h2d_pinned"), ("in pageable", "h2d_pageable"),
        ("out pinned", out_pinned), ("out pageable", "d2h"),
    ):  # fmt: skip
        alpha_s = max(0.0, profile.link[name].alpha_s - issue_s - synchronize_s)
        lines.append(f"copy {way} {alpha_s * by_bytes!r} {s_per_byte[name] * by_bytes!r}")
    lines += [_kernel_line(case, by_bytes, by_flops) for case in on_device]
    head = f"# {PARAMETERS} made of a profile\n" + card_parameters(card.slower(by_bytes, by_flops))
    return head + "\n".join(lines) + "\n"


def _kernel_line(case: ProfileCase, by_bytes: float, by_flops: float) -> str:
    mul_mat = case.mul_mat
    shape = "x".join(map(str, mul_mat.shape))
    seconds = case.seconds * (by_flops if case.n_tokens >= LARGE_BATCH else by_bytes)
    return f"kernel {mul_mat.op} {mul_mat.type} {shape} {mul_mat.n_routed} {case.n_tokens} {seconds!r}"


def kept_parameters(parameters: str) -> str:
    """The path of a file of these parameters, named by what is in it. Raises ProfileError."""
    name = hashlib.sha256(parameters.encode()).hexdigest()[:16]
    path = cache_folder() / f"{PARAMETERS}-{name}.txt"
    if not path.exists():
        write_text_in_cache(path, parameters)
    return str(path)


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(_handle, import_interface_only)
