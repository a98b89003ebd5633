"""JSON that is read back, and then used: plans, profiles, descriptions of machines, and what the cache keeps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from worlds import model_info, placed, some_plan, weight

from oallama.core.codec import from_json, to_json
from oallama.core.errors import OallamaError
from oallama.core.routing import ExpertCounts, LayerCounts
from oallama.core.types import Attention, Predicted, StreamSettings, devices_with_n_g
from oallama.cost.experts import expert_use
from oallama.cost.kernels import Kernels
from oallama.device.emulated import Emulated
from oallama.device.machines import machine_of
from oallama.plan.export import TARGETS, Plugin, export_command
from oallama.plan.patterns import host_patterns
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.profile.emulate import host_of, profile_parameters
from oallama.profile.history import adopted, history_path, read_history, write_history
from oallama.profile.routing import counted, read_routing, routing_path, write_routing
from oallama.profile.store import FOLDER_VARIABLE, profile_from_json, read_profile
from oallama.report.plan import plan_sentences
from oallama.report.profile import profile_tables
from oallama.tuned.result import Key
from oallama.tuned.store import read_result, result_path

GOLDEN = Path(__file__).parents[1] / "golden"


def stored(path: str) -> Any:
    return json.loads((GOLDEN / path).read_text(encoding="utf-8"))


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "input.json"
    path.write_bytes(raw)
    return path


@contextlib.contextmanager
def cache_in(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(folder))
        yield


def try_all(*works: Callable[[], Any]) -> None:
    """One refusal must not hide what comes after it."""
    for work in works:
        with contextlib.suppress(OallamaError):
            work()


MODEL = model_info(n_embd=256, n_ff=512, n_expert=4, n_expert_used=2, n_vocab=1000, fingerprint="ab" * 32)
OPERATORS = (
    weight(role="attn_q", k=256, n=256, layer=0, type_name="Q4_K"),
    weight(role="ffn_up", k=256, n=512, layer=0),
    weight(role="ffn_down", k=512, n=256, layer=0),
    replace(weight(role="ffn_up", k=256, n=1024, layer=1, type_name="F16"), gate_up=True),
    weight(role="ffn_down_exps", k=512, n=256, layer=1, n_expert=4, used=2, type_name="Q8_0"),
    weight(role="output", k=256, n=1000, type_name="F16"),
)
NAMES = [operator.name for operator in OPERATORS]
SHARES = ((0.0, 0.0), (0.25, 0.25), (0.5, 0.25), (0.5, 0.0), (0.0, 0.5), (1.0, 0.0))
SPLIT = some_plan(
    [placed(name, gg=gg, cg=cg, layout="CPU" if gg < 1 else None)
     for name, (gg, cg) in zip(NAMES, SHARES, strict=True)],
    model_fingerprint=MODEL.fingerprint, device="emulated:rtx3060-12,vram=6442450944,scale=8/2", n_gpu_layers=2,
    token_assignment=((8, 0), (512, 384)), predicted=Predicted(0.25, 0.0125, 0.65), notes=("a note",),
    streaming=StreamSettings(3, "layer", True, 65536, 10**10), attention=Attention("on", "q8_0", "f16"),
)  # fmt: skip
WHOLE = some_plan(
    [placed(name, gg=float(i % 2)) for i, name in enumerate(NAMES)],
    model_fingerprint=MODEL.fingerprint,
    extra={"comment": "by hand", "more": [1, {"x": 2.5}]},
)


def check_plan(raw: bytes, folder: Path) -> None:
    """Load it, write and load it again, make of it all that plans are for, and hold it against a model."""
    plan = Plan.load(path := write(folder, raw))
    plan.save(path)
    assert Plan.load(path) == plan, "a plan that was written is read back otherwise"
    assert len(plan.fingerprint) == 64
    plugin = Plugin("lib", "plan")
    try_all(
        lambda: plugin_text(plan, OPERATORS, MODEL.n_layer, ["RPC0"]),
        lambda: plugin_text(plan, OPERATORS, MODEL.n_layer, ["RPC0"], every_operator=True),
        lambda: host_patterns(OPERATORS, plan.operators, NAMES, devices_with_n_g(plan.split_settings)),
        lambda: plan_sentences(plan, OPERATORS),
        *(lambda target=target: export_command(plan, OPERATORS, NAMES, target, plugin) for target in TARGETS),
    )
    plan.check(MODEL, OPERATORS)


def profiles() -> list[Any]:
    """Recorded ones, with a few of each kind of case, so that a change often hits something else."""
    made = [stored("profile-v1.json"), stored("corpus/profile-emulated-rtx3060.json")]
    for document in made:
        document["fingerprint"] = {k: v for k, v in document["fingerprint"].items() if not isinstance(v, list)}
        for key in ("cases", "rest", "skipped", "sharing"):
            document[key] = document.get(key, [])[:3]
            for row in document[key]:
                if "samples" in row:
                    row["samples"] = row["samples"][:2]
    return made


def check_profile(raw: bytes, folder: Path) -> None:
    """Read it, write and read it again, show it, and take kernels' times from it."""
    profile = read_profile(write(folder, raw))
    written = json.dumps(to_json(profile), allow_nan=False)
    again = profile_from_json(json.loads(written))
    assert again.cases == profile.cases, "a profile that was written is read back otherwise"
    profile_tables(profile)
    try_all(
        lambda: profile_parameters(profile, Emulated("card.json", scale=(2.0, 3.0))),
        lambda: host_of(profile),
    )
    kernels = Kernels(profile)
    for what in {case.mul_mat for case in profile.cases if case.mul_mat.op in ("MUL_MAT", "MUL_MAT_ID")}:
        operator = replace(OPERATORS[0], op=what.op, type=what.type, shape=what.shape, n_expert_used=what.n_expert_used)
        try_all(lambda of=operator: [kernel.at(n) for kernel in kernels.on_host(of).values() for n in (1, 300)])
        kernels.on_device(operator)


def check_tune_result(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none: nothing is raised, and what is kept can be used as `run` does."""
    key = from_json(Key, stored("stored/verdict-v4.json")["key"], "the key")
    with cache_in(folder):
        result_path(key).write_bytes(raw)
        result = read_result(key)
    if result is None:
        raise OallamaError("no verdict that can be used")
    json.dumps(result.document)
    try_all(*(partial(result.plan, each.plan) for each in result.classes if each.settled))


def check_routing(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none; what is read is judged, counted on, and written again."""
    expert_counts = ExpertCounts({0: LayerCounts(2, (1, 1, 1, 1))}, {})
    with cache_in(folder):
        routing_path(MODEL.fingerprint).write_bytes(raw)
        routing = read_routing(MODEL.fingerprint, 4, 2)
        if routing is None:
            raise OallamaError("no routing that can be used")
        for known in (routing, counted(routing, expert_counts)):
            expert_use(known)
        write_routing(routing)
        assert read_routing(MODEL.fingerprint, 4, 2) == routing, "a routing that was written is read back otherwise"


def check_history(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none; what is read is written again, and a profile can be corrected by it."""
    machine, timings = "0" * 16, "c" * 16
    with cache_in(folder):
        history_path(MODEL.fingerprint, machine).write_bytes(raw)
        history = read_history(MODEL.fingerprint, machine, timings)
        if not history.seen:
            raise OallamaError("no history that can be used")
        write_history(adopted(history), machine)
        assert read_history(MODEL.fingerprint, machine, timings) == adopted(history), "it is read back otherwise"


def machines() -> list[Any]:
    """The card by its name, and by its rates."""
    machine = machine_of("pc-12gb")
    host = {**asdict(machine.host), "flops_by_type": [["Q4_0", 1e11]], "dram_bytes_per_s": 5e10}
    return [
        {"name": "mine", "description": "a machine", "host": host, "card": "rtx3090"},
        {"name": "mine", "host": asdict(machine.host), "card": asdict(machine.card)},
    ]


def check_machine(raw: bytes, folder: Path) -> None:
    """Read it, and price a kernel on either side."""
    machine = machine_of(str(write(folder, raw)))
    assert machine.host.kernel_seconds(1e9, 1e6, "Q4_0") > 0 and machine.host.kernel_seconds(1e9, 1e6, None) > 0
    assert machine.card.kernel_seconds(1e9, 1e6, True) > 0


DOCUMENTS: dict[str, tuple[list[Any], Callable[[bytes, Path], None]]] = {
    "plan": ([SPLIT.to_json(), WHOLE.to_json()], check_plan),
    "profile": (profiles(), check_profile),
    "verdict": ([stored("stored/verdict-v4.json")], check_tune_result),
    "routing": ([stored("stored/routing-v1.json")], check_routing),
    "history": ([stored("stored/history-v1.json")], check_history),
    "machine": (json.loads(json.dumps(machines())), check_machine),
}
"""Sound documents of each kind, and what reads them."""
