"""Files of routing for the emulated device: a model's own, or drawn. `routing=FILE` of --device emulated reads them.

    python scripts/routing record models/oallama-stories-moe-q4_0.gguf -n 200 -o ids.txt     # its own choices
    python scripts/routing draw --layers 48 --experts 128 --used 8 --tokens 2000 \\
        --curve 25%=74%,37.5%=84%,50%=91%,75%=98% --overlap 0.257 -o ids.txt
    python scripts/routing show ids.txt --experts 128                                        # what is in one
    python scripts/routing keep ids.txt --model model.gguf -o later.txt                      # as if it had been counted

`keep` counts the first half of a file as traffic of a model, as `oallama profile --routing` would have, and writes the
second half: what a plan made from the former meets. `record` asks the prompts of a file, one a line, or requests for
stories, as models/training writes them. How the device goes through a file is told in docs/emulated.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.command import parser_of

from routing.drawn import RoutingDraw, curve_shares, draw, zipf_shares
from routing.table import Routing, layer_use, read_routing, write_routing

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input; others as the errors of oallama have."""
    from oallama.core.errors import OallamaError

    options = _parser().parse_args(arguments)
    try:
        done: int = options.run(options)
        return done
    except OallamaError as error:
        print(f"routing: {error}", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"routing: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("routing", __doc__)
    names = parser.add_subparsers(dest="name", required=True)

    own = names.add_parser("record", help="the experts that a model uses while it generates")
    own.add_argument("model", metavar="GGUF")
    own.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line; default: requests for stories")
    own.add_argument("--n-prompts", type=int, default=20, help="requests for stories; default 20")
    own.add_argument("-n", "--n-gen", type=int, default=200, help="most tokens behind a prompt; default 200")
    own.add_argument("--phase", choices=("all", "prompt", "decode"), default="all", help="tokens that are kept")
    own.add_argument("--temp", type=float, default=0.8, help="temperature; default 0.8")
    own.add_argument("--ctx", type=int, default=512, help="context, tokens; default 512")
    own.add_argument("--device", default="none", help="where all layers are; default: the CPU")
    own.add_argument("--on-cpu", action="append", default=[], metavar="REGEX", help="weights that stay off the device")
    own.add_argument("--threads", type=int, default=1)
    own.add_argument("--texts", action="store_true", help="print the texts that were made")
    own.set_defaults(run=_record)

    made = names.add_parser("draw", help="random routing with a given concentration and overlap")
    made.add_argument("--layers", type=int, required=True)
    made.add_argument("--experts", type=int, required=True)
    made.add_argument("--used", type=int, required=True, help="experts of a token")
    made.add_argument("--tokens", type=int, default=1000, help="default 1000")
    how = made.add_mutually_exclusive_group(required=True)
    how.add_argument("--zipf", type=float, metavar="S", help="traffic in proportion to rank^-S; 0: equal")
    how.add_argument("--curve", metavar="E%=T%,…", help="the most used E %% of the experts carry T %% of the traffic")
    made.add_argument("--overlap", type=float, help="share of a token's experts that the next has too; default: chance")
    made.add_argument("--topics", type=int, default=1, help="equal stretches of tokens, each with its own used experts")
    made.set_defaults(run=_draw)

    kept = names.add_parser("keep", help="the first half of a file counted as a model's traffic; the second is written")
    kept.add_argument("file", type=Path)
    kept.add_argument("--model", required=True, metavar="GGUF")
    kept.add_argument("-o", "--output", type=Path, required=True)
    kept.set_defaults(run=_keep)

    for command in (own, made):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("-o", "--output", type=Path, required=True)

    shown = names.add_parser("show", help="how a file's experts are used")
    shown.add_argument("file", type=Path)
    shown.add_argument("--experts", type=int, help="of a layer; default: one more than the largest number")
    shown.set_defaults(run=_show)
    return parser


def _record(options: argparse.Namespace) -> int:
    from routing.recorded import RecordedRun, record

    prompts = _requests(options.n_prompts, options.seed) if options.prompts is None else _lines(options.prompts)
    run = RecordedRun(
        options.model, prompts, options.n_gen, options.phase, options.temp, options.seed, options.ctx, options.device,
        tuple(options.on_cpu), options.threads,
    )  # fmt: skip
    routing, texts = record(run)
    if options.texts:
        print("\n\n".join(texts))
    name = Path(options.model).name
    write_routing(options.output, routing, f"{name}, {len(prompts)} prompts, {options.phase} tokens, seed {run.seed}")
    print(f"{options.output}: {_counted(routing)}", file=sys.stderr)
    return 0


def _draw(options: argparse.Namespace) -> int:
    if min(options.layers, options.experts, options.used, options.tokens, options.topics) < 1:
        raise ValueError("--layers, --experts, --used, --tokens and --topics must be at least 1")
    if options.curve is None:
        shares, how = zipf_shares(options.experts, options.zipf), f"Zipf exponent {options.zipf:g}"
    else:
        shares, how = curve_shares(options.experts, _points(options.curve)), f"curve {options.curve}"
    drawing = RoutingDraw(
        options.layers, shares, options.used, options.tokens, options.overlap, options.topics, options.seed
    )
    routing = draw(drawing)
    overlap = "by chance" if options.overlap is None else f"{options.overlap:g}"
    remark = f"drawn: {options.used} of {options.experts} experts, {how}, overlap {overlap}"
    write_routing(options.output, routing, f"{remark}, {options.topics} topics, seed {options.seed}")
    print(f"{options.output}: {_counted(routing)}", file=sys.stderr)
    return 0


def _show(options: argparse.Namespace) -> int:
    routing = read_routing(options.file)
    n_expert = options.experts or 1 + max(max(row) for rows in routing.values() for row in rows)
    print(f"{'layer':>5}  {'tokens':>6}  entropy  25% carry  50% carry  overlap  by chance")
    for layer, rows in sorted(routing.items()):
        use = layer_use(rows, n_expert)
        print(
            f"{layer:5}  {use.n_tokens:6}  {use.entropy:7.3f}  {use.quarter:9.1%}  {use.half:9.1%}  {use.overlap:7.1%}"
            f"  {use.chance:9.1%}"
        )
    return 0


def _keep(options: argparse.Namespace) -> int:
    from oallama.model.gguf_reader import read_gguf
    from oallama.model.hyperparameters import model_info
    from oallama.profile.routing_store import write_routing as write_counts
    from routing.kept import counts_of, first_and_second

    model = model_info(read_gguf(options.model))
    first, second = first_and_second(read_routing(options.file))
    write_counts(counts_of(first, model.fingerprint, model.n_layer, model.n_expert, model.n_expert_used))
    write_routing(options.output, second, f"the second half of {options.file.name}")
    print(f"counted: {_counted(first)}; {options.output}: {_counted(second)}", file=sys.stderr)
    return 0


def _counted(routing: Routing) -> str:
    return f"{len(routing)} layers, {max(len(rows) for rows in routing.values())} tokens"


def _points(text: str) -> list[tuple[float, float]]:
    """Of 25%=74%,50%=91%. Raises ValueError."""
    points = []
    for item in text.split(","):
        experts, _, carried = item.partition("=")
        try:
            points.append((float(experts.removesuffix("%")) / 100, float(carried.removesuffix("%")) / 100))
        except ValueError:
            raise ValueError(f"--curve {text}: {item!r} is not like 25%=74%") from None
    return points


def _lines(path: Path) -> tuple[str, ...]:
    prompts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _requests(n: int, seed: int) -> tuple[str, ...]:
    """Requests of the grammar, as a chat with one of our models writes them."""
    sys.path.insert(0, str(ROOT / "models"))
    from training.derivation import Sampler
    from training.documents import ASSISTANT, END, USER, request

    prompts = []
    for number in range(n):
        sampler = Sampler(f"routing/{seed}/{number}")
        request(sampler)
        prompts.append(f"{USER}\n{sampler.text}{END}\n{ASSISTANT}\n")
    return tuple(prompts)


if __name__ == "__main__":
    raise SystemExit(main())
