"""Options of `oallama run` and `chat` for answers: sampling, stopping, counting.

Spelled as in llama.cpp.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Group, option
from oallama.cli.options import Decorator, as_record, count, parsed
from oallama.cli.prompt import text_of_file
from oallama.cli.routing import count_experts_option
from oallama.core.errors import UsageError
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END

if TYPE_CHECKING:
    from oallama.run.sampling import Sampling


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Values of the sampling options."""

    seed: int
    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    stop: tuple[str, ...]
    grammar: str | None
    grammar_file: str | None
    json_schema: str | None
    json_schema_file: str | None

    def sampling(self) -> Sampling:
        """Return the record of these options. Raises UsageError for invalid values or stop texts, and for unreadable
        files."""
        from oallama.run.answer import checked_stops
        from oallama.run.sampling import Sampling

        checked_stops(self.stop)
        grammar, schema = self._constraint()
        return Sampling(self.temp, self.seed, self.top_k, self.top_p, self.min_p, self.repeat_penalty, grammar, schema)

    def _constraint(self) -> tuple[str | None, str | None]:
        """Return (grammar, JSON schema); at least one of them is None."""
        given = (self.grammar, self.grammar_file, self.json_schema, self.json_schema_file)
        if sum(value is not None for value in given) > 1:
            raise UsageError("more than one grammar; give only one of --grammar, --grammar-file and --json-schema")
        if self.grammar_file is not None:
            return text_of_file(self.grammar_file, "grammar"), None
        if self.json_schema_file is not None:
            return None, text_of_file(self.json_schema_file, "JSON schema")
        return self.grammar, self.json_schema


def parse_seed(text: str) -> int:
    """Parse a seed from 0 to 2**32 - 1; -1 is a random seed. Raises ValueError."""
    if text.strip() == "-1":
        return secrets.randbits(32)
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise ValueError(f"{text!r} is not a seed; use 0 to {2**32 - 1}, or -1 for a random one")
    return int(text)


length_option = option(
    "-n", "--predict", "--n-predict", "n_gen", type=count(WITHOUT_END), metavar="N", group=Group.PROMPT,
    show_default="until the model stops",
    help="Maximum number of tokens.\f -1: until the model stops or the context is full. Without a chat template the "
    f"default is {DEFAULT_TOKENS}.",
)  # fmt: skip
"""The command gets `n_gen`; None: not given."""

sampling_options = as_record(
    "sampling",
    SamplingOptions,
    option("--temp", "--temperature", "temp", type=float, default=0.8, show_default=True, metavar="T",
           group=Group.PROMPT, help="Temperature; 0: greedy."),
    option("-s", "--seed", type=parsed(parse_seed), default="-1", show_default="random", metavar="SEED",
           group=Group.PROMPT, help="Random seed; -1: a new one each time."),
    option("-r", "--stop", "--reverse-prompt", "stop", multiple=True, metavar="TEXT", group=Group.PROMPT,
           help="Stop sequence; repeatable."),
    option("-j", "--json-schema", metavar="SCHEMA", group=Group.PROMPT,
           help="JSON schema for the answer; {}: any JSON object."),
    option("--top-k", type=count(0), default=40, show_default=True, metavar="N", group=Group.SAMPLING, advanced=True,
           help="Sample from the N most likely tokens; 0: all."),
    option("--top-p", type=float, default=0.95, show_default=True, metavar="P", group=Group.SAMPLING, advanced=True,
           help="Sample from the most likely tokens with this total probability; 1: all."),
    option("--min-p", type=float, default=0.05, show_default=True, metavar="P", group=Group.SAMPLING, advanced=True,
           help="Drop tokens less likely than this share of the most likely; 0: off."),
    option("--repeat-penalty", type=float, default=1.0, show_default=True, metavar="X", group=Group.SAMPLING,
           advanced=True, help="Penalty for repeating the last 64 tokens; 1: off."),
    option("--grammar", metavar="GBNF", group=Group.SAMPLING, advanced=True,
           help="Grammar that constrains the answer (GBNF)."),
    option("--grammar-file", type=click.Path(), metavar="FILE", group=Group.SAMPLING, advanced=True,
           help="Read the grammar from a file."),
    option("-jf", "--json-schema-file", type=click.Path(), metavar="FILE", group=Group.SAMPLING, advanced=True,
           help="Read the JSON schema from a file."),
)  # fmt: skip
"""The command gets `sampling`, a SamplingOptions."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """system: the system prompt; chat: whether to use the model's chat template, None: if the model has one."""

    system: str | None
    sampling: SamplingOptions
    chat: bool | None
    count_experts: bool


def answer_options(precedes: str, chat_help: str, chat_default: str) -> Decorator:
    """The command gets `answers`, an AnswerOptions. precedes: what the system prompt comes before."""
    return as_record(
        "answers",
        AnswerOptions,
        option("-sys", "--system", "--system-prompt", "system", metavar="TEXT", group=Group.PROMPT,
               help=f"System prompt, before {precedes}.\f It needs a chat template."),
        sampling_options,
        option("--chat/--no-chat", default=None, group=Group.SAMPLING, advanced=True, help=chat_help,
               show_default=chat_default),
        count_experts_option,
    )  # fmt: skip
