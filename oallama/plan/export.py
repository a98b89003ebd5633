"""A plan as the command line of stock llama.cpp that makes the same placement; split operators run in the plugin."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from oallama.core.errors import PlanError
from oallama.core.types import CPU_DEVICE, SPLIT_LAYOUT, Attention, Operator
from oallama.device.spec import parse_device
from oallama.plan.patterns import host_patterns, split_names
from oallama.plan.plan import Plan

Target = Literal["llama-server", "llama-cli", "llama-bench"]
TARGETS: tuple[Target, ...] = get_args(Target)

LIBRARY_VARIABLE = "GGML_BACKEND_PATH"  # ggml loads this library beside its own back ends
PLAN_VARIABLE = "OALLAMA_PLAN"
USES_VARIABLE = "OALLAMA_USES"  # the library adds how often experts were used to this file
TIMES_VARIABLE = "OALLAMA_TIMES"  # the library writes how long split blocks took to this file, once a second

# Without OpenMP llama.cpp's own threads spin after each of its graphs, on the cores that the plugin computes with.
_SLEEPING_THREADS = ["--poll", "0"]


@dataclass(frozen=True, slots=True)
class Plugin:
    """Paths that a stock program needs for split operators: libggml-oallama and the text of plan/plugin_text.py."""

    library: str
    plan_file: str


def splits(plan: Plan, operators: Sequence[Operator]) -> bool:
    """Whether the plan splits or streams an operator, so that stock llama.cpp needs the plugin for it."""
    return bool(split_names(plan, operators))


def stock_device(plan: Plan) -> str:
    """ggml's name of the plan's device in a stock program; "none" for a plan without one.

    Raises PlanError for a device that no other program has.
    """
    spec = parse_device(plan.device)
    if spec.is_worker:
        raise PlanError(
            f"the plan runs on {spec}, a worker that ends with oallama; start llama.cpp's rpc-server, "
            "plan with --device rpc://host:port, and export that"
        )
    if spec.is_pair:
        raise PlanError("llama.cpp has no second CPU device; plan for a GPU or rpc://host:port and export that")
    if spec.is_emulated:
        raise PlanError(
            "the plan's device is emulated, which no other program can do; plan for a GPU or rpc://host:port and "
            "export that"
        )
    return {"none": "none", "rpc": "RPC0"}.get(spec.kind, spec.name)


def export_command(
    plan: Plan,
    operators: Sequence[Operator],
    all_tensor_names: Iterable[str],
    target: Target = "llama-server",
    plugin: Plugin | None = None,
    no_repack: bool = False,
) -> str:
    """The shell-quoted command line of stock_command. Raises PlanError as that does."""
    settings, arguments = stock_command(plan, operators, all_tensor_names, target, plugin, no_repack)
    # A quoted NAME=value would be the name of a program; only the value may be quoted.
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(arguments)])


def stock_command(
    plan: Plan,
    operators: Sequence[Operator],
    all_tensor_names: Iterable[str],
    target: Target = "llama-server",
    plugin: Plugin | None = None,
    no_repack: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """(environment variables to set, arguments with the program first). `-ot` knows CPU as the only plain host buffer
    type, so layouts of whole operators are left to llama.cpp, which repacks what it can; `--fit off` keeps it from
    changing the rest. Attention and KV types are the plan's. no_repack: whether they must all stay plain, as
    device/layouts.py has it.

    A plan that splits operators needs `plugin`; one that does not runs without. Raises PlanError for a device that no
    other program has, and where a stock program cannot do what the plan says.
    """
    device, spec = stock_device(plan), parse_device(plan.device)
    needs_plugin = splits(plan, operators)
    if needs_plugin and (plugin is None or device == "none"):
        raise PlanError("the plan splits operators, so it needs a device and the plugin's library and plan file")
    arguments = [target, "-m", plan.model_path, *_workload(plan, target), *_attention(plan.attention)]
    if no_repack:
        if target == "llama-bench":
            raise PlanError(
                "llama-bench has no --no-repack, without which llama.cpp multiplies wrong by some weights on this CPU; "
                "export to llama-server or llama-cli, or compare with `oallama bench`"
            )
        arguments.append("--no-repack")
    if device == "none":
        return {}, [*arguments, "--device", "none", "-ngl", "0"]
    arguments += ["--rpc", spec.endpoint] if spec.kind == "rpc" else []
    arguments += ["--device", device, "-ngl", str(plan.n_gpu_layers)]
    arguments += _overrides(plan, operators, all_tensor_names, target)
    if plugin is None or not needs_plugin:
        return {}, arguments
    return {LIBRARY_VARIABLE: plugin.library, PLAN_VARIABLE: plugin.plan_file}, [*arguments, *_SLEEPING_THREADS]


def _workload(plan: Plan, target: Target) -> list[str]:
    workload = plan.workload
    batch = ["-ub", str(workload.n_ubatch)]
    if target == "llama-bench":  # makes its context as large as its prompts, and changes nothing by itself
        return [*batch, "-p", str(workload.n_prompt), "-n", str(workload.n_gen)]
    return ["-c", str(workload.n_ctx), *batch, "--fit", "off"]


def _attention(planned: Attention | None) -> list[str]:
    if planned is None:
        return []
    types = [("-ctk", planned.type_k), ("-ctv", planned.type_v)]
    return ["-fa", planned.flash_attn, *(word for flag, name in types if name != "f16" for word in (flag, name))]


def _overrides(plan: Plan, operators: Sequence[Operator], all_tensor_names: Iterable[str], target: Target) -> list[str]:
    """`-ot` and its patterns, those of split operators first."""
    separators = ",=;" if target == "llama-bench" else ",="
    overrides: list[str] = []
    streams_tokens = bool(plan.token_assignment)
    for pattern, layout in host_patterns(operators, plan.operators, all_tensor_names, streams_tokens):
        if any(character in pattern for character in separators):
            raise PlanError(f"{target} cannot take a tensor name with one of {separators} in it: {pattern}")
        overrides.append(f"{pattern}={layout if layout == SPLIT_LAYOUT else CPU_DEVICE}")
    if target == "llama-bench":  # a second -ot would be a second benchmark
        return ["-ot", ";".join(overrides)] if overrides else []
    return [word for override in overrides for word in ("-ot", override)]
