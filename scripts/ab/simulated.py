"""Predictions of a cell: the plan of every policy that `oallama bench` would make, on its timeline.

Nothing is run; a plan needs a profile and dry loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ab.cells import Cells
from ab.matrix import Cell
from oallama.bench.arms import STOCK_ARMS, ArmMaker
from oallama.bench.prepare import bench_tests, shared_setting
from oallama.cli.bench import command as bench_command
from oallama.core.errors import OallamaError
from oallama.core.options import Options
from oallama.core.types import Operator
from oallama.place.decide import Rules
from oallama.place.simulate import ENGINES, Course
from oallama.placer import Placer
from oallama.plan.plan import Plan


def simulated(store: Cells, cell: Cell, profile: str | None) -> dict[str, Any]:
    """The cell, with one record for each arm that is a policy; profile: a file, None: this machine's. A policy that
    cannot be planned has an `error`."""
    asked = bench_command.make_context("bench", store.command(cell)[1:]).params
    options = Options.given(**{field.name: asked[field.name] for field in fields(Options) if field.name in asked})
    placer = Placer.of_file(str(store.model_path(cell.model)), options, profile)
    tests = bench_tests(asked["n_prompt"], asked["n_gen"], asked["pairs"], asked["n_depth"])
    setting = shared_setting(placer, tests, asked["cpus"] or (), asked["seed"])
    rules = Rules(asked["affinity"], asked["fill"])
    maker = ArmMaker(placer, setting, tests, rules)
    arms = [{"arm": arm, **_of_arm(maker, arm)} for arm in asked["arms"] if arm not in STOCK_ARMS]
    return {
        "id": cell.id, "device": cell.device, "model": cell.model.name, "cap": cell.cap, "workload": cell.workload,
        "arguments": list(cell.arguments), "profile": Path(profile).name if profile else "", "arms": arms,
    }  # fmt: skip


def _of_arm(maker: ArmMaker, arm: str) -> dict[str, Any]:
    try:
        return _of_plan(maker.placer, Plan.from_json(maker.make(arm).plan))
    except OallamaError as error:
        return {"error": str(error)}


def _of_plan(placer: Placer, plan: Plan) -> dict[str, Any]:
    """Predicted seconds; shares of the time that each stream is busy; of the weights' bytes that the CPU, the device
    after a copy, and the device from its memory multiply with."""
    made = placer.simulate(plan)
    bound = plan.bound
    return {
        "policy": plan.policy,
        "places": _places(plan),
        **asdict(made.predicted),
        "busy": {"prompt": _busy(made.prompt), "token": _busy(made.token)},
        "weights": _weights(plan, placer.operators),
        "bound": None if bound is None else asdict(bound),
        "notes": list(plan.notes),
        "error": "",
    }


def _places(plan: Plan) -> str:
    """Equal for plans that differ in nothing but their policy's name."""
    record = plan
    cuts = [(each.name, each.gg, each.cg, each.cc, *(["alone"] if each.alone else [])) for each in plan.operators]
    text = json.dumps([plan.n_gpu_layers, cuts, record.token_assignment])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _busy(course: Course) -> dict[str, float]:
    return {stream: min(1.0, course.busy_s(stream) / course.seconds) for stream in ENGINES}


def _weights(plan: Plan, operators: Sequence[Operator]) -> Mapping[str, float]:
    n_bytes = {operator.name: operator.bytes for operator in operators}
    total = sum(n_bytes.values())
    return {
        side: sum(getattr(placed, side) * n_bytes[placed.name] for placed in plan.operators) / total
        for side in ("cc", "cg", "gg")
    }
