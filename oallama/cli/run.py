"""`oallama run`: answer a prompt under a plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from oallama.cli import output
from oallama.cli import placement_options as placement
from oallama.cli.help import Group, ServerCommand, option
from oallama.cli.model_file import model_file
from oallama.cli.options import complete_file, json_option, model_option
from oallama.cli.prompt import model_and_prompt, read_prompt, text_of_file
from oallama.cli.sampling import AnswerOptions, answer_options, length_option
from oallama.cli.signals import is_interactive
from oallama.cli.tuning import tune_after_answer, tuning_gain
from oallama.core.errors import OallamaError, UsageError
from oallama.core.types import Operator, Predicted, Workload
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END
from oallama.run.prompt import BYTES_PER_TOKEN, Prompt, likely_tokens, prompt_for

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.answer import Generation
    from oallama.run.engine import Engine


@click.command("run", cls=ServerCommand)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]", shell_complete=complete_file)
@model_option
@option("-p", "--prompt", metavar="PROMPT", group=Group.PROMPT, help="Prompt; `-`: read stdin only.")
@option("-f", "--file", "prompt_file", type=click.Path(), metavar="FILE", group=Group.PROMPT, help="The prompt's file.")
@length_option
@placement.placement_options()
@answer_options
@json_option
def command(
    words: tuple[str, ...],
    model_option: str | None,
    prompt: str | None,
    prompt_file: str | None,
    n_gen: int | None,
    asked: placement.PlacementOptions,
    answers: AnswerOptions,
    as_json: bool,
) -> None:
    """Answer a prompt; without a prompt, start a chat. Without MODEL, use the built-in story model.

    \b
      oallama run "Once upon a time"
      oallama run model.gguf "Why is the sky blue?" -n 256
      oallama run model.gguf "Sum this up:" < report.txt

    \f
    The prompt is the text on stdin, if that is a pipe or file, followed by PROMPT. If both are missing on a terminal,
    a chat starts, as with `oallama chat`. The first run of a model uses llama.cpp's own placement. On a terminal it
    then times this machine and compares plans, until you type a key; later runs use the fastest plan. A single
    argument is the MODEL if it is an existing file, ends in .gguf or is the name of a downloaded model (`oallama
    list`); otherwise it is the PROMPT. An argument that only looks like a model is refused.
    """
    if prompt_file is not None:
        if prompt is not None:
            raise UsageError("the prompt is given twice: with -p and with -f")
        prompt = text_of_file(prompt_file, "prompt").removesuffix("\n")  # as llama.cpp reads it
    model, text = model_and_prompt(words, model_option, prompt)
    if text is None and not as_json and output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout):
        from oallama.cli.chat.command import start

        start(None if model is None else model_file(model), n_gen, asked, answers)
        return
    sampling = answers.sampling.sampling()  # reports wrong options before waiting for stdin
    text = read_prompt(text, of_file=prompt_file is not None)
    with output.busy("planning"):
        planned, answered = plan_answer(asked, answers, None if model is None else model_file(model), text, n_gen)
    placer, plan = planned.placer, planned.plan
    shows = not as_json and output.is_terminal(sys.stderr)
    tell_plan(placer, plan, shows)
    drawn = {"stop": answers.sampling.stop, **asdict(sampling)}
    with placement.loaded(placer, plan, asked, answers, chats=answered.chats, once=True) as engine:
        if as_json:
            document = run_document(answered.generate(engine, n_gen, **drawn), engine, plan)
            document["seed"] = sampling.seed
            output.emit_json(document | ({"emulated": True} if placer.device.is_emulated else {}))
        else:
            stream = answered.stream(engine, n_gen, output.told_progress, output.write_thought, **drawn)
            answer = output.write_stream(stream, [])
        if shows:
            tell_figures(placer, engine, answer, [] if sampling.temperature == 0 else [f"seed {sampling.seed}"])
        placement.keep_block_times(placer, engine)
    if planned.is_untuned and asked.tune == "after" and not as_json:
        if is_interactive():
            tune_after_answer(placer, planned.workload)
        elif shows:
            output.log(f"oallama: {tuning_gain(placer, planned.workload, plan)}")


def tell_plan(placer: Placer, plan: Plan, shows: bool) -> None:
    """Print the plan's expected times; in a pipe only if no weight fits the device. shows: whether somebody reads."""
    from oallama.report.expected import fits_nothing, fits_text

    if shows:
        output.log(f"oallama: {placement.expected(placer, plan)}")
    elif fits_nothing(plan):  # the device was asked for, and the CPU answers
        output.log(f"note: {fits_text(plan, placer.operators, placer.model.n_layer)}")


def plan_answer(
    asked: placement.PlacementOptions, answers: AnswerOptions, model: str | None, text: str, n_gen: int | None
) -> tuple[placement.Planned, Prompt]:
    """Plan for the prompt's number of tokens. Raises UsageError for a prompt that does not fit the context."""

    def workload_for(placer: Placer) -> Workload:
        prompt = prompt_for(placer.model, text, answers.chat, answers.system)
        most = prompt.most(n_gen)
        n_answer = likely_answer(placer, len(text.encode())) if most == WITHOUT_END else most
        least = placer.workload(1, 0).n_ctx
        n_prompt = likely_tokens(placer.model.path, prompt, placer.options.n_ctx, n_answer, least)
        return placement.run_workload(placer, n_prompt, n_answer)

    planned = asked.plan_for(model, workload_for)
    model_info = planned.placer.model
    prompt = prompt_for(model_info, text, answers.chat, answers.system)
    if asked.plan_file is not None:  # check that the prompt fits
        likely_tokens(model_info.path, prompt, planned.placer.options.n_ctx or planned.plan.workload.n_ctx)
    return planned, prompt


def likely_answer(placer: Placer, prompt_bytes: int) -> int:
    """Return the number of tokens to plan for if the answer has no limit."""
    n_ctx = placer.options.n_ctx
    room = DEFAULT_TOKENS if n_ctx is None else n_ctx - (prompt_bytes // BYTES_PER_TOKEN + 1)
    return max(0, min(DEFAULT_TOKENS, room))


def run_document(generation: Generation, engine: Engine, plan: Plan) -> dict[str, Any]:
    """Return the document of `oallama run --json`. plan: as made or measured; the engine's plan names the device as
    llama-server does."""
    return {
        **asdict(generation),
        "policy": engine.plan.policy,
        "device": engine.device,
        "memory": {"device_bytes": engine.memory.device_bytes, "host_bytes": engine.memory.host_bytes},
        "plan_fingerprint": plan.fingerprint,
        "attention": None if engine.attention is None else asdict(engine.attention),
        "split": split_document(engine, generation),
    }


def split_document(engine: Engine, generation: Generation) -> dict[str, Any] | None:
    """Return `split` of the JSON: the split back end's counters for batches of several tokens, which are the prompt,
    and for single tokens (the prompt's last token is alone in the last layer, and counts with these), seconds per
    decoded token, and bytes in host memory and on the device. None for a plan without split operators."""
    report = engine.split_report()
    if report is None or not report.slices:
        return None
    n_decoded = generation.n_gen if generation.end == "model" else max(0, generation.n_gen - 1)
    decode = asdict(report.single)
    return {
        "prompt": asdict(report.stats - report.single),
        "decode": decode,
        "n_decoded": n_decoded,
        "per_token": {key: value / max(1, n_decoded) for key, value in decode.items() if key.endswith("_s")},
        "memory": asdict(report.memory),
    }


def tell_figures(placer: Placer, engine: Engine, answer: Generation, more: Sequence[str]) -> None:
    """Print why an answer was cut, its measured and expected times, `more` figures, and whether times drift."""
    if cut := cut_text(answer, engine.n_ctx):
        output.log(f"oallama: {cut}")
    predicted = expected_of(placer, engine, answer)
    output.log(" · ".join([statistics(answer, engine, predicted, placer.operators), *more]))
    placement.tell_drift(placer, answer, None if predicted is None else predicted.tpot_s)


def expected_of(placer: Placer, engine: Engine, generation: Generation) -> Predicted | None:
    """Return the predicted times of this prompt and answer. None without measurements, or if an emulated device makes
    times meaningless."""
    if placer.device.is_emulated:
        return None
    try:
        return placer.expected(engine.plan, generation.n_prompt, generation.n_gen)
    except OallamaError:  # the answer is complete, and the prediction is optional
        return None


def cut_text(generation: Generation, n_ctx: int) -> str:
    """Return why an answer was cut, and the option for a longer answer; empty if it was not cut."""
    if generation.end == "limit":
        return f"the answer was cut after {generation.n_gen} tokens; use -n -1 for no limit"
    if generation.end == "context":
        return f"the answer was cut because the context of {n_ctx} tokens is full; use -c {2 * n_ctx}"
    return ""


def statistics(
    generation: Generation, engine: Engine, expected: Predicted | None, operators: Sequence[Operator]
) -> str:
    """Return the line below the text: measured and expected times and rates, and where the weights are."""
    from oallama.report.expected import measured_texts
    from oallama.report.slices import weights_on_device
    from oallama.report.text import percent, policy_on

    parts = measured_texts(generation.n_prompt, generation.ttft_s, generation.tpot_s, expected)
    if engine.device == "none":
        return " · ".join([*parts, "CPU"])
    share = percent(*weights_on_device(engine.plan.pairs(operators)))
    return " · ".join([*parts, policy_on(engine.plan.policy, engine.device), f"{share} of weights on the device"])
