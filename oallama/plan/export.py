"""A plan as the command line of stock llama.cpp that makes the same placement."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Literal

from oallama.core.errors import PlanError
from oallama.core.types import Operator
from oallama.device.spec import parse_device
from oallama.plan.patterns import host_patterns
from oallama.plan.plan import Plan

Target = Literal["llama-server", "llama-cli"]
TARGETS: tuple[Target, ...] = ("llama-server", "llama-cli")


def export_command(
    plan: Plan, operators: Sequence[Operator], all_tensor_names: Iterable[str], target: Target = "llama-server"
) -> str:
    """The shell-quoted command line. `-ot` knows CPU as the only host buffer type, so layouts are left to llama.cpp,
    which repacks what it can; `--fit off` keeps it from changing the rest.

    Raises PlanError for a plan over `rpc-worker`, whose worker no other program can reach.
    """
    spec = parse_device(plan.device)
    arguments = [target, "-m", plan.record.model_path, "-c", str(plan.workload.n_ctx)]
    arguments += ["-ub", str(plan.workload.n_ubatch), "--fit", "off"]
    if spec.kind == "none":
        return shlex.join([*arguments, "--device", "none", "-ngl", "0"])
    if spec.kind == "rpc-worker":
        raise PlanError(
            f"the plan runs on {spec}, a worker that ends with oallama; start llama.cpp's rpc-server, "
            "plan with --device rpc://host:port, and export that"
        )
    if spec.kind == "cpu-pair":
        raise PlanError("llama.cpp has no second CPU device; plan for a GPU or rpc://host:port and export that")
    if spec.kind == "rpc":
        arguments += ["--rpc", spec.endpoint]
    arguments += ["--device", spec.name if spec.kind == "ggml" else "RPC0", "-ngl", str(plan.n_gpu_layers)]
    for pattern, _ in host_patterns(operators, plan.operators, all_tensor_names):
        if "," in pattern or "=" in pattern:
            raise PlanError(f"{target} cannot take a tensor name with a comma or an equals sign: {pattern}")
        arguments += ["-ot", f"{pattern}=CPU"]
    return shlex.join(arguments)
