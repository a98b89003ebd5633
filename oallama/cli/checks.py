"""The checks of `oallama doctor`: each runs the code in question and reports its result, or a failure with its remedy.

Each runs in a child process (`python -m oallama.cli.checks`), so that a crash of native code is a failed check.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from oallama.cli.output import busy
from oallama.core.errors import BridgeError, DeviceError, OallamaError
from oallama.core.types import Operator
from oallama.core.units import format_bytes

TIMEOUT_S = 240.0
WORST_NMSE = 1e-3  # bound between CPU and device with quantised weights: far above rounding, far below a wrong kernel
TOKENS = 16

_SET_UP = "run `oallama setup --refresh`"


@dataclass(frozen=True, slots=True)
class Check:
    """`work` returns its result as a phrase, or raises; `remedy` is what to do about a failure."""

    name: str
    work: Callable[[], str]
    remedy: str


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The result of a check; `remedy` is empty where it passed."""

    name: str
    ok: bool
    detail: str
    remedy: str
    seconds: float


def outcomes() -> Iterator[CheckOutcome]:
    from ggml_bridge.child import run_in_child

    for check in CHECKS:
        start_s = time.perf_counter()
        try:
            with busy(f"checking: {check.name}"):
                answer = run_in_child("oallama.cli.checks", {"check": check.name}, timeout_s=TIMEOUT_S)
            detail, ok = str(answer["detail"]), True
        except Exception as error:  # any failure is the check's result
            detail, ok = " ".join(str(error).split()) or type(error).__name__, False
        yield CheckOutcome(check.name, ok, detail, "" if ok else check.remedy, time.perf_counter() - start_s)


def check_llama() -> str:
    """Check versions, a single ggml registry, struct layouts, and op and type numbers, as `load` does."""
    bridge = _bridge()
    version = bridge.libraries.llama_cpp.__version__
    return f"llama-cpp-python {version}, ggml {bridge.ggml_version()}, {len(bridge.types())} tensor types"


def check_devices() -> str:
    from oallama.device.opening import list_devices

    names = [device.name for device in list_devices()]
    if "CPU" not in names:
        raise BridgeError(f"ggml lists no CPU device, only {', '.join(names) or 'nothing'}")
    return ", ".join(names)


def check_layouts() -> str:
    from ggml_bridge.layouts import faults_of_kinds
    from ggml_bridge.selftest import check_layouts as multiply

    result_of_layout = multiply()
    faults = faults_of_kinds(result_of_layout)
    wrong = [
        f"{layout}: {result}" for layout, result in result_of_layout.items() if result != "ok" and layout not in faults
    ]
    if wrong:
        raise BridgeError("; ".join(wrong))
    return ", ".join(f"not {name}" if name in faults else name for name in result_of_layout)


def check_cpu_run() -> str:
    import numpy as np

    logits, _ = _default_model_logits("none", lambda operator: 0.0)
    if not np.isfinite(logits).all():
        raise OallamaError("the default model's logits are not finite")
    return f"the default model, {TOKENS} tokens"


def check_split_backend() -> str:
    """Load the plugin, which checks ggml's version, struct layouts, op and type numbers; its devices are then in the
    registry."""
    from oallama.device.opening import SPLIT_BACKEND

    bridge = _bridge()
    path = bridge.split().path
    names = [device.name for device in bridge.devices(ask_servers=False) if device.backend == SPLIT_BACKEND]
    if not names:
        raise BridgeError(f"{path} was loaded, but ggml does not list it")
    return f"{path.name} registers {', '.join(names)}"


def check_split_run() -> str:
    """Check that the first layer's FFN computes the same on the CPU and an emulated card as on the CPU alone."""
    import numpy as np

    on_cpu, _ = _default_model_logits("none", lambda operator: 0.0)
    on_both, device_bytes = _default_model_logits("emulated:vram=1GiB,scale=1,values=real", _half_of_first_ffn)
    if device_bytes <= 0 or not _bridge().split().stats().n_graphs:
        raise BridgeError("llama.cpp gave the split back end nothing to compute")
    nmse = float(np.sum((on_both - on_cpu) ** 2) / np.sum((on_cpu - on_cpu.mean()) ** 2))
    if not nmse <= WORST_NMSE:
        raise DeviceError(f"both sides and the CPU alone differ: NMSE {nmse:.2g}, at most {WORST_NMSE:g}")
    return f"one FFN on two sides ({format_bytes(device_bytes)} on the emulated card), NMSE {nmse:.1g} against the CPU"


def check_cache() -> str:
    from oallama.core.files import cache_folder

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"oallama")
    return str(folder)


def _bridge() -> Any:
    from oallama.device.load_params import load_bridge

    return load_bridge()


def _half_of_first_ffn(operator: Operator) -> float:
    """Return gg: about half of gate, up and down of layer 0, cut at the same element of their common extent."""
    from oallama.model.cut import cut_extent, cut_granularity

    if operator.layer != 0 or operator.role not in ("ffn_gate", "ffn_up", "ffn_down"):
        return 0.0
    extent, step = cut_extent(operator), cut_granularity(operator)
    return extent // 2 // step * step / extent


def _default_model_logits(device: str, gg: Callable[[Operator], float]) -> tuple[Any, int]:
    """Return the logits [TOKENS, n_vocab] of the default model with the share gg of each operator on `device`, and the
    bytes on the device."""
    from oallama.core.types import OperatorPlacement, Workload
    from oallama.placer import Placer
    from oallama.planner.placement import unmeasured_cpu_record
    from oallama.stores.default_model import default_model

    placer = Placer.load(default_model(), device=device)
    on_cpu = unmeasured_cpu_record(placer.model, placer.operators, Workload(TOKENS, 0, 256, 64), 0)
    shares = tuple(OperatorPlacement(o.name, gg(o), 0.0, 1.0 - gg(o)) for o in placer.operators)
    plan = replace(on_cpu, device=device, operators=shares)
    with placer.llama(plan, logits_all=True) as llama:
        llama.eval(list(range(1, TOKENS + 1)))
        return llama.scores[:TOKENS].copy(), llama.memory.device_bytes


CHECKS = (
    Check("python", lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""),
    Check("libraries", check_llama, "run `oallama setup`"),
    Check("devices", check_devices, f"the build of llama.cpp is broken: {_SET_UP}"),
    Check("layouts", check_layouts, f"this build computes wrong on this CPU: {_SET_UP}, which works around it"),
    Check("run on the CPU", check_cpu_run, "see the message; OALLAMA_DEBUG=1 oallama run -p Hello shows more"),
    Check(
        "split backend",
        check_split_backend,
        "reinstall oallama with its native part (in a checkout: python3 scripts/setup_env.py --refresh)",
    ),
    Check(
        "split run",
        check_split_run,
        "use --policy oato, layers or cpu, which need no split back end, and report this message",
    ),
    Check("cache", check_cache, "make the folder writable, or set OALLAMA_CACHE_DIR to another"),
)
"""The checks, ordered such that the first failure is the one to repair."""


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    works = {check.name: check.work for check in CHECKS}
    child_main(lambda request, _progress: {"detail": works[request["check"]]()})
