"""Options that `oallama run` and `chat` have in common: how answers are drawn, by which template, what is counted."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.cli.help import Group, option
from oallama.cli.options import Decorator, as_record, system_option
from oallama.cli.routing import count_experts_option
from oallama.cli.sampling import SamplingOptions, sampling_options


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """system: the system prompt; chat: whether the model's chat template is used, None: where it has one."""

    system: str | None
    sampling: SamplingOptions
    chat: bool | None
    count_experts: bool


def answer_options(precedes: str, chat_help: str, chat_default: str) -> Decorator:
    """The command gets `answers`, an AnswerOptions. precedes: what the system prompt comes before."""
    return as_record(
        "answers",
        AnswerOptions,
        system_option(precedes),
        sampling_options,
        option("--chat/--no-chat", default=None, group=Group.SAMPLING, advanced=True, help=chat_help,
               show_default=chat_default),
        count_experts_option,
    )  # fmt: skip
