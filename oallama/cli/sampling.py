"""Options of `oallama run` and `chat` for answers: sampling, stopping, counting.

Spelled as in llama.cpp.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields

import click

from oallama.cli.help import Group, option
from oallama.cli.prompt import text_of_file
from oallama.cli.records import as_record, count, declared_options, option_field, parsed
from oallama.cli.routing import count_experts_option
from oallama.core.errors import UsageError
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END
from oallama.run.sampling import Sampling

_DEFAULTS = Sampling()


def parse_seed(text: str) -> int:
    """Parse a seed from 0 to 2**32 - 1; -1 is a random seed. Raises ValueError."""
    if text.strip() == "-1":
        return secrets.randbits(32)
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise ValueError(f"{text!r} is not a seed; use 0 to {2**32 - 1}, or -1 for a random one")
    return int(text)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling options of the command line."""

    temperature: float = option_field("--temp", "--temperature", type=float, default=_DEFAULTS.temperature,
        metavar="T", group=Group.PROMPT, help="Temperature; 0: greedy.")  # fmt: skip
    seed: int = option_field("-s", "--seed", type=parsed(parse_seed), default="-1", show_default="random",
        metavar="SEED", group=Group.PROMPT, help="Random seed; -1: a new one each time.")  # fmt: skip
    stop: tuple[str, ...] = option_field("-r", "--stop", "--reverse-prompt", multiple=True, default=(), metavar="TEXT",
        group=Group.PROMPT, help="Stop sequence; repeatable.")  # fmt: skip
    json_schema: str | None = option_field("-j", "--json-schema", metavar="SCHEMA", group=Group.PROMPT,
        help="JSON schema for the answer; {}: any JSON object.")  # fmt: skip
    top_k: int = option_field("--top-k", type=count(0), default=_DEFAULTS.top_k, metavar="N",
        group=Group.SAMPLING, advanced=True, help="Sample from the N most likely tokens; 0: all.")  # fmt: skip
    top_p: float = option_field("--top-p", type=float, default=_DEFAULTS.top_p, metavar="P",
        group=Group.SAMPLING, advanced=True,
        help="Sample from the most likely tokens with this total probability; 1: all.")  # fmt: skip
    min_p: float = option_field("--min-p", type=float, default=_DEFAULTS.min_p, metavar="P",
        group=Group.SAMPLING, advanced=True,
        help="Drop tokens less likely than this share of the most likely; 0: off.")  # fmt: skip
    repeat_penalty: float = option_field("--repeat-penalty", type=float, default=_DEFAULTS.repeat_penalty,
        metavar="X", group=Group.SAMPLING, advanced=True,
        help="Penalty for repeating the last 64 tokens; 1: off.")  # fmt: skip
    grammar: str | None = option_field("--grammar", metavar="GBNF", group=Group.SAMPLING, advanced=True,
        help="Grammar that constrains the answer (GBNF).")  # fmt: skip
    grammar_file: str | None = option_field("--grammar-file", type=click.Path(), metavar="FILE", group=Group.SAMPLING,
        advanced=True, help="Read the grammar from a file.")  # fmt: skip
    json_schema_file: str | None = option_field("-jf", "--json-schema-file", type=click.Path(), metavar="FILE",
        group=Group.SAMPLING, advanced=True, help="Read the JSON schema from a file.")  # fmt: skip

    def sampling(self) -> Sampling:
        """Return the record of these options. Raises UsageError for invalid values or stop texts, and for unreadable
        files."""
        from oallama.run.answer import checked_stops

        checked_stops(self.stop)
        constraints = (self.grammar, self.grammar_file, self.json_schema, self.json_schema_file)
        if sum(value is not None for value in constraints) > 1:
            raise UsageError("more than one grammar; give only one of --grammar, --grammar-file and --json-schema")
        values = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        if self.grammar_file is not None:
            values["grammar"] = text_of_file(self.grammar_file, "grammar")
        if self.json_schema_file is not None:
            values["json_schema"] = text_of_file(self.json_schema_file, "JSON schema")
        return Sampling(**values)


length_option = option(
    "-n", "--predict", "--n-predict", "n_gen", type=count(WITHOUT_END), metavar="N", group=Group.PROMPT,
    show_default="until the model stops",
    help="Maximum number of tokens.\f -1: until the model stops or the context is full. Without a chat template the "
    f"default is {DEFAULT_TOKENS}.",
)  # fmt: skip
"""The command gets `n_gen`; None: not given."""

sampling_options = as_record("sampling", SamplingOptions)
"""The command gets `sampling`, a SamplingOptions."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """system: the system prompt; chat: whether to use the model's chat template, None: if the model has one."""

    sampling: SamplingOptions
    count_experts: bool
    system: str | None = option_field("-sys", "--system", "--system-prompt", metavar="TEXT", group=Group.PROMPT,
        help="System prompt.\f It needs a chat template.")  # fmt: skip
    chat: bool | None = option_field("--chat/--no-chat", group=Group.SAMPLING, advanced=True,
        help="Apply the model's chat template, or continue the text.",
        show_default="chat if the model has a template; run: except for the built-in model")  # fmt: skip


answer_options = as_record(
    "answers", AnswerOptions, sampling_options, *declared_options(AnswerOptions), count_experts_option
)
"""The command gets `answers`, an AnswerOptions."""
