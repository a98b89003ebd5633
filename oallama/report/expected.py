"""One line with a plan's expected speed before a run, and one with measured and expected speed after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import Operator, Predicted
from oallama.core.units import format_bytes, format_seconds
from oallama.plan.plan import Plan
from oallama.planner.explain import planned_depth
from oallama.report.slices import weights_on_device
from oallama.report.text import device_name, plural, rate_text, three_digits

UNMEASURED = "speed unknown until measured"


def fits_text(record: Plan, operators: Sequence[Operator], n_layer: int) -> str:
    """A clause on what is on the device and what stays on the CPU."""
    memory = record.memory
    on_device, total = weights_on_device(record.pairs(operators))
    if not _uses_device(record):
        on_cpu = f"all weights ({format_bytes(memory.weights_host or total)}) are on the CPU"
        if not fits_nothing(record):
            return on_cpu
        return f"nothing fits the {format_bytes(memory.limit)} of {device_name(record.device)}: {on_cpu}"
    weights = "all weights" if on_device >= total else f"{format_bytes(on_device)} of {format_bytes(total)} of weights"
    other_memory = [(memory.kv, "KV cache"), (memory.compute + memory.staging, "buffers")]
    other_text = " and ".join(f"{format_bytes(n_bytes)} of {name}" for n_bytes, name in other_memory if n_bytes)
    with_rest = f" with {other_text}" if other_text else ""
    on_device_text = f"{weights} on {device_name(record.device)}{with_rest}, of a limit of {format_bytes(memory.limit)}"
    n_host = n_layer - max(0, record.n_gpu_layers - 1)
    on_cpu_items = [] if on_device >= total else ["the other weights"]
    if n_host > 0:
        on_cpu_items.append(
            f"the KV cache of {'every layer' if n_host == n_layer else f'{n_host} of {n_layer} layers'}"
        )
    return f"{on_device_text}; {' and '.join(on_cpu_items)} on the CPU" if on_cpu_items else on_device_text


def fits_nothing(record: Plan) -> bool:
    """Whether llama.cpp's placement leaves a requested device empty because nothing fits."""
    return record.policy == "fit" and record.device != "none" and not _uses_device(record)


def _uses_device(record: Plan) -> bool:
    memory = record.memory  # buffers alone are llama.cpp's, for large batches
    return bool(memory.weights_gpu or memory.kv or memory.staging)


def rates_text(record: Plan, full_s: float | None) -> str:
    """Expected tokens/s, and those with a full context, whose tokens take full_s."""
    predicted, workload = record.predicted, record.workload
    if predicted is None or predicted.tpot_s <= 0:
        return f"{UNMEASURED} (`oallama profile MODEL`)" if record.device == "none" else UNMEASURED
    rates = f"expected {rate_text(predicted.tpot_s)}"
    if not full_s:
        return rates
    depth_text = f"at {planned_depth(workload):,} tokens of context"
    return f"{rates} {depth_text}, {three_digits(1 / full_s)} at all {workload.n_ctx:,}"


def measured_texts(
    n_prompt: int, ttft_s: float, tpot_s: float, expected: Predicted | None, n_cached: int = 0, n_gen: int = 0
) -> list[str]:
    """Measured time of the prompt and rate of the answer, each with its prediction. n_cached, n_gen: cached tokens of
    the prompt, and tokens of the answer; 0: not shown."""
    cached = f" ({n_cached:,} cached)" if n_cached else ""
    prompt = f"prompt {plural(n_prompt, 'token')}{cached}, {_seconds(ttft_s)}"
    if expected is not None and expected.ttft_s > 0:
        prompt += f" ({_seconds(expected.ttft_s)} predicted)"
    if tpot_s <= 0:
        return [prompt, *([f"answer {plural(n_gen, 'token')}"] if n_gen else [])]
    n_tokens_text = f"{plural(n_gen, 'token')}, " if n_gen else ""
    answer = f"answer {n_tokens_text}{rate_text(tpot_s)}"
    if expected is not None and expected.tpot_s > 0:
        answer += f" ({three_digits(1 / expected.tpot_s)} predicted)"
    return [prompt, answer]


def _seconds(seconds: float) -> str:
    """Seconds in short: `0.41 s`, but `41 ms`."""
    return f"{seconds:.2f} s" if 0.1 <= seconds < 10 else format_seconds(seconds)


WORTH = 0.05
"""Share by which a plan must be faster to be mentioned."""


def gain_text(current: Predicted | None, best: Predicted | None) -> str:
    """A clause with the largest predicted speed-up by tuning. best: a lower bound of any plan's times."""
    if current is None or best is None or best.total_s <= 0:
        return "gain unknown until measured"
    ratio = current.total_s / best.total_s
    if ratio < 1 + WORTH:
        return f"no other placement is predicted to be {WORTH:.0%} faster"
    return f"another placement may be up to {ratio:.2f}× faster"


OFF = 0.25
"""Share by which tokens may deviate from the prediction without a warning."""

ENOUGH_TOKENS = 16
"""Generated tokens before a rate is compared with a prediction."""

SLOW, FEW_TOKENS = 3.0, 4
"""If tokens take this many times as long as predicted, other programs are looked for; and tokens needed to tell
that."""


def is_slow(n_tokens: int, tpot_s: float, predicted_s: float | None) -> bool:
    """True if tokens took so long that other programs may be the cause."""
    return bool(predicted_s) and n_tokens >= FEW_TOKENS and tpot_s > SLOW * (predicted_s or 0.0)


def drift_text(
    n_tokens: int, tpot_s: float, predicted_s: float | None, model: str, others_cores: float = 0.0, n_cores: int = 1
) -> str:
    """A sentence with a remedy if tokens took longer or shorter than predicted by the share OFF, else "". n_tokens:
    generated tokens. others_cores: cores of n_cores that other programs use; 0: not looked at."""
    if others_cores >= 0.5 and predicted_s and is_slow(n_tokens, tpot_s, predicted_s):
        return (
            f"{tpot_s / predicted_s:.1f}× the predicted time per token: other programs use {others_cores:.1f} of "
            f"{n_cores} cores"
        )
    if not predicted_s or n_tokens < ENOUGH_TOKENS:
        return ""
    ratio = tpot_s / predicted_s
    if 1 - OFF <= ratio <= 1 + OFF:
        return ""
    return f"{ratio:.2f}× the predicted time per token; `oallama tune {model}` plans again with the measured times"
