"""Hit rate of hot experts that follow the conversation, by the number of a layer's experts on the device.

Replayed over recorded routing, learnt on the first half of the tokens and judged on the second: counts decay by 0.98 a
token, and after each token at most one missed expert of a layer replaces the least used one on the device, if it is
used more. The second table has what the experts on the device serve of 256 tokens, as in a prompt, while nothing moves.

From gpt-oss-20b's answers to 31 questions (15,332 tokens; AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, `data/`,
commit 72b368f6) and from one answer each of Qwen3-30B-A3B and Gemma 4 26B-A4B, 128 tokens, cut to six experts a token
(Helldez/BigMoeOnEdge, `docs/bench-data/2026-07-15-route-trace/`, commit 2d4f2b11), both under the Apache License 2.0
(https://www.apache.org/licenses/LICENSE-2.0). Only shares were taken. Of Qwen3-30B at its eight experts a token others
report 42, 65, 81 and 92 % for the last used 8, 16, 32 and 64 (gajsanders/moe-trace).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from oallama.cost.experts import ExpertCoverage

FEWEST_EXPERTS = 32
"""Layers with fewer experts were not recorded; eight experts are known to be used almost equally."""

SPREAD = 0.1
"""Correlation of hits within a token: 0: independent (binomial); 1: all or none. These traces have 0.08 to 0.14 with a
quarter to half of the experts held."""

# share of the experts that are held: share of the uses by single tokens that these serve, and of those by a prompt
_OF_32 = (
    (0.0, 0.0, 0.0), (0.0625, 0.264, 0.204), (0.125, 0.436, 0.354), (0.25, 0.679, 0.582), (0.375, 0.834, 0.746),
    (0.5, 0.918, 0.854), (0.625, 0.961, 0.917), (0.75, 0.982, 0.965), (0.875, 0.995, 0.991), (1.0, 1.0, 1.0),
)  # fmt: skip
_OF_128 = (
    (0.0, 0.0, 0.0), (0.0625, 0.435, 0.416), (0.125, 0.627, 0.588), (0.25, 0.832, 0.799), (0.375, 0.934, 0.896),
    (0.5, 0.963, 0.929), (0.625, 0.977, 0.953), (0.75, 0.986, 0.971), (0.875, 0.994, 0.989), (1.0, 1.0, 1.0),
)  # fmt: skip


def following(use: ExpertCoverage) -> ExpertCoverage:
    """The use of these experts if the set follows the conversation: this model's hit rates where they were recorded in
    order, else those of the tables above; never below those of the fixed set."""
    n_expert = len(use.order)
    if n_expert < FEWEST_EXPERTS:
        return use
    points = _OF_32 if n_expert < 64 else _OF_128
    shares = [n / n_expert for n in range(n_expert + 1)]
    decode = use.recent_decode or [rate_at(points, share) for share in shares]
    prompt = use.recent_prompt or [rate_at(points, share, 2) for share in shares]
    return replace(
        use, decode=tuple(map(max, use.decode, decode)), prompt=tuple(map(max, use.prompt, prompt)), spread=SPREAD
    )


def rate_at(points: Sequence[tuple[float, ...]], share: float, column: int = 1) -> float:
    """A column of points at a share of all experts, straight between them."""
    i = min(bisect_right(points, share, key=lambda point: point[0]), len(points) - 1)
    low, high = points[i - 1], points[i]
    return low[column] + (high[column] - low[column]) * (share - low[0]) / (high[0] - low[0])
