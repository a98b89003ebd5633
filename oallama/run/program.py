"""llama-server: finding it, checking its ggml version, and its command line and environment for a plan."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ggml_bridge
from ggml_bridge.library import find_plugin, library_folder, soname
from oallama.core.errors import BridgeError
from oallama.core.files import write_whole
from oallama.core.types import Operator
from oallama.core.units import MIB
from oallama.device.spec import parse_device
from oallama.plan.export import (
    EXTRA_BACKENDS_VARIABLE,
    LIBRARY_VARIABLE,
    PARAMETERS_VARIABLE,
    PLAN_VARIABLE,
    REPORT_VARIABLE,
    Plugin,
    needs_plugin,
    split_devices,
    stock_command,
    stock_device,
)
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.run.address import Address
from oallama.run.load_checks import computes_on_device
from oallama.run.plugin_report import REPORT_FILES
from oallama.run.process import Launch
from oallama.run.stock_backend import stock_backend
from oallama.run.weight_places import usable_plan

NAME: Literal["llama-server"] = "llama-server"
STOCK_CACHE_MIB = 8192  # llama-server's --cache-ram
KEY_VARIABLE = "LLAMA_API_KEY"
PROGRAM_VARIABLE = "OALLAMA_LLAMA_SERVER"  # names the program to use
PLAN_FILE = "plan.oallama"
BUILD = "`oallama setup` builds it with llama.cpp"
PATIENT_BATCH = 64
"""Batch of a prompt on the CPU alone, if a person may stop it. llama-server can only stop between batches, and 512
tokens of an 8B took one core a minute; larger batches are no faster (7.2 tokens/s in batches of 512, 8.4 of 64, 7.6 of
32 and of 16)."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of llama-server besides the placement. address: where it listens. name: the model's name in answers.
    pooling: of embeddings; None: no embeddings. cache_mib: host memory for earlier prompts; -1: no limit; None:
    llama-server's default. n_batch: logical batch in tokens; None: the micro-batch, on the CPU alone PATIENT_BATCH at
    most. projector: path of a vision projector; projector_on_device: where it runs. chats: whether to use the model's
    chat template (untrusted code). shown: whether people open it in a browser. reuses_prefix: whether later prompts may
    share a prefix with earlier ones. more: further options, from checked_options."""

    address: Address
    n_parallel: int
    threads: int
    n_batch: int | None
    name: str
    pooling: str | None
    cache_mib: int | None = None
    projector: str | None = None
    projector_on_device: bool = False
    chats: bool = True
    shown: bool = True
    reuses_prefix: bool = True
    more: tuple[str, ...] = ()


def find_program(wish: str | None) -> Path:
    """The llama-server to use: the requested one, else the one beside llama.cpp's libraries (from set-up), else the one
    on PATH. Raises BridgeError if none is found, or its ggml has another version."""
    try:
        ours = library_folder()
    except ggml_bridge.BridgeError:
        ours = None  # loading the libraries reports that
    if wish is None and ours is not None and os.access(ours / NAME, os.X_OK):
        return ours / NAME
    path = shutil.which(wish or NAME)
    if path is None:
        where = "beside llama.cpp's libraries nor on PATH"
        raise BridgeError(f"no program {wish}; {BUILD}" if wish else f"{NAME} is neither {where}; {BUILD}")
    program = Path(path).absolute()
    if ours is not None and program.parent != ours:
        folder = program.resolve().parent
        version, needed = _ggml_version(folder) or _ggml_version(folder.parent / "lib"), _ggml_version(ours)
        if version != needed:
            problem = f"has ggml {version}" if version else "has no ggml beside it"
            raise BridgeError(f"{program} {problem}, but plans need {needed}; {BUILD}")
    return program


def _ggml_version(folder: Path) -> str | None:
    """The version of the ggml library in a folder, by its file's full name, e.g. libggml-base.so.0.26.0; None if
    unknown."""
    library = folder / soname("ggml-base")
    files = (library.resolve(), *folder.glob(f"{library.name}.*"))
    versions = (file.name.partition(".so.")[2] for file in files)
    return next((version for version in versions if version.count(".") == 2), None)


def launch(
    program: Path,
    plan: Plan,
    operators: Sequence[Operator],
    n_layer: int,
    tensor_names: Sequence[str],
    settings: ServerSettings,
    folder: Path,
    environment: Mapping[str, str],
    counts: bool = False,
) -> Launch:
    """Command line and environment of llama-server for a plan; writes the plan file. plan: with layouts that the CPU
    has. folder: for PLAN_FILE, and the plugin's reports (run/plugin_report.py). counts: count expert uses.

    Raises PlanError for a plan that llama-server cannot run, BridgeError if the plugin is not built, and OSError.
    """
    plugin, backend = None, stock_backend(plan.device, environment)
    tells = counts or parse_device(plan.device).is_emulated  # reports of expert uses, or of the emulated card's time
    if tells or needs_plugin(plan, operators):
        plugin = Plugin(str(find_plugin()), str(folder / PLAN_FILE))
    added, arguments = stock_command(plan, operators, tensor_names, NAME, plugin, backend, counts)
    if plugin is not None:
        added = {**added, REPORT_VARIABLE: str(folder / REPORT_FILES)}
    if plugin is not None and split_names(plan, operators, counts):
        devices = split_devices(plan)  # empty if only experts on the CPU are counted
        write_whole(folder / PLAN_FILE, plugin_text(plan, operators, n_layer, devices, counts=counts))
    if settings.address.api_key is not None:
        added = {**added, KEY_VARIABLE: settings.address.api_key}
    arguments = [str(program), *arguments[1:], *_arguments(settings, plan.workload.n_ubatch, plan.device == "none")]
    return Launch(tuple(arguments), {**clean_environment(environment), **added}, stock_device(plan) != "none")


def _arguments(settings: ServerSettings, n_ubatch: int, on_cpu: bool) -> list[str]:
    """Arguments of the settings. Requests share one KV cache, so that one may use the whole context. Web pages from
    other origins cannot read answers."""
    n_patient = min(n_ubatch, PATIENT_BATCH) if on_cpu else n_ubatch
    arguments = ["--host", settings.address.host, "--port", str(settings.address.port), "--cors-origins", "localhost"]
    arguments += ["--parallel", str(settings.n_parallel), "--kv-unified", "--threads", str(settings.threads)]
    arguments += ["--metrics", "--alias", settings.name]
    if not settings.chats:
        arguments += ["--chat-template", "chatml"]
    if not settings.shown:
        arguments += ["--no-warmup", "--no-ui"]
    if (
        not settings.reuses_prefix
    ):  # else the last tokens of a prompt are computed apart, where attention slides or a state recurs
        arguments += ["--ctx-checkpoints", "0"]
    if settings.cache_mib is not None:
        arguments += ["--cache-ram", str(settings.cache_mib)]
    if settings.projector is not None:
        arguments += ["--mmproj", settings.projector]
        arguments += ["--mmproj-offload" if settings.projector_on_device else "--no-mmproj-offload"]
    if settings.pooling is not None:
        arguments += ["--embeddings", "--batch-size", str(n_ubatch)]  # what embeds takes one pass
        arguments += ["--pooling", settings.pooling] if settings.pooling != "model" else []
    else:
        arguments += ["--batch-size", str(settings.n_batch or n_patient)]
    return [*arguments, *settings.more]


def served_plan(
    plan: Plan, operators: Sequence[Operator], device: str, counts: bool = False
) -> tuple[Plan, tuple[str, ...]]:
    """(the plan for llama-server, warnings): with the device's name there, `none` if the plan does not use it, and
    layouts that this CPU has. counts: as in launch. Raises BridgeError."""
    uses = plan.n_gpu_layers > 0 or plan.stock or computes_on_device(plan)
    named = replace(plan, device=device if uses and plan.device != "none" else "none")
    return usable_plan(named, operators, counts)


def prompt_cache_mib(left: int) -> int:
    """Size of the prompt cache: llama-server's default, but at most `left` bytes."""
    return min(STOCK_CACHE_MIB, left // MIB)


DROPPED_VARIABLES = (
    LIBRARY_VARIABLE, EXTRA_BACKENDS_VARIABLE, PARAMETERS_VARIABLE, PLAN_VARIABLE, REPORT_VARIABLE,
    "MTMD_BACKEND_DEVICE", "AIP_MODE", KEY_VARIABLE, "OALLAMA_API_KEY",
)  # fmt: skip
"""Variables that would change the placement, the address or the key, as those of llama-server's options would."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without DROPPED_VARIABLES, and without variables of llama-server's options."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in DROPPED_VARIABLES and not name.startswith("LLAMA_ARG_")
    }
    return {**kept, "GGML_NO_BACKTRACE": "1"}
