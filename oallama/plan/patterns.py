"""Tensor name patterns that keep operators in host memory, or give them to the split back end (`-ot` of llama.cpp,
`tensor_buft_overrides` of its API).

llama.cpp compiles every pattern again for every tensor, so there is one pattern for all operators that share a layout
and a set of layers. Patterns are anchored and escaped, so that each matches exactly the names it was made for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from oallama.core.errors import PlanError
from oallama.core.types import SPLIT_LAYOUT, Operator, OperatorPlacement, devices_with_n_g
from oallama.cost.blocks import takes_n_g
from oallama.plan.plan import Plan, rows_of

Pattern = tuple[str, str | None]  # (regular expression, buffer type; None: plain host memory or llama.cpp's choice)

MAX_PATTERNS = 4096  # stock llama.cpp's limit on overrides

_LAYERED = re.compile(r"(?P<head>(?:.*\.)?blk\.)(?P<layer>0|[1-9][0-9]*)\.(?P<tail>.+)", re.DOTALL)
_COMPANIONS = (".bias", ".scale", ".input_scale")  # used right after the mul-mat, so they stay beside its weight
_SHARED_NAMES = ("token_embd.weight",)  # tied embeddings: one name, read by GET_ROWS and by the output's MUL_MAT


def host_patterns(
    operators: Sequence[Operator],
    rows: Sequence[OperatorPlacement],
    all_tensor_names: Iterable[str],
    with_n_g: Collection[int] = (),
    counts: bool = False,
) -> tuple[Pattern, ...]:
    """Patterns for the weights that stay in host memory (gg = 0) or need the split back end (SPLIT_LAYOUT), with their
    biases and scales. No tensor matches two patterns. with_n_g, counts: as in needs_split.

    A bias on the device would move the addition there, which costs one more device copy; the result of a split mul-mat
    is on the host, too. Biases and tied embeddings never get a named layout, which only mul-mats can read.
    Deterministic: sorted by pattern, split ones first. Raises PlanError for an operator without a row, for tied
    embeddings that are split, and beyond MAX_PATTERNS.
    """
    names = frozenset(all_tensor_names)
    hosted: dict[str, str | None] = {}
    for operator, row in zip(operators, rows_of(operators, rows), strict=True):
        split = needs_split(operator, row, with_n_g, counts)
        if not split and row.gg > 0:
            continue
        hosted[operator.name] = _layout(row, split)
        stem = operator.name.removesuffix(".weight")
        for companion in (stem + suffix for suffix in _COMPANIONS):
            if companion in names:
                hosted[companion] = None
    patterns = _group(hosted)
    if len(patterns) > MAX_PATTERNS:
        raise PlanError(f"the plan needs {len(patterns)} tensor patterns, but llama.cpp accepts {MAX_PATTERNS}")
    return patterns


def needs_split(operator: Operator, row: OperatorPlacement, with_n_g: Collection[int], counts: bool = False) -> bool:
    """Whether the split back end must run an operator: it is split; or it is in host memory, and the device of its
    layer computes CC for some tokens (CG'). with_n_g: the devices with a token assignment. counts: the back end counts
    expert uses, so it also runs experts in host memory."""
    if row.backend == "split":
        return True
    if counts and operator.routed and row.gg == 0:
        return True
    return row.device in with_n_g and row.cc > 0 and takes_n_g(operator)


def split_names(record: Plan, operators: Sequence[Operator], counts: bool = False) -> frozenset[str]:
    """The operators that the split back end must run; if there are any, stock llama.cpp needs the plugin's plan file.
    counts: as in needs_split."""
    with_n_g, rows = devices_with_n_g(record.split_settings), rows_of(operators, record.operators)
    placed = zip(operators, rows, strict=True)
    return frozenset(row.name for operator, row in placed if needs_split(operator, row, with_n_g, counts))


def _layout(row: OperatorPlacement, split: bool) -> str | None:
    shared = row.name in _SHARED_NAMES
    if not split:
        return None if shared else row.layout
    if shared:
        raise PlanError(f"{row.name} is also the embedding, which is read whole; place it with gg 0 or 1")
    return SPLIT_LAYOUT


def _group(hosted: dict[str, str | None]) -> tuple[Pattern, ...]:
    layers_of: dict[tuple[str | None, str, str], list[int]] = {}  # (layout, head, tail) -> layers
    patterns: list[Pattern] = []
    for name, layout in hosted.items():
        match = _LAYERED.fullmatch(name)
        if match:
            layers_of.setdefault((layout, match["head"], match["tail"]), []).append(int(match["layer"]))
        else:
            patterns.append((f"^{escape(name)}$", layout))
    tails_of: dict[tuple[str | None, str, tuple[int, ...]], list[str]] = {}
    for (layout, head, tail), layers in layers_of.items():
        tails_of.setdefault((layout, head, tuple(sorted(layers))), []).append(tail)
    for (layout, head, layer_set), tails in tails_of.items():
        layer_text = _any_of([str(layer) for layer in layer_set])
        tail_text = _any_of([escape(tail) for tail in sorted(tails)])
        patterns.append((f"^{escape(head)}{layer_text}\\.{tail_text}$", layout))
    return tuple(sorted(patterns, key=lambda pattern: (pattern[1] != SPLIT_LAYOUT, pattern[0])))


def _any_of(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def escape(text: str) -> str:
    """A regular expression that matches `text`, in the common syntax of std::regex (ECMAScript) and re."""
    return re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", text)
