"""`oallama what-if`: which card would this model need?"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from oallama.cli.gate import tell_doubt
from oallama.cli.help import Command, Group, option
from oallama.cli.options import (
    SIZE,
    WORKLOAD,
    chart_option,
    count,
    gathered,
    given,
    json_option,
    model_argument,
    parsed,
    profile_option,
    threads_option,
    vram_fill_option,
)
from oallama.cli.output import emit, emit_json, write_chart
from oallama.cli.policy import PolicyName
from oallama.core.errors import UsageError
from oallama.device.cards import CARDS, pc, preset

if TYPE_CHECKING:
    from oallama.core.options import Options
    from oallama.device.card import Card


def parse_cards(text: str) -> tuple[Card, ...]:
    """`rtx3060,h100`: distinct cards in order. Raises ValueError, UsageError for a card that is not known."""
    names = [name for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{text!r} names no card; choose of {', '.join(CARDS)}")
    return tuple(dict.fromkeys(preset(name) for name in names))


def parse_rate(text: str) -> float:
    """GB/s of a computer's memory. Raises ValueError."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate <= 10_000:
        raise ValueError(f"{text!r} is no memory speed in GB/s; two channels of DDR4 have about 40, of DDR5 about 60")
    return rate


@click.command("what-if", cls=Command)
@model_argument
@option(
    "--gpu", "cards", type=parsed(parse_cards), metavar="CARD,…", group=Group.DEVICE, show_default="all of them",
    help=f"{', '.join(CARDS)}.",
)  # fmt: skip
@option(
    "--vram", "memory_bytes", type=SIZE, metavar="SIZE", group=Group.DEVICE, show_default="each card's",
    help="Memory of the cards: 6GiB.",
)  # fmt: skip
@option("--cores", type=count(1, 1024), metavar="N", group=Group.DEVICE,
        help="Cores of a PC that is not measured.\f They are Zen 4's. With it, or with --ram-speed, nothing of this "
        "machine is measured; without the other one, it is that of a usual PC.")  # fmt: skip
@option("--ram-speed", "ram_speed", type=parsed(parse_rate), metavar="GB/s", group=Group.DEVICE,
        help="Memory of that PC: 40 (DDR4), 60 (DDR5).\f Bytes that the CPU reads in a second.")  # fmt: skip
@option(
    "--policy", type=PolicyName(), metavar="POLICY", group=Group.PLACEMENT, advanced=True, show_default="auto",
    help="Policy to compare with stock llama.cpp's --fit.",
)  # fmt: skip
@gathered(*WORKLOAD, vram_fill_option, threads_option)
@profile_option
@json_option
@chart_option
def command(
    model: str,
    cards: tuple[Card, ...] | None,
    memory_bytes: int | None,
    cores: int | None,
    ram_speed: float | None,
    policy: str | None,
    options: Options,
    n_prompt: int,
    n_gen: int,
    profile: str | None,
    as_json: bool,
    chart: str | None,
) -> None:
    """Predict a model on cards that need not be here: with stock llama.cpp's own choice (--fit), and with the best plan
    that a quick search finds.

    \b
      oallama what-if model.gguf
      oallama what-if model.gguf --gpu rtx3060 --vram 8GiB --ram-speed 40
      oallama what-if model.gguf --gpu rtx3060,rtx4090 -p 4096 --chart cards.svg

    \f
    The cards are beside this machine's CPU, which is measured (`oallama profile`), or beside one of --cores and
    --ram-speed. The cards' times follow from published runs of llama.cpp on them. So everything this says is a
    prediction. The model's weights need not be there: scripts/make_model.py --empty writes a header.
    """
    if profile is not None and (cores is not None or ram_speed is not None):
        raise UsageError("--profile has a CPU's times and cannot be combined with --cores or --ram-speed")
    host = pc(cores, ram_speed) if cores is not None or ram_speed is not None else None
    chosen = cards or tuple(CARDS.values())
    if memory_bytes is not None:
        chosen = tuple(replace(card, memory_bytes=memory_bytes) for card in chosen)
    from oallama.model.memory import Prober

    with Prober() as prober:  # it loads llama.cpp while the rest is imported and the model is read
        from oallama.placer import Placer
        from oallama.placer.described import alone_and_beside
        from oallama.profile.described import TOKENS, host_profile
        from oallama.report.what_if import what_if_chart, what_if_document, what_if_foot, what_if_head, what_if_line

        options = replace(options, device="none")
        placer = Placer.of_file(model, options, profile, prober)
        if host is not None:
            described = host_profile(host, placer.model, placer.operators, TOKENS)
            placer = Placer(placer.model, placer.operators, placer.tensor_names, options, described, prober)
        load = placer.workload(n_prompt, n_gen)
        if not as_json:
            emit(what_if_head(placer.model, load, host))
        alone, found = alone_and_beside(placer, chosen, load, **given(policy=policy))
        rows = []
        for row in found:
            rows.append(row)
            if not as_json:
                emit(what_if_line(placer.model, row))
                sys.stdout.flush()  # the next card takes a while
    tell_doubt(placer)
    if as_json:
        emit_json(what_if_document(placer.model, load, alone, rows, host))
    else:
        emit(what_if_foot(placer.model, alone, rows, policy or "auto", host))
    if chart is not None:
        write_chart(chart, what_if_chart(placer.model, load, rows))
