"""Options of llama-server that users may pass after `--`: those that change neither the placement, nor memory that a
plan counts, nor access to the server. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from oallama.core.errors import UsageError

_SAMPLING = (
    "--samplers --sampler-seq --sampling-seq --temp --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma "
    "--xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty --presence-penalty "
    "--frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker "
    "--adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent "
    "-l --logit-bias -s --seed"
)
_REASONING = (
    "--reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message "
    "--chat-template-kwargs"
)
_ADAPTERS = ("--lora", "--lora-scaled")
_SLOTS = "-sps --slot-prompt-similarity --cache-reuse -ctxcp --ctx-checkpoints --swa-checkpoints --spec-type"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VALUED = _words(f"{_SAMPLING} {_REASONING} {_SLOTS}") | set(_ADAPTERS)
FLAGS = _words(
    "--ignore-eos --reasoning-preserve --no-reasoning-preserve --slots --no-slots --cache-prompt --no-cache-prompt "
    "--cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift --lora-init-without-apply"
)
VARIABLES = _words(
    "LLAMA_ARG_TEMPERATURE LLAMA_ARG_TOP_K LLAMA_ARG_TOP_P LLAMA_ARG_MIN_P LLAMA_ARG_REPEAT_PENALTY "
    "LLAMA_ARG_PRESENCE_PENALTY LLAMA_ARG_FREQUENCY_PENALTY LLAMA_ARG_THINK LLAMA_ARG_REASONING "
    "LLAMA_ARG_REASONING_EFFORT LLAMA_ARG_THINK_BUDGET LLAMA_ARG_THINK_BUDGET_MESSAGE LLAMA_ARG_REASONING_PRESERVE "
    "LLAMA_ARG_CHAT_TEMPLATE_KWARGS LLAMA_ARG_CTX_CHECKPOINTS LLAMA_ARG_CACHE_IDLE_SLOTS LLAMA_ARG_CACHE_PROMPT "
    "LLAMA_ARG_CACHE_REUSE LLAMA_ARG_ENDPOINT_SLOTS LLAMA_ARG_CONTEXT_SHIFT"
)
"""Environment variables of such options, which are passed on too."""

NGRAM_DRAFTS = {"ngram-simple": 48, "ngram-map-k": 48, "ngram-map-k4v": 48, "ngram-mod": 64, "ngram-cache": 8}
"""Most drafts of repeated text per request, by kind; llama-server reserves memory for their logits (b11549,
common_speculative_n_max)."""

SYNTHETIC_RATES = "--spec-synth-rates"  # only for `bench`

REASONS = {
    "-md": "give it before --",
    "--model-draft": "give it before --",
    SYNTHETIC_RATES: "it is for `oallama bench` alone",
    "--spec-synth-len": "it is for `oallama bench` alone",
    "-ngl": "oallama places the weights",
    "-ot": "oallama places the weights",
    "-m": "oallama opens the model",
    "--host": "it is an option of oallama serve",
    "--port": "it is an option of oallama serve",
    "--api-key": "it is an option of oallama serve",
}
"""Reasons for refused options that users are likely to try."""


def checked_options(arguments: Sequence[str]) -> tuple[str, ...]:
    """The options for llama-server. Raises UsageError for an option that is not passed on, or lacks its value."""
    left, checked = list(arguments), list[str]()
    while left:
        name, given, value = left.pop(0).partition("=")
        if name in FLAGS and not given:
            checked.append(name)
            continue
        if name not in VALUED:
            why = REASONS.get(name, "docs/serve.md lists the options that are")
            raise UsageError(f"{name} is not passed on to llama-server: {why}")
        if not given:
            if not left:
                raise UsageError(f"{name} needs a value")
            value = left.pop(0)
        if name == "--spec-type" and not all(kind in NGRAM_DRAFTS for kind in value.split(",")):
            raise UsageError(
                f"--spec-type {value} is not passed on to llama-server: the memory of drafts is not planned"
            )
        checked += [name, value]
    return tuple(checked)


def repeated_drafts(options: Sequence[str]) -> int:
    """Most drafts of repeated text per request that checked options allow."""
    kinds = (kind for name, value in pairwise(options) if name == "--spec-type" for kind in value.split(","))
    return max((NGRAM_DRAFTS[kind] for kind in kinds), default=0)


def adapter_paths(options: Sequence[str]) -> tuple[str, ...]:
    """The files of LoRA adapters in checked options: separated by commas; with --lora-scaled each has its scale after a
    colon."""
    return tuple(
        path.rpartition(":")[0] if name == "--lora-scaled" else path
        for name, value in pairwise(options)
        if name in _ADAPTERS
        for path in value.split(",")
    )


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of llama-server's other options."""
    return {
        name: value for name, value in environment.items() if not name.startswith("LLAMA_ARG_") or name in VARIABLES
    }
