"""Options of llama-server that users may pass after `--`: those that change neither the placement, nor memory that a
plan counts, nor access to the server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
_SLOTS = "-sps --slot-prompt-similarity --cache-reuse -ctxcp --ctx-checkpoints --swa-checkpoints"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VALUED = _words(f"{_SAMPLING} {_REASONING} {_SLOTS}") | set(_ADAPTERS)
FLAGS = _words(
    "--ignore-eos --reasoning-preserve --no-reasoning-preserve --slots --no-slots --cache-prompt --no-cache-prompt "
    "--cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift --lora-init-without-apply"
)
SYNTHETIC_RATES = "--spec-synth-rates"  # only for `bench`

REASONS = {
    "-md": "give it before --",
    "--model-draft": "give it before --",
    "--spec-type": "use --spec before --",
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
        checked += [name, value]
    return tuple(checked)


def adapter_paths(options: Sequence[str]) -> tuple[str, ...]:
    """The files of LoRA adapters in checked options: separated by commas; with --lora-scaled each has its scale after a
    colon."""
    return tuple(
        path.rpartition(":")[0] if name == "--lora-scaled" else path
        for name, value in pairwise(options)
        if name in _ADAPTERS
        for path in value.split(",")
    )
