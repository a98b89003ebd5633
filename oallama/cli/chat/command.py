"""`oallama chat`: its options, and the session."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from oallama.cli import placement_options as placement
from oallama.cli.chat.settings import ChatSettings, verbose_option
from oallama.cli.help import ServerCommand
from oallama.cli.options import depth_option, model_argument, tune_first_option
from oallama.cli.output import busy, log
from oallama.cli.projector import NO_PICTURES, ProjectorOptions, projector_options
from oallama.cli.sampling import AnswerOptions, answer_options, length_option
from oallama.cli.tuning import tuning_gain
from oallama.report.text import model_title
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END
from oallama.run.prompt import uses_template
from oallama.tuned.classes import WorkloadClass

if TYPE_CHECKING:
    from oallama.cli.chat.session import ChatSession
    from oallama.core.types import Workload
    from oallama.placer import Placer

CONTEXT_TOKENS = 4096  # context by default, or the model's trained context if smaller


@click.command("chat", cls=ServerCommand)
@partial(model_argument, metavar="[MODEL]")
@length_option
@placement.placement_options(tune_first_option)
@depth_option
@projector_options
@answer_options
@verbose_option
def command(
    model: str | None,
    n_gen: int | None,
    asked: placement.PlacementOptions,
    n_depth: int | None,
    pictures: ProjectorOptions,
    answers: AnswerOptions,
    verbose: bool,
) -> None:
    """Chat with a model; without MODEL, with the built-in story model. /? lists commands, Ctrl-D leaves.

    \b
      oallama chat model.gguf --system "Answer in one sentence."
      oallama chat model.gguf --temp 0 --json-schema '{"type": "object"}'
      printf '%s\\n' "Hello!" "Tell me a story." | oallama chat

    \f
    In a pipe each line is a message, and stdout gets only the answers. A line that begins with / is a command. Ctrl-C
    stops an answer. Until tuning has found a plan, chat uses stock llama.cpp's own placement; a line says how much
    tuning is predicted to gain.
    """
    asked.check_depth(n_depth)
    start(model, n_gen, asked, answers, verbose, n_depth or 0, pictures)


def start(
    model: str | None,
    n_gen: int | None,
    asked: placement.PlacementOptions,
    answers: AnswerOptions,
    verbose: bool = False,
    n_past: int = 0,
    pictures: ProjectorOptions = NO_PICTURES,
) -> None:
    """Load the model and chat until the user leaves. model None: the built-in one, or the plan's. n_gen None: until the
    model ends its answer, or DEFAULT_TOKENS tokens where it continues text."""
    from oallama.cli.chat.loop import converse, reader_of_stdin
    from oallama.cli.chat.session import ChatSession
    from oallama.run.conversation import Conversation

    chat, system = answers.chat, answers.system

    def workload_for(placer: Placer) -> Workload:
        uses_template(placer.model, chat, system)  # reports wrong options before planning
        return chat_workload(placer, n_past)

    with busy("planning"):
        planned = asked.plan_for(model, workload_for, pictures)
    placer, plan = planned.placer, planned.plan
    chats = uses_template(placer.model, chat, system)
    placed = pictures.placed(plan, asked.plan_file is None)
    if placed is not None:
        log(f"note: {placed.note}")
    most = (WITHOUT_END if chats else DEFAULT_TOKENS) if n_gen is None else n_gen
    settings = ChatSettings(answers.sampling.sampling(), answers.sampling.stop, most, verbose)
    shown = {"mmproj": pictures.mmproj, "mmproj_offload": placed is not None and placed.on_device}
    with placement.loaded(placer, plan, asked, answers, chats=chats, **shown) as engine:
        reader = reader_of_stdin()
        session = ChatSession(placer, engine, chats, Conversation(system or None), settings, placed is not None)
        if reader.interactive:
            log(welcome(session))
            if planned.is_untuned:
                log(f"oallama: {tuning_gain(placer, planned.workload, plan)}")
        try:
            converse(session, reader)
        finally:
            placement.keep_block_times(placer, engine)


def chat_workload(placer: Placer, n_past: int = 0) -> Workload:
    """Return the workload that a session is placed for: short questions with history, within its context. n_past:
    tokens of history; 0: the class's."""
    n_ctx = placer.options.n_ctx or min(CONTEXT_TOKENS, placer.model.n_ctx_train or CONTEXT_TOKENS)
    workload = WorkloadClass("question", history=True).workload(n_ctx, 1)
    n_past = n_past or workload.n_past
    n_prompt = max(1, min(workload.n_prompt, n_ctx - workload.n_gen - n_past))
    return placement.run_workload(placer, n_prompt, workload.n_gen, n_past)


def welcome(session: ChatSession) -> str:
    """The lines before the first message."""
    placer, engine = session.placer, session.engine
    lines = [
        f"{model_title(placer.model)} · context {engine.n_ctx} tokens · /? for help, /bye to leave",
        placement.expected(placer, engine.plan),
    ]
    if not session.chats:
        lines.append("This model continues your text. Press Enter to let it go on, use /clear to start a new text.")
    return "\n".join(lines)
