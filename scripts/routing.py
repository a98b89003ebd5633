"""Routing for `--device emulated:routing=FILE`: which experts each token uses, drawn with a given concentration.

    python scripts/routing.py draw --layers 48 --experts 128 --used 8 --tokens 2000 \\
        --curve 25%=74%,37.5%=84%,50%=91%,75%=98% -o ids.txt
    python scripts/routing.py keep ids.txt --model model.gguf -o later.txt
    python scripts/routing.py traces gpt-oss-20b.npz --layers 12 -o ids.txt

A line is `LAYER ID ID …`: the experts of one token in one layer. `keep` counts the first half of a file as traffic of a
model, as --count-experts would have, their order included, and writes the second half: what a plan made from the former
meets. `traces` takes what a real model was seen to use: arrays [token, layer, rank] of expert numbers, one a
conversation, in the order of their names.

A token's experts are a set of fixed size with given inclusion probabilities: conditional Poisson sampling (Hájek 1964),
whose odds follow from the probabilities by the fixed point of Chen, Dempster & Liu (1994). Tokens are independent.
"""

from __future__ import annotations

import argparse
import random
import sys
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from shared import guarded, parser_of

from oallama.core.routing import ExpertCounts, LayerCounts
from oallama.core.routing import Routing as Counts
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.profile.routing import N_GAPS, counted, unknown_routing
from oallama.profile.routing import write_routing as write_counts

Row = tuple[int, ...]  # one token's experts
Routing = Mapping[int, Sequence[Row]]  # layer -> rows

Floats = npt.NDArray[np.float64]

USE_DECAY = 0.98  # of counts with each token, as in the back end (split/expert_table.h)

_LARGEST = 0.98  # of an inclusion probability: odds grow without bound towards 1


def curve_shares(n_expert: int, points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Traffic of a concentration curve, straight between its points (share of experts, share of traffic).

    Raises ValueError if it does not rise from (0, 0) to (1, 1), or gives less used experts more.
    """
    whole = [(0.0, 0.0), *points, (1.0, 1.0)]
    slopes = []
    for (x0, y0), (x1, y1) in pairwise(whole):
        if x1 <= x0 or y1 < y0:
            raise ValueError("a curve's points must increase, in experts and in traffic, between 0% and 100%")
        slopes.append((y1 - y0) / (x1 - x0))
    if any(later > earlier * (1 + 1e-9) for earlier, later in pairwise(slopes)):
        raise ValueError("a curve begins with the most used experts: its slope must not grow")
    experts, carried = [x for x, _ in whole], [y for _, y in whole]
    quantiles = np.interp(np.linspace(0, 1, n_expert + 1), experts, carried)
    return tuple(np.diff(quantiles).tolist())


def draw(n_layer: int, shares: Sequence[float], n_used: int, n_tokens: int, seed: int = 0) -> dict[int, list[Row]]:
    """Rows by layer; which experts are the used ones differs by layer. shares: of traffic, one an expert. Raises
    ValueError if they cannot be."""
    n_expert, cumulated = len(shares), list(accumulate(odds_of(shares, n_used)))
    rows: dict[int, list[Row]] = {}
    for layer in range(n_layer):
        rng = random.Random(f"{seed}/{layer}")
        names = rng.sample(range(n_expert), n_expert)
        rows[layer] = [_row(names, cumulated, n_used, rng) for _ in range(n_tokens)]
    return rows


def _row(names: Sequence[int], cumulated: Sequence[float], n_used: int, rng: random.Random) -> Row:
    """Independent draws, taken where all are distinct: sets in proportion to the product of their odds."""
    while True:
        row = tuple(rng.choices(names, cum_weights=cumulated, k=n_used))
        if len(set(row)) == n_used:
            return row


def odds_of(shares: Sequence[float], n_used: int) -> list[float]:
    """Odds whose sets of n_used experts have inclusion probabilities n_used * shares. Raises ValueError."""
    n = len(shares)
    if not 0 < n_used <= n:
        raise ValueError(f"a token cannot use {n_used} of {n} experts")
    if n_used == n:
        return [1.0] * n
    wanted = n_used * np.array(shares)
    if wanted.max() > _LARGEST:
        raise ValueError(
            f"the most used of {n} experts would be used by {wanted.max():.2f} of all tokens when each uses {n_used}; "
            "ask for less concentration"
        )
    wanted = np.maximum(wanted, 1e-9)
    odds = wanted / (1 - wanted)
    for _ in range(200):
        probabilities = inclusion(odds, n_used)
        if np.abs(probabilities - wanted).max() < 1e-9:
            break
        odds *= wanted / (1 - wanted) * (1 - probabilities) / probabilities
        odds /= odds.mean()
    return [float(value) for value in odds]


def inclusion(odds: Floats, n_used: int) -> Floats:
    """Probability of each element to be in a set of n_used that is drawn in proportion to the product of its odds.

    By elementary symmetric polynomials of those before and of those behind the element; all terms are positive.
    """
    left, right = _symmetric(odds, n_used), _symmetric(odds[::-1], n_used)[::-1]
    without = (left[:-1, :n_used] * right[1:, n_used - 1 :: -1]).sum(1)
    probabilities: Floats = odds * without / left[-1, n_used]
    return probabilities


def _symmetric(odds: Floats, n_used: int) -> Floats:
    """[i, j]: sum over the sets of j of the first i elements of the product of their odds."""
    table = np.zeros((len(odds) + 1, n_used + 1))
    table[0, 0] = 1.0
    for i, odd in enumerate(odds):
        table[i + 1] = table[i]
        table[i + 1, 1:] += odd * table[i, :-1]
    return table


def traced(path: Path, n_layer: int | None) -> dict[int, list[Row]]:
    """Rows of the conversations of an .npz, one behind the other, of the first layers. Raises ValueError if it
    has none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            conversations = [arrays[name] for name in sorted(arrays.files)]
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is not an .npz of arrays") from None
    if any(conversation.ndim != 3 or conversation.dtype.kind not in "iu" for conversation in conversations):
        raise ValueError(f"{path} must have arrays of whole numbers [token, layer, rank]")
    tokens = np.concatenate(conversations)[:, :n_layer]
    if not tokens.size:
        raise ValueError(f"{path} has no tokens")
    return {layer: [tuple(row) for row in tokens[:, layer].tolist()] for layer in range(tokens.shape[1])}


def write_routing(path: Path, routing: Routing, remark: str) -> None:
    """Write the file, token by token, so that its head is a shorter run of all layers."""
    longest = max(len(rows) for rows in routing.values())
    lines = [f"# {remark}"]
    for token in range(longest):
        for layer, rows in sorted(routing.items()):
            if token < len(rows):
                lines.append(" ".join(map(str, (layer, *rows[token]))))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_routing(path: Path) -> dict[int, list[Row]]:
    """The rows of a file. Raises ValueError naming the line that is wrong."""
    rows: dict[int, list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            layer, *ids = map(int, line.split())
        except ValueError:
            raise ValueError(f"{path}:{number}: a line is LAYER ID ID …, not {line[:60]!r}") from None
        rows.setdefault(layer, []).append(tuple(ids))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def first_and_second(routing: Routing) -> tuple[Routing, Routing]:
    """Halve each layer's tokens. Raises ValueError if a half has none."""
    if any(len(rows) < 2 for rows in routing.values()):
        raise ValueError("each layer needs at least two tokens for two halves")
    first = {layer: rows[: len(rows) // 2] for layer, rows in routing.items()}
    return first, {layer: rows[len(rows) // 2 :] for layer, rows in routing.items()}


def counts_of(routing: Routing, fingerprint: str, n_layer: int, n_expert: int, n_used: int) -> Counts:
    """Count the rows of a model's layers, both as decode and as prompts of 256 tokens, in two recordings. Raises
    ValueError for rows of another model."""
    layers = {layer: rows for layer, rows in routing.items() if layer < n_layer}
    if not layers or any(len(row) != n_used or max(row) >= n_expert for rows in layers.values() for row in rows):
        raise ValueError(f"the file is not from a model with {n_expert} experts, {n_used} per token")
    counts = unknown_routing(fingerprint, n_expert, n_used)
    for half in first_and_second(layers):
        of_tokens, of_prompts = (
            {layer: _tally(rows, n_expert, n_tokens) for layer, rows in half.items()} for n_tokens in (1, 256)
        )
        counts = counted(counts, ExpertCounts(of_tokens, of_prompts))
    return counts


def _tally(rows: Sequence[Row], n_expert: int, n_tokens: int) -> LayerCounts:
    """Counts rows in their order, in batches of n_tokens, as the back end does (split/uses.h)."""
    late, last = np.zeros(n_expert), np.full(n_expert, -(2**N_GAPS))  # decayed uses; the token that used it last
    uses, ranks, gaps = np.zeros(n_expert, int), np.zeros(n_expert, int), np.zeros(N_GAPS, int)
    for begin in range(0, len(rows), n_tokens):
        rank_of = np.empty(n_expert, int)
        rank_of[np.argsort(-late, kind="stable")] = np.arange(n_expert)
        for now, row in enumerate(rows[begin : begin + n_tokens], begin):
            used = list(row)
            uses[used] += 1
            ranks[rank_of[used]] += begin > 0
            for gap in now - last[used]:
                gaps[min(int(gap).bit_length(), N_GAPS) - 1] += 1
            last[used] = now
            late *= USE_DECAY
            late[used] += 1.0
    return LayerCounts(len(rows), tuple(uses.tolist()), tuple(ranks.tolist()), tuple(gaps.tolist()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input; others as the errors of oallama have."""
    parser = parser_of("routing.py", __doc__)
    commands = parser.add_subparsers(required=True)
    draw_command = commands.add_parser("draw", help="random routing with a given concentration")
    for name in ("--layers", "--experts", "--used"):
        draw_command.add_argument(name, type=int, required=True)
    draw_command.add_argument("--tokens", type=int, default=1000, help="default 1000")
    draw_command.add_argument(
        "--curve", required=True, metavar="E%=T%,…", help="the most used E %% of the experts carry T %% of the traffic"
    )
    draw_command.add_argument("--seed", type=int, default=0)
    draw_command.set_defaults(run=_draw)
    keep_command = commands.add_parser("keep", help="count the first half as a model's traffic; write the second")
    keep_command.add_argument("file", type=Path)
    keep_command.add_argument("--model", required=True, metavar="GGUF")
    keep_command.set_defaults(run=_keep)
    traces_command = commands.add_parser("traces", help="recorded routing of a real model, in its order")
    traces_command.add_argument("file", type=Path)
    traces_command.add_argument("--layers", type=int, help="number of layers; default all")
    traces_command.set_defaults(run=_traces)
    for command in (draw_command, keep_command, traces_command):
        command.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    return guarded("routing", partial(options.run, options))


def _draw(options: argparse.Namespace) -> int:
    if min(options.layers, options.experts, options.used, options.tokens) < 1:
        raise ValueError("--layers, --experts, --used and --tokens must be at least 1")
    shares = curve_shares(options.experts, _points(options.curve))
    rows = draw(options.layers, shares, options.used, options.tokens, options.seed)
    write_routing(options.output, rows, f"drawn: curve {options.curve}, seed {options.seed}")
    return 0


def _keep(options: argparse.Namespace) -> int:
    model = model_info(read_gguf(options.model))
    first, second = first_and_second(read_routing(options.file))
    write_counts(counts_of(first, model.fingerprint, model.n_layer, model.n_expert, model.n_expert_used))
    write_routing(options.output, second, f"the second half of {options.file.name}")
    return 0


def _traces(options: argparse.Namespace) -> int:
    if options.layers is not None and options.layers < 1:
        raise ValueError("--layers must be at least 1")
    write_routing(options.output, traced(options.file, options.layers), f"seen: {options.file.name}")
    return 0


def _points(text: str) -> list[tuple[float, float]]:
    """Parse 25%=74%,50%=91%. Raises ValueError."""
    points = []
    for item in text.split(","):
        experts, _, carried = item.partition("=")
        try:
            points.append((float(experts.removesuffix("%")) / 100, float(carried.removesuffix("%")) / 100))
        except ValueError:
            raise ValueError(f"--curve {text}: {item!r} is not like 25%=74%") from None
    return points


if __name__ == "__main__":
    sys.exit(main())
