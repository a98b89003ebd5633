"""JSON that is read back, and then used: plans, profiles, verdicts of the gate, descriptions of machines."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutation import damaged_json
from oallama.core.errors import OallamaError
from oallama.core.routing import Tally, Traffic
from oallama.core.types import (
    Attention,
    MemoryLedger,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Predicted,
    StreamSettings,
    Workload,
)
from oallama.cost.experts import expert_use
from oallama.cost.kernels import Kernels
from oallama.device.emulated import Emulated
from oallama.device.machines import machine_of
from oallama.gate.store import read_verdict, verdict_path
from oallama.plan.export import TARGETS, Plugin, export_command
from oallama.plan.patterns import host_patterns
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.profile.emulate import host_of, profile_parameters
from oallama.profile.history import adopted, history_path, read_history, write_history
from oallama.profile.routing import counted, read_routing, routing_path, write_routing
from oallama.profile.store import FOLDER_VARIABLE, profile_from_json, profile_to_json, read_profile
from oallama.report.plan import plan_sentences
from oallama.report.profile import profile_tables

ROOT = Path(__file__).resolve().parents[2]


def maker(bases: Callable[[], tuple[Any, ...]]) -> Callable[[Random], bytes]:
    """Inputs made of these documents."""

    @functools.cache
    def sound() -> tuple[str, ...]:
        return tuple(json.dumps(document) for document in bases())

    return lambda random: damaged_json(random, random.choice(sound()))


@contextlib.contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """mock.patch.dict would write the whole environment anew, which took a fifth of the time of an input."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def _refused(work: Callable[[], Any]) -> Any:
    """What it gives; None where it says why not. One refusal must not hide what comes after it."""
    with contextlib.suppress(OallamaError):
        return work()
    return None


#
# plans
#

MODEL = ModelInfo("m.gguf", "llama", "m", 2, 256, 512, 8, 2, 32, 32, 4, 2, 1000, 512, 1, "ab" * 32)
OPERATORS = (
    Operator("blk.0.attn_q.weight", 0, "attn_q", "MUL_MAT", "Q4_K", (256, 256, 1), 36864, 1.0),
    Operator("blk.0.ffn_up.weight", 0, "ffn_up", "MUL_MAT", "Q4_0", (256, 512, 1), 73728, 1.0),
    Operator("blk.0.ffn_down.weight", 0, "ffn_down", "MUL_MAT", "Q4_0", (512, 256, 1), 73728, 1.0),
    Operator("blk.1.ffn_up.weight", 1, "ffn_up", "MUL_MAT", "F16", (256, 1024, 1), 524288, 1.0, gate_up=True),
    Operator("blk.1.ffn_down_exps.weight", 1, "ffn_down_exps", "MUL_MAT_ID", "Q8_0", (512, 256, 4), 557056, 0.5, 2),
    Operator("output.weight", None, "output", "MUL_MAT", "F16", (256, 1000, 1), 512000, 1.0),
)


@functools.cache
def plans() -> tuple[Any, ...]:
    """A plan that splits and streams, and one that does not."""
    placed = [(0.0, 0.0, 1.0), (0.25, 0.25, 0.5), (0.5, 0.25, 0.25), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5), (1.0, 0.0, 0.0)]
    split = Plan(
        model_path="m.gguf",
        model_fingerprint=MODEL.fingerprint,
        machine_fingerprint="cd" * 32,
        device="emulated:rtx3060-12,vram=6442450944,scale=8/2",
        policy="split",
        workload=Workload(64, 32, 512, 256),
        operators=tuple(
            OperatorPlacement(o.name, *cut, "CPU" if cut[2] else None) for o, cut in zip(OPERATORS, placed, strict=True)
        ),
        token_assignment=((8, 0), (512, 384)),
        n_gpu_layers=2,
        memory=MemoryLedger(6000, 0.9, 5400, 3000, 2000, 512, 256, 64, 1632),
        predicted=Predicted(0.25, 0.0125, 0.65),
        streaming=StreamSettings(3, "layer", True, 65536, 10**10),
        attention=Attention("on", "q8_0", "f16"),
        notes=("a note",),
    )
    whole = tuple(OperatorPlacement(o.name, float(i % 2), 0.0, float(1 - i % 2)) for i, o in enumerate(OPERATORS))
    plain = replace(split, operators=whole, token_assignment=(), streaming=None, attention=None, notes=())
    plain = replace(plain, device="CUDA0", predicted=None, extra={"comment": "by hand", "more": [1, {"x": 2.5}]})
    return (split.to_json(), plain.to_json())


def check_plan(raw: bytes, folder: Path) -> None:
    """Load it, write and load it again, hold it against a model, and make of it all that plans are for."""
    path = folder / "plan.json"
    path.write_bytes(raw)
    plan = Plan.load(path)
    plan.save(path)
    assert Plan.load(path) == plan, "a plan that was written is read back otherwise"
    assert len(plan.fingerprint) == 64
    refusal: OallamaError | None = None
    try:
        plan.check(MODEL, OPERATORS)
    except OallamaError as error:
        refusal = error
    for work in (
        lambda: plugin_text(plan, OPERATORS, MODEL.n_layer, "RPC0"),
        lambda: plugin_text(plan, OPERATORS, MODEL.n_layer, "RPC0", every_operator=True),
        lambda: host_patterns(OPERATORS, plan.operators, [o.name for o in OPERATORS], bool(plan.token_assignment)),
        lambda: plan_sentences(plan, OPERATORS),
    ):
        _refused(work)
    for target in TARGETS:
        _refused(lambda target=target: export_command(plan, OPERATORS, [o.name for o in OPERATORS], target,
                                                      Plugin("lib", "plan")))  # fmt: skip
    if refusal is not None:
        raise refusal


#
# profiles
#


@functools.cache
def profiles() -> tuple[Any, ...]:
    """Recorded ones, with a few of each kind of case, so that a change often hits something else."""
    golden = ROOT / "tests" / "golden"
    made = []
    for path in (golden / "profile-v1.json", golden / "corpus" / "profile-emulated-rtx3060.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        document["fingerprint"] = {k: v for k, v in document["fingerprint"].items() if not isinstance(v, list)}
        for key in ("cases", "rest", "skipped", "sharing"):
            rows = document.get(key, [])[:3]
            document[key] = [{**row, **({"samples": row["samples"][:2]} if "samples" in row else {})} for row in rows]
        made.append(document)
    return tuple(made)


def check_profile(raw: bytes, folder: Path) -> None:
    """Read it, write and read it again, show it, and take kernels' times from it."""
    path = folder / "profile.json"
    path.write_bytes(raw)
    profile = read_profile(path)
    written = json.dumps(profile_to_json(profile), allow_nan=False)
    assert profile_from_json(json.loads(written)).cases == profile.cases, (
        "a profile that was written is read back otherwise"
    )
    profile_tables(profile)
    _refused(lambda: profile_parameters(profile, Emulated("card.json", scale=(2.0, 3.0))))
    _refused(lambda: host_of(profile))
    kernels = Kernels(profile)
    for what in {case.mul_mat for case in profile.cases if case.mul_mat.op in ("MUL_MAT", "MUL_MAT_ID")}:
        operator = replace(OPERATORS[0], op=what.op, type=what.type, shape=what.shape, n_expert_used=what.n_expert_used)
        _refused(
            lambda operator=operator: [kernel.at(n) for kernel in kernels.on_host(operator).values() for n in (1, 300)]
        )
        kernels.on_device(operator)


#
# verdicts
#


@functools.cache
def stored(name: str) -> Any:
    """A file of the cache as an earlier run left it."""
    return json.loads((ROOT / "tests" / "golden" / "stored" / f"{name}.json").read_text(encoding="utf-8"))


def verdicts() -> tuple[Any, ...]:
    return (stored("gate-v2"),)


def check_verdict(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none: nothing is raised, and what is kept can be used as `run` does."""
    with _cache_in(folder):
        key = stored("gate-v2")["key"]
        verdict_path(key).write_bytes(raw)
        verdict = read_verdict(key)
    if verdict is None:
        raise OallamaError("no verdict that can be used")
    json.dumps(verdict.document)


#
# routings
#


def routings() -> tuple[Any, ...]:
    return (stored("routing-v1"),)


def check_routing(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none; what is read is judged, counted on, and written again."""
    traffic = Traffic({0: Tally(2, (1, 1, 1, 1))}, {})
    with _cache_in(folder):
        routing_path(MODEL.fingerprint).write_bytes(raw)
        routing = read_routing(MODEL.fingerprint, 4, 2)
        if routing is None:
            raise OallamaError("no routing that can be used")
        for known in (routing, counted(routing, traffic)):
            expert_use(known)
        write_routing(routing)
        assert read_routing(MODEL.fingerprint, 4, 2) == routing, "a routing that was written is read back otherwise"


#
# histories
#


def histories() -> tuple[Any, ...]:
    return (stored("history-v1"),)


def check_history(raw: bytes, folder: Path) -> None:
    """A file that is no use is as good as none; what is read is written again, and a profile can be corrected by it."""
    machine, timings = "0" * 16, "c" * 16
    with _cache_in(folder):
        history_path(MODEL.fingerprint, machine).write_bytes(raw)
        history = read_history(MODEL.fingerprint, machine, timings)
        if not history.seen:
            raise OallamaError("no history that can be used")
        write_history(adopted(history), machine)
        assert read_history(MODEL.fingerprint, machine, timings) == adopted(history), "it is read back otherwise"


#
# machines
#


@functools.cache
def machines() -> tuple[Any, ...]:
    """A described machine: the card by its name, and by its rates."""
    machine = machine_of("pc-12gb")
    host = {**asdict(machine.host), "flops_by_type": [["Q4_0", 1e11]], "dram_bytes_per_s": 5e10}
    return (
        {"name": "mine", "description": "a machine", "host": host, "card": "rtx3090"},
        {"name": "mine", "host": asdict(machine.host), "card": asdict(machine.card)},
    )


def check_machine(raw: bytes, folder: Path) -> None:
    """Read it, and price a kernel on either side."""
    path = folder / "machine.json"
    path.write_bytes(raw)
    machine = machine_of(str(path))
    for seconds in (
        machine.host.kernel_seconds(1e9, 1e6, "Q4_0"),
        machine.host.kernel_seconds(1e9, 1e6, None),
        machine.card.kernel_seconds(1e9, 1e6, True),
    ):
        assert seconds > 0, f"a kernel takes {seconds} s"
