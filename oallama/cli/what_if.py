"""`oallama what-if`: predict a model's speed on other cards."""

from __future__ import annotations

import os.path
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from oallama.cli import options as shared
from oallama.cli.help import Command, Group, option
from oallama.cli.model_file import is_file, model_file, unknown_model
from oallama.cli.output import busy, emit_json, log, show
from oallama.cli.policy import PolicyName
from oallama.cli.records import count, number, parsed
from oallama.cli.speculation import parallel_option
from oallama.cli.tuning import tell_doubt
from oallama.core.errors import UsageError
from oallama.core.text import suggestion
from oallama.device.cards import CARDS, USUAL_CARDS, pc, preset
from oallama.model.shapes import POPULAR, popular
from oallama.stores.hub_name import names_the_hub

if TYPE_CHECKING:
    from oallama.core.options import Options
    from oallama.device.card import Card, Host
    from oallama.model.memory import NoAllocLoader
    from oallama.placer import Placer

SHAPE = "oallama.what_if.shape"  # in a context's meta: the name of a model without a file, as the user wrote it


def parse_cards(text: str) -> tuple[tuple[Card, ...], ...]:
    """Parse `rtx3060,h100+gtx1650`: distinct rows in order, each one or several cards in a machine; or `all`. Raises
    ValueError, UsageError for an unknown card."""
    names = [name for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"unknown card {text!r}; choose from {', '.join(CARDS)}")
    if text.strip().lower() == "all":
        names = list(CARDS)
    return tuple(dict.fromkeys(tuple(map(preset, name.split("+"))) for name in names))


def file_or_shape(word: str) -> str:
    """Return the path of MODEL; for a popular model without a file, the path of a temporary file without weights.
    Raises UsageError and as model_file."""
    from oallama.stores.find import find_model

    is_here = is_file(word) or os.path.exists(word)  # noqa: PTH110 - Path.exists raises where a name is too long
    if is_here or names_the_hub(word) or find_model(word) is not None:
        return model_file(word)
    if (shape := popular(word)) is None:
        meant = suggestion(word.lower(), POPULAR)
        raise UsageError(f"{unknown_model(word)}{f' ({meant})' if meant else ''}; known by name: {', '.join(POPULAR)}")
    from oallama.core.temporary import parent_for_server, temporary_folder
    from oallama.model.shape_file import write_empty

    name, kind = shape
    context = click.get_current_context()
    context.meta[SHAPE] = word
    folder = context.with_resource(temporary_folder("oallama-shape-", parent_for_server()))
    try:
        return str(write_empty(folder / "shape.gguf", POPULAR[name], kind, f"{name}, all {kind}"))
    except ValueError as error:
        raise UsageError(f"{word}: {error}; choose another type, such as {name}:Q8_0") from None


@click.command("what-if", cls=Command)
@partial(shared.model_argument, file_of=file_or_shape)
@option(
    "--gpu", "rows", type=parsed(parse_cards), metavar="CARD,…", group=Group.DEVICE,
    show_default="12 common cards",
    help="Cards to predict, e.g. RTX 3060, 5060 Ti 16GB; or `all`.\f rtx3060-12+gtx1650-4: both in one machine. "
    f"{', '.join(CARDS)}.",
)  # fmt: skip
@option(
    "--vram", "memory_bytes", type=shared.SIZE, metavar="SIZE", group=Group.DEVICE, show_default="each card's",
    help="Device memory of the cards, e.g. 6GiB.",
)  # fmt: skip
@option("--cores", type=count(1, 1024), metavar="N", group=Group.DEVICE,
        help="Predict for a PC with N Zen 4 cores instead of this machine's CPU, without measuring.\f Without "
        "--ram-speed: a usual PC's memory.")  # fmt: skip
@option("--ram-speed", "ram_speed", type=number(1, 10_000), metavar="GB/s", group=Group.DEVICE,
        help="Memory bandwidth of that PC: 40 (DDR4), 60 (DDR5).")  # fmt: skip
@option("--policy", type=PolicyName(), default="auto", show_default=True, metavar="POLICY", group=Group.PLACEMENT,
        advanced=True, help="Policy to compare with stock llama.cpp.")  # fmt: skip
@shared.gathered(*shared.WORKLOAD, parallel_option, shared.vram_fill_option, shared.threads_option)
@shared.profile_option
@shared.json_option
def command(
    model: str,
    rows: tuple[tuple[Card, ...], ...] | None,
    memory_bytes: int | None,
    cores: int | None,
    ram_speed: float | None,
    policy: str,
    options: Options,
    n_prompt: int,
    n_gen: int,
    expected: int | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Predict a model's speed on cards that need not be in this machine: with llama.cpp's fastest options, and with the
    best plan that a quick search finds. Popular models are known by name, without a file.

    \b
      oallama what-if gemma-3-27b --ram-speed 60
      oallama what-if qwen3-30b-a3b:Q8_0 --gpu "RTX 3060, 5060 Ti 16GB"
      oallama what-if model.gguf --gpu rtx4090 --vram 20GiB -p 4096
      oallama what-if qwen3-32b --gpu rtx3060-12+gtx1650-4,rtx3060-12

    \f
    Known by name: NAMES. All their matrices are Q4_0 (gpt-oss: MXFP4), or of the type after a colon. Each card is
    combined with this machine's CPU, or with one described by --cores and --ram-speed. This machine's is timed for some
    seconds, once; after `oallama profile MODEL` each matrix has its measured time. The cards' times follow from
    published runs of llama.cpp, so all figures are predictions.
    """
    if profile is not None and (cores is not None or ram_speed is not None):
        raise UsageError("--profile has a CPU's times and cannot be combined with --cores or --ram-speed")
    host = pc(cores, ram_speed) if cores is not None or ram_speed is not None else None
    from oallama.model.memory import NoAllocLoader

    # loads llama.cpp during the imports and the reading of the model, but not while the CPU is timed
    with NoAllocLoader(at_once=host is not None) as no_alloc_loader:
        from oallama.placer.described import alone_and_beside
        from oallama.report.what_if import what_if_document, what_if_table

        placer = placer_on(host, model, replace(options, device="none"), profile, no_alloc_loader)
        workload = placer.workload(n_prompt, n_gen, n_parallel=expected or 1)
        with busy("predicting"):
            alone, by_cards = alone_and_beside(placer, _cards(rows, memory_bytes), workload, policy)
            predicted = list(by_cards)
    tell_doubt(placer)
    if as_json:
        model_told = replace(placer.model, path=click.get_current_context().meta.get(SHAPE, placer.model.path))
        emit_json(what_if_document(model_told, workload, alone, predicted, host))
    else:
        show([what_if_table(placer.model, workload, alone, predicted, policy, host)])


def _cards(rows: tuple[tuple[Card, ...], ...] | None, memory_bytes: int | None) -> tuple[tuple[Card, ...], ...]:
    """Return the cards of each row; by default each usual card is a row. memory_bytes: of every card; None: its own."""
    chosen = rows or tuple((CARDS[name],) for name in USUAL_CARDS)
    if memory_bytes is None:
        return chosen
    return tuple(tuple(replace(card, memory_bytes=memory_bytes) for card in cards) for cards in chosen)


def placer_on(
    host: Host | None, model: str, options: Options, profile: str | None, no_alloc_loader: NoAllocLoader
) -> Placer:
    """Return the model on a described CPU; None: on this machine's CPU, by the profile, else by its rates, whose timing
    takes seconds."""
    from oallama.placer import Placer
    from oallama.profile.described import TOKENS, host_profile
    from oallama.profile.emulate import this_host

    placer = Placer.of_file(model, options, profile, no_alloc_loader)
    if host is None:
        if placer.known_profile is not None:
            return placer
        with busy("timing the CPU"):
            host = this_host(placer.threads, log)
    described = host_profile(host, placer.model, placer.operators, TOKENS)
    return Placer(placer.model, placer.operators, placer.tensor_names, options, described, no_alloc_loader)


command.help = (command.help or "").replace("NAMES", ", ".join(POPULAR))
