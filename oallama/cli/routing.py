"""`oallama profile --routing` and --count-experts: how often each expert of a model is used."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from oallama.cli.gate import at_once
from oallama.cli.help import Group, option
from oallama.cli.options import as_record, count
from oallama.cli.output import emit_json, is_terminal, show, talk
from oallama.cli.prompt import text_of_file
from oallama.core.errors import ProfileError, UsageError
from oallama.run.template import prompt_of

if TYPE_CHECKING:
    from oallama.core.routing import Routing
    from oallama.core.types import ModelInfo
    from oallama.placer import Placer
    from oallama.profile.routing import Traffic


DEFAULT_N_GEN = 64

COUNT_EVERY = 16
"""--count-experts: tokens decoded for each that is counted, which takes 9 µs a layer on one core (docs/policies.md): of
one in 16, a thousandth of a token's time where a layer takes 0.5 ms."""

count_experts_option = option(
    "--count-experts", is_flag=True, group=Group.PLACEMENT, advanced=True,
    help="Count which experts of a mixture-of-experts model the answers use; the next load takes the most used as hot "
    "ones. No text is kept.",
)  # fmt: skip
"""The command gets `count_experts`."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """wanted: whether experts are to be counted. prompts: a file of them, separated by empty lines; None: those that
    come with oallama. n_gen: tokens that the model goes on with behind each."""

    wanted: bool
    prompts: str | None
    n_gen: int


routing_options = as_record(
    "routing",
    RoutingOptions,
    option("--routing", "wanted", is_flag=True, advanced=True,
           help="Count instead how often a mixture-of-experts model uses each expert."),
    option(
        "--prompts", type=click.Path(), metavar="FILE", advanced=True, show_default="16 of ours, once",
        help="--routing: count over these prompts as well, separated by empty lines.",
    ),
    option(
        "-n", "--predict", "n_gen", type=count(1), default=DEFAULT_N_GEN, show_default=True, metavar="N", advanced=True,
        help="--routing: tokens to generate behind each prompt.",
    ),
)  # fmt: skip
"""The command gets `routing`, a RoutingOptions."""


def show_routing(placer: Placer, asked: RoutingOptions, refresh: bool, as_json: bool) -> None:
    """Show what is known. Nothing is run where nothing new is to be counted. refresh: what is known does not count.
    Raises UsageError for a model without experts."""
    from oallama.core.codec import to_json
    from oallama.report.routing import routing_table

    routing = known_routing(placer, asked, refresh)
    if as_json:
        emit_json({"routing": to_json(routing)})
    else:
        show([routing_table(routing)])


def known_routing(placer: Placer, asked: RoutingOptions, refresh: bool) -> Routing:
    """What is known of the model's routing once what was asked for is counted and kept."""
    from oallama.profile.routing import counted, halves, read_routing, unknown_routing, write_routing

    shape = experts_of(placer.model, "--routing")
    known = None if refresh else read_routing(*shape)
    if known is not None and asked.prompts is None:
        return known
    routing = known or unknown_routing(*shape)
    for half in halves(_recorded(placer, _prompts(asked.prompts), asked.n_gen)):
        routing = counted(routing, half)
    write_routing(routing)
    return routing


@contextmanager
def counting(placer: Placer, wanted: bool) -> Iterator[dict[str, Any]]:
    """Keywords of Placer.engine with which answers are counted; at the end the counts are kept. Nothing where they are
    not wanted. Raises UsageError for a model without experts."""
    from oallama.profile.routing import counted, read_routing, unknown_routing, write_routing

    if not wanted:
        yield {}
        return
    shape = experts_of(placer.model, "--count-experts")
    routing = read_routing(*shape) or unknown_routing(*shape)

    def count(traffic: Traffic) -> None:
        nonlocal routing
        routing = counted(routing, traffic)

    try:
        yield {"on_traffic": count, "record_every": COUNT_EVERY}
    finally:
        try:
            write_routing(routing)
        except ProfileError as error:
            talk(f"warning: {error}")


def experts_of(model: ModelInfo, option: str) -> tuple[str, int, int]:
    """(fingerprint, experts, experts of a token) of a model. Raises UsageError."""
    if not model.n_expert:
        raise UsageError(
            f"{model.path} has no experts, so it routes nothing; name a mixture-of-experts model or leave {option} out"
        )
    return model.fingerprint, model.n_expert, model.n_expert_used


def _prompts(path: str | None) -> Sequence[str]:
    """Texts between empty lines. Raises UsageError."""
    if path is None:
        return PROMPTS
    prompts = [block.strip("\n") for block in re.split(r"\n\s*\n", text_of_file(path, "prompts")) if block.strip()]
    if not prompts:
        raise UsageError(f"{path} has no prompts; write some into it, separated by empty lines")
    return prompts


def _recorded(placer: Placer, prompts: Sequence[str], n_gen: int) -> list[Traffic]:
    """Which experts each prompt uses, and what the model writes behind it. A prompt beyond the context goes in by
    parts, each continued by itself."""
    from tqdm import tqdm

    load = placer.workload(1, n_gen)
    on_device = placer.has_device and placer.device.emulated is None  # which may compute noise, and slowly
    plan = at_once(placer, load)[0] if on_device else placer.plan("cpu", workload=load, measure=False)
    recorded: list[Traffic] = []
    with placer.engine(plan, on_traffic=recorded.append) as engine:
        room = engine.n_ctx - n_gen
        given = [prompt_of(placer.model.path, text, None, None).tokens(engine) for text in prompts]
        parts = [tokens[start : start + room] for tokens in given for start in range(0, len(tokens), room)]
        for part in tqdm(parts, desc="count experts", unit="prompt", leave=False, disable=not is_terminal(sys.stderr)):
            engine.generate(part, max_tokens=n_gen)
    return recorded


PROMPTS = (
    "Once upon a time there was a fox who lived at the edge of a small village.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "Why is the sky blue, and why is the evening sky red?",
    "Erkläre in einfachen Worten, wie eine Brücke so viele Autos tragen kann.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show each step.",
    "Summarise the causes of the French Revolution in five sentences.",
    "SELECT customer, SUM(price) FROM orders GROUP BY customer; -- what does this return, and which index would help?",
    "Dear Ms Okafor, thank you for your letter of last week about the broken heating. We would like to",
    "Traduis en anglais : Il pleuvait depuis trois jours et le fleuve montait encore.",
    "List the ingredients and the steps for a vegetable soup for four people.",
    '{"name": "Ada", "languages": ["en", "fr"], "address": {"city": "London"',
    "A patient has had a fever and a stiff neck since yesterday. Which questions does a doctor ask first?",
    "void swap(int * a, int * b) {",
    "请用三句话介绍一下长城的历史。",
    "Prove that the square root of two is irrational.",
    "The quarterly report shows that revenue grew by 4 % while costs fell. What should the board ask?",
)
"""Prompts of the same kinds in both halves, which are held against each other."""
