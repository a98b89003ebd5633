"""Plans of the default model for stock llama.cpp's programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from e2e.forced import ffn, forced

from oallama.core.types import Operator
from oallama.cost.blocks import is_ffn
from oallama.plan.plan import Plan
from oallama.stores.default_model import FILE

MODEL = Path(__file__).resolve().parents[2] / "models" / FILE


def split_plan(path: Path, device: str, slices_only: bool = False) -> Plan:
    """Half of every FFN on the device and half in plain host memory; the attention of half of the layers on either side
    whole, the output on the device. slices_only: nothing but the halves of FFNs is there."""

    def whole(operator: Operator) -> bool:
        return not is_ffn(operator) and (operator.layer is None or operator.layer >= 3)

    case = forced(MODEL, device, ffn(0.5), whole=None if slices_only else whole, layout="CPU", probe=False)
    plan = replace(case.plan, workload=replace(case.plan.workload, n_prompt=32), attention=None)
    plan.check(case.placer.model, case.placer.operators)
    plan.save(path)
    return plan
