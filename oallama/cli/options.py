"""Options that several commands share. Options that llama.cpp also has keep its spelling."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from oallama.cli.help import Group, option
from oallama.cli.model_file import model_file
from oallama.cli.records import Decorator, Function, as_record, count, parsed
from oallama.core.options import CACHE_TYPES, Options, parse_sizes
from oallama.core.units import parse_memory, parse_share
from oallama.stores.hub_name import HubName, parse_hub_name

SIZE = parsed(parse_memory)
SHARE = parsed(parse_share)
CACHE_TYPE = click.Choice(tuple(CACHE_TYPES))


def complete_file(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Make the shell complete file names."""
    return [CompletionItem(incomplete, type="file")]


def gathered(*options: Decorator) -> Decorator:
    """Add these options; the command gets them as `options`, an Options."""
    return as_record("options", Options, *options, make=Options.given)


def model_argument(function: Function, metavar: str = "MODEL", file_of: Callable[[str], str] = model_file) -> Function:
    """Add MODEL, positional or by -m or -hf; the command gets `model`, the path of its GGUF. metavar: in brackets if
    MODEL is optional; the command then gets None without it. file_of: finds the file."""

    @wraps(function)
    def merged(*args: Any, model_position: str | None, model_option: str | None, **values: Any) -> Any:
        context = click.get_current_context()
        if model_position and model_option:
            raise click.UsageError("MODEL is given twice: as an argument and with -m or -hf", context)
        word = model_position or model_option
        if not word and metavar == "MODEL":
            raise click.UsageError("no model given: name a GGUF file", context)
        return function(*args, model=file_of(word) if word else None, **values)

    positional = click.argument("model_position", metavar=metavar, required=False, type=click.Path())
    return positional(model_option(merged))


def model_option(function: Function) -> Function:
    """Add MODEL as -m or -hf; the command gets `model_option`, which model_file converts to a path."""

    @wraps(function)
    def merged(*args: Any, model_option: str | None, hf_repo: HubName | None, **values: Any) -> Any:
        if model_option and hf_repo:
            raise click.UsageError("MODEL is given twice: with -m and with -hf", click.get_current_context())
        return function(*args, model_option=hf_repo.model if hf_repo else model_option, **values)

    by_file = option(
        "-m", "--model", "model_option", type=click.Path(), metavar="MODEL", group=Group.MODEL,
        help="GGUF file, or a name from `oallama list`.",
    )  # fmt: skip
    by_hub = option(
        "-hf", "--hf-repo", "hf_repo", type=parsed(parse_hub_name), metavar="USER/REPO", group=Group.MODEL,
        help="MODEL on the Hugging Face hub, downloaded if needed.\f USER/REPO:QUANT chooses a quantisation.",
    )  # fmt: skip
    return by_file(by_hub(merged))


threads_option = option(
    "-t", "--threads", type=count(1, 1024), metavar="N", group=Group.DEVICE, show_default="physical cores",
    help="CPU threads.\f On a CPU with fast and slow cores the default is the number that decodes fastest.",
)  # fmt: skip


def _use_backend(_context: click.Context, _parameter: click.Parameter, path: str | None) -> None:
    if path is not None:
        from oallama.device.user_backend import use_backend

        use_backend(path)


backend_option = option(
    "--backend", type=click.Path(), metavar="FILE", expose_value=False, is_eager=True, callback=_use_backend,
    group=Group.DEVICE, advanced=True, show_default="GGML_BACKEND_PATH",
    help="Load this ggml back end, a library built for this ggml.",
)  # fmt: skip


def device_option(function: Function) -> Function:
    """Add --device, and --backend, which may provide the device."""
    by_name = option(
        "-dev", "--device", metavar="NAME", group=Group.DEVICE, show_default="all GPUs",
        help="Device from `oallama devices`.\f Also none, rpc://host:port, or emulated[:card][,key=value…], which "
        "emulates a GPU's timing. Several GPUs as CUDA0,CUDA1, in the order of use: docs/devices.md. Without a GPU the "
        "default is none.",
    )  # fmt: skip
    return by_name(backend_option(function))


vram_option = option(
    "--vram", type=parsed(parse_sizes), metavar="SIZE", group=Group.DEVICE, show_default="free memory",
    help="Plan for a device with this much memory, e.g. 6GiB.\f Several devices: 10GiB,6GiB.",
)  # fmt: skip

vram_fill_option = option(
    "--vram-fill", type=SHARE, default=0.9, show_default=True, metavar="SHARE", group=Group.DEVICE, advanced=True,
    help="Share of the device's memory that may be used.",
)  # fmt: skip

gpu_weights_option = option(
    "--gpu-weights", type=SHARE, metavar="SHARE", group=Group.DEVICE, advanced=True,
    help="Largest share of the weights' bytes on the device, e.g. 50%.",
)  # fmt: skip

PLACEMENT = (device_option, vram_option, vram_fill_option, gpu_weights_option, threads_option)

context_option = option(
    "-c", "--ctx-size", "n_ctx", type=count(0), metavar="N", group=Group.DEVICE, show_default="4096",
    help="Context size; 0: as trained.\f In tokens. The default grows if the workload needs more, and shrinks if the "
    "model was trained on less.",
)  # fmt: skip

n_prompt_option = option(
    "-p", "--n-prompt", type=count(1), default=512, show_default=True, metavar="N_PROMPT", group=Group.WORKLOAD,
    help="Prompt tokens.",
)  # fmt: skip
n_gen_option = option(
    "-n", "--n-gen", type=count(0), default=128, show_default=True, metavar="N_GEN", group=Group.WORKLOAD,
    help="Tokens to generate.",
)  # fmt: skip
WORKLOAD = (n_prompt_option, n_gen_option, context_option)

depth_option = option(
    "-d", "--n-depth", type=count(0), metavar="N", group=Group.WORKLOAD, advanced=True, show_default="0",
    help="Tokens in the KV cache before the prompt, to plan for.",
)  # fmt: skip

batch_option = option(
    "-b", "--batch-size", "n_batch", type=count(1), metavar="N", group=Group.DEVICE, advanced=True,
    show_default="a micro-batch; tune, bench: 2048",
    help="Logical batch size in tokens.\f llama.cpp can stop reading a prompt between two batches.",
)  # fmt: skip
ubatch_option = option(
    "-ub", "--ubatch-size", "n_ubatch", type=count(1), metavar="N", group=Group.DEVICE, advanced=True,
    show_default="512, or more if a plan is predicted to gain", help="Micro-batch size in tokens.",
)  # fmt: skip
type_k_option = option(
    "-ctk", "--cache-type-k", "type_k", type=CACHE_TYPE, metavar="TYPE", group=Group.DEVICE, advanced=True,
    show_default="f16", help="KV cache type for K.",
)  # fmt: skip
type_v_option = option(
    "-ctv", "--cache-type-v", "type_v", type=CACHE_TYPE, metavar="TYPE", group=Group.DEVICE, advanced=True,
    show_default="f16", help="KV cache type for V.",
)  # fmt: skip
flash_attention_option = option(
    "-fa", "--flash-attn", type=click.Choice(["on", "off", "auto"]), metavar="on|off|auto", group=Group.DEVICE,
    advanced=True, show_default="auto",
    help="Flash attention; auto: the plan decides by predicted speed.",
)  # fmt: skip

ATTENTION = (type_k_option, type_v_option, flash_attention_option)
CONTEXT = (context_option, batch_option, ubatch_option, *ATTENTION)

tuned_option = option(
    "--tuned/--no-tuned", default=True, show_default="on", group=Group.PLACEMENT, advanced=True,
    help="Policy auto: run the plan that won in tuning. --no-tuned: run the fastest plan by prediction, without a "
    "test.",
)  # fmt: skip

late_option = option(
    "--late-first-word", is_flag=True, group=Group.PLACEMENT, advanced=True,
    help="Policy auto: also accept a plan that takes more than 1.25 times as long to the first token as llama.cpp's "
    "own placement.",
)  # fmt: skip

retune_option = option(
    "--retune", is_flag=True, group=Group.PLACEMENT, advanced=True,
    help="Discard earlier results, and measure again.",
)  # fmt: skip


tune_option = option(
    "--tune", type=click.Choice(["before", "after", "never"]), default="after", show_default=True,
    metavar="before|after|never", group=Group.PLACEMENT,
    help="When to find the fastest plan.\f For policy auto, if nothing was measured yet. after: answer with stock "
    "llama.cpp's own placement, then measure until a key is typed (on a terminal only); before: measure, then answer; "
    "never: answer with stock's placement, and do not measure.",
)  # fmt: skip

tune_first_option = option(
    "--tune", type=click.Choice(["before", "never"]), default="never", show_default=True, metavar="before|never",
    group=Group.PLACEMENT,
    help="When to find the fastest plan.\f before: before the first answer; never: start at once; policy auto then "
    "uses stock llama.cpp's own placement until a plan was measured.",
)  # fmt: skip

profile_option = option(
    "--profile", type=click.Path(), metavar="FILE", group=Group.PLACEMENT, advanced=True,
    help="Use this profile (from `oallama profile --json`) instead of measuring.",
)  # fmt: skip


json_option = option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def output_option(what: str) -> Decorator:
    """Add -o FILE; the command gets `output`, None for stdout."""
    return option("-o", "--output", type=click.Path(), metavar="FILE", help=f"Write {what} to this file.")
