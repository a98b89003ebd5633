"""The measuring process: `python -m oallama.profile.child`, started by profiler.py.

It loads native code and opens the device, so that a crash of either ends this process only. It sends each part of the
profile as soon as it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oallama import __version__
from oallama.core.codec import from_json, to_json
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE
from oallama.core.units import MIB
from oallama.profile.busy import OTHERS_PERCENT, Others
from oallama.profile.timing import TimingPolicy
from oallama.profile.wanted import Wanted

if TYPE_CHECKING:
    from ggml_bridge import Bridge
    from oallama.device.opening import OpenDevice
    from oallama.profile.tasks import Fragment

MODULE = "oallama.profile.child"
TRIED_S = 4.0  # a task that took so long is not measured again where the emulated device was late
STALL_S = 180.0  # a task of a device that takes longer ends this process
PINNED_TRIED = 128 * MIB  # as much as copies are timed with

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A requested measurement: everything of `want` that `profile` lacks."""

    device_spec: str
    n_threads: int
    want: Wanted
    profile: Profile
    policy: TimingPolicy


def handle(message: Message, progress: Callable[[Message], None]) -> Message:
    """Measure all that is missing. Sends {"fragment"}, then {"weight"} of all tasks, and for each task {"start",
    "device", "layout", "kind"} and {"fragment", "done"}."""
    from oallama.device.emulated_link import Watch
    from oallama.device.load_params import load_bridge
    from oallama.device.native_abort import Watchdog
    from oallama.device.opening import open_device
    from oallama.profile.link import contention_tasks, link_tasks
    from oallama.profile.tasks import Session, mul_mat_tasks, non_matmul_tasks

    request = from_json(ProfileRequest, message, "request")
    others = Others()
    progress({"fragment": _busy(others, request.profile)})
    bridge = load_bridge()
    with open_device(request.device_spec) as device:
        details = device_details(bridge, device)
        details["fingerprint"]["policy"] = to_json(request.policy)
        progress({"fragment": details})
        session = Session(
            bridge=bridge,
            ggml_device=device.name if device.info else CPU_DEVICE,
            profile=replace(request.profile, device=details["device"]),
            want=request.want,
            n_threads=request.n_threads,
            policy=request.policy,
            clock=time.perf_counter,
        )
        tasks = [*link_tasks(session), *mul_mat_tasks(session), *non_matmul_tasks(session), *contention_tasks(session)]
        progress({"weight": sum(task.weight for task in tasks)})
        watch = Watch(device.spec.is_emulated)
        with Watchdog(device.name, STALL_S) as watchdog:
            for task in tasks:
                watchdog.beat()
                progress({"fragment": _busy(others, request.profile)})
                progress({"start": task.label, "device": task.device, "layout": task.layout, "kind": task.kind})
                fragment, _ = watch.measured(task.run, TRIED_S)
                progress({"fragment": fragment, "done": task.weight})
    return {}


def _busy(others: Others, known: Profile) -> Fragment:
    """CPU use of other programs, where it is time to look; at least while the rest was measured."""
    percent = others.looked()
    if percent is None:
        return {}
    return {"fingerprint": {OTHERS_PERCENT: max(percent, known.fingerprint.get(OTHERS_PERCENT, 0.0))}}


def device_details(bridge: Bridge, device: OpenDevice) -> Fragment:
    """Facts of this machine from native code. device: the name under which its cases are stored."""
    info = device.info
    fingerprint = {
        "oallama": __version__,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ggml_commit": bridge.ggml_commit(),
        "cpu_layouts": bridge.cpu_layouts(),
        "cpu_kernels": bridge.cpu_features(),
        "device_name": device.name,
        "device_description": info.description if info else None,
        "device_backend": info.backend if info else None,
        "device_type": info.type if info else None,
        "device_memory_bytes": info.memory_total if info else None,
        "device_host_buffer": info.host_buffer if info else None,
        "device_asynchronous": info.asynchronous if info else None,
        "device_pins": bridge.pins(device.name, PINNED_TRIED) if info else None,
        "device_takes_residents": bridge.device(device.name).takes_residents if info else None,
    }
    return {"device": device.name if info else CPU_DEVICE, "fingerprint": fingerprint}


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(handle, import_interface_only)
