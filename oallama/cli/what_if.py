"""`oallama what-if`: which card would this model need?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Command, Group, option
from oallama.cli.options import (
    WORKLOAD,
    chart_option,
    gathered,
    given,
    json_option,
    model_argument,
    parsed,
    profile_option,
    threads_option,
    vram_fill_option,
)
from oallama.cli.output import emit_json, show, write_chart
from oallama.cli.policy import PolicyName
from oallama.device.cards import CARDS, preset

if TYPE_CHECKING:
    from oallama.core.options import Options
    from oallama.device.card import Card


def parse_cards(text: str) -> tuple[Card, ...]:
    """`rtx3060,h100`: distinct cards in order. Raises ValueError, UsageError for a card that is not known."""
    names = [name for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{text!r} names no card; choose of {', '.join(CARDS)}")
    return tuple(dict.fromkeys(preset(name) for name in names))


@click.command("what-if", cls=Command)
@model_argument
@option(
    "--gpu", "cards", type=parsed(parse_cards), metavar="CARD,…", group=Group.DEVICE, show_default="all of them",
    help=f"Cards: {', '.join(CARDS)}.",
)  # fmt: skip
@option(
    "--policy", type=PolicyName(), metavar="POLICY", group=Group.PLACEMENT, advanced=True, show_default="auto",
    help="Whose plans are compared with stock llama.cpp's --fit.",
)  # fmt: skip
@gathered(*WORKLOAD, vram_fill_option, threads_option)
@profile_option
@json_option
@chart_option
def command(
    model: str,
    cards: tuple[Card, ...] | None,
    policy: str | None,
    options: Options,
    n_prompt: int,
    n_gen: int,
    profile: str | None,
    as_json: bool,
    chart: str | None,
) -> None:
    """Which card does this model need? Predicts, for cards that need not be here, how long the first token and each one
    more take beside this machine's CPU: with stock llama.cpp's own choice (--fit), and with the best plan that a quick
    search finds.

    The CPU's times are measured here (`oallama profile`), those of the cards follow from published runs of llama.cpp on
    them. So everything this says is a prediction.

    \b
      oallama what-if model.gguf
      oallama what-if model.gguf --gpu rtx3060,rtx4090 -p 4096 --chart cards.svg
    """
    from oallama.model.memory import Prober

    with Prober() as prober:  # it loads llama.cpp while the rest is imported and the model is read
        from oallama.placer import Placer
        from oallama.placer.described import alone_and_beside

        placer = Placer.of_file(model, replace(options, device="none"), profile, prober)
        load = placer.workload(n_prompt, n_gen)
        alone, rows = alone_and_beside(placer, cards or tuple(CARDS.values()), load, **given(policy=policy))

    from oallama.report.what_if import what_if_chart, what_if_document, what_if_table

    if as_json:
        emit_json(what_if_document(placer.model, load, alone, rows))
    else:
        show([what_if_table(placer.model, load, alone, rows, policy or "auto")])
    if chart is not None:
        write_chart(chart, what_if_chart(placer.model, load, rows))
