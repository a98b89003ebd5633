"""`oallama bench`: a fair comparison of policies and stock llama.cpp."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oallama.bench.rows import FORMATS
from oallama.cli import options as shared
from oallama.cli.help import Command, Group, option
from oallama.cli.model_file import model_file
from oallama.cli.output import check_result, emit, log, turn_bar, write_file
from oallama.cli.policy import PolicyOptions, note_unused, rules_options
from oallama.cli.records import Function, as_record, count, counts, option_field, parsed
from oallama.core.errors import UsageError
from oallama.core.extensions import load_extension
from oallama.core.options import Options
from oallama.core.types import DecodeStep

if TYPE_CHECKING:
    from oallama.bench.ab import Bench, Start
    from oallama.bench.records import BenchResult
    from oallama.placer import Placer
    from oallama.placer.drafter import Drafter


def parse_pair(text: str) -> tuple[int, int]:
    """Parse `512,128`: prompt and generated tokens. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*", text)
    if not match or not int(match[1]) + int(match[2]):
        raise ValueError(f"{text!r} is not a prompt and a generation length; write e.g. 512,128")
    return int(match[1]), int(match[2])


def parse_names(text: str) -> tuple[str, ...]:
    """Parse `auto,stock-fit`: distinct names in order. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{text!r} is not a list of different arms; write e.g. stock-fit,auto")
    return names


def parse_output(text: str) -> tuple[str, str | None]:
    """Parse a format's name, or a file whose suffix is a format, to (format, file or None for stdout). Raises
    ValueError."""
    if text in FORMATS:
        return text, None
    suffix = Path(text).suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise ValueError(f"{text!r} is neither a format ({', '.join(FORMATS)}) nor a file with such a suffix")
    return suffix, text


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse acceptance rates of the first, the second, … draft. Raises ValueError."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates) or list(rates) != sorted(rates, reverse=True):
        raise ValueError(f"{text!r} is not a list of falling probabilities; write e.g. 0.8,0.65,0.5")
    return rates


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Format and place of a result. output: (format, file or None for stdout)."""

    output: tuple[str, str | None] = option_field("-o", "--output", type=parsed(parse_output), default="md",
        metavar="FORMAT|FILE", help="md, json, or a file with that suffix.")  # fmt: skip
    as_json: bool = option_field("--json", is_flag=True, default=False, help="Print one JSON document.")

    def save(self, result: BenchResult) -> None:
        """Write the result so far to the file, so that it is valid if measuring ends early."""
        form, file = self.output
        if file is not None and any(series.kept for series in result.series):
            write_file(file, text_of(result, form))

    def tell(self, result: BenchResult) -> None:
        """Print the result, or write it to the requested file."""
        form, file = self.output
        if file is not None:
            log(f"wrote {file}")
        if self.as_json or file is None:
            emit(text_of(result, "json" if self.as_json else form))
        if self.as_json or form != "md" or file is not None:
            for warning in result.warnings:
                log(f"warning: {warning}")


result_options = as_record("results", ResultOptions)
"""The command gets `results`, a ResultOptions."""


def text_of(result: BenchResult, form: str) -> str:
    from oallama.bench.rows import formatted, rows

    return formatted(rows(result), form)


def matrix_option(function: Function) -> Function:
    """Add --matrix, which runs the entry point of that name instead of the command, with the other options' values."""

    @wraps(function)
    def merged(*args: Any, matrix: str | None, **values: Any) -> Any:
        if matrix is None:
            return function(*args, **values)
        run = load_extension("oallama.bench", "matrix")
        if run is None:
            raise UsageError("--matrix needs the package oallama_contrib, which is not installed")
        return run(click.get_current_context(), matrix, values)

    return option(
        "--matrix", metavar="FILE.toml", group=Group.COMPARED,
        help="Measure the comparisons in this file.\f Continues after an interruption. Writes the result to -o, by "
        "default the file's name with .json, and a picture beside it.",
    )(merged)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedOptions:
    """Prompts and answers to time, in tokens: each length of either, pairs of both, each at each depth."""

    n_prompt: tuple[int, ...] = option_field("-p", "--n-prompt", type=counts(0, 10**7), default="512",
        metavar="N,…", group=Group.TIMED, help="Prompt lengths to time; 0: none.")  # fmt: skip
    n_gen: tuple[int, ...] = option_field("-n", "--n-gen", type=counts(0, 10**7), default="128",
        metavar="N,…", group=Group.TIMED, help="Answer lengths to time; 0: none.")  # fmt: skip
    pairs: tuple[tuple[int, int], ...] = option_field("-pg", type=parsed(parse_pair), multiple=True, default=(),
        metavar="PP,TG", group=Group.TIMED,
        help="Time PP prompt tokens and TG generated tokens, together and separately.")  # fmt: skip
    n_depth: tuple[int, ...] = option_field("-d", "--n-depth", type=counts(0, 10**7), default="0",
        metavar="N,…", group=Group.TIMED, help="Tokens already in the KV cache.")  # fmt: skip


test_options = as_record("timed", TimedOptions)
"""The command gets `timed`, a TimedOptions."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Drafts and parallel requests, which only llama-server has. draft_model: for arms with drafts. accepted: rates by
    position at which drafts are accepted at random; None: by the model. n_parallel: requests at once."""

    draft_model: str | None = option_field("-md", "--model-draft", type=click.Path(), metavar="MODEL",
        group=Group.COMPARED, advanced=True, help="Draft model of arms NAME+draftN.")  # fmt: skip
    accepted: tuple[float, ...] | None = option_field("--spec-synth-rates", type=parsed(parse_rates), metavar="P0,P1,…",
        group=Group.TIMED, advanced=True,
        help="Draw whether the first, the second, … draft is accepted, with these probabilities.")  # fmt: skip
    n_parallel: int = option_field("-np", "--parallel", type=count(1, 64), default=1, metavar="N",
        group=Group.TIMED, advanced=True, help="Requests at once.")  # fmt: skip

    def drafter(self, placer: Placer) -> Drafter | None:
        """The draft model, beside the placer's model; None if none is named."""
        from oallama.placer.drafter import DraftModel

        return None if self.draft_model is None else DraftModel(placer, model_file(self.draft_model))

    def start(self, placer: Placer, bench: Bench) -> Start:
        """Return how arms are started: in llama-server if one of them needs it. Raises UsageError for tests with a
        depth, which llama-server lacks."""
        from oallama.bench.process import ArmProcess
        from oallama.bench.server_arm import ServerArm

        if self.n_parallel == 1 and all(arm.draft is None for arm in bench.arms):
            return ArmProcess
        if any(test.n_depth for test in bench.tests):
            raise UsageError("llama-server is measured without a depth; leave -d out")
        return partial(ServerArm, placer=placer, n_parallel=self.n_parallel, accepted=self.accepted or ())


request_options = as_record("requests", RequestOptions)
"""The command gets `requests`, a RequestOptions."""


@click.command("bench", cls=Command)
@matrix_option
@shared.model_argument
@option(
    "--arms", type=parsed(parse_names), metavar="A,B,…", group=Group.COMPARED, show_default="stock-best,auto",
    help="Policies, plan files (*.json), stock-best, stock-fit, stock-ngl, stock-no-host, stock-ncmoe, "
    "stock-moe-cache, stock-cpu.\f "
    "Ratios are to the first arm. The suffix -ubN sets a micro-batch of N tokens; @N runs stock llama.cpp on device N "
    "alone, counted from 0. The default without a device is stock-cpu,auto; with several devices "
    "stock-fit over all, stock-fit on each, and auto.",
)  # fmt: skip
@test_options
@option(
    "-r", "--repetitions", type=count(2, 1000), default=6, show_default=True, metavar="N",
    group=Group.TIMED,
    help="Samples per arm and test; a ratio needs 6.\f They are taken in the order A B B A, so N is rounded up to an "
    "even number.",
)  # fmt: skip
@request_options
@result_options
@shared.gathered(*shared.PLACEMENT, *shared.CONTEXT)
@rules_options
@shared.profile_option
@option("--reload", is_flag=True, group=Group.TIMED, advanced=True,
        help="Load an arm anew for each turn; automatic if the arms do not fit into memory together.")  # fmt: skip
@shared.tuned_option
@shared.retune_option
@option("--progress/--no-progress", default=None, advanced=True, show_default="on a terminal", help="Show progress.")
def command(
    model: str,
    arms: tuple[str, ...] | None,
    timed: TimedOptions,
    repetitions: int,
    requests: RequestOptions,
    results: ResultOptions,
    options: Options,
    policy: PolicyOptions,
    profile: str | None,
    reload: bool,
    tuned: bool,
    retune: bool,
    progress: bool | None,
) -> None:
    """Compare policies and stock llama.cpp by interleaved measurements under one memory cap.

    \b
      oallama bench model.gguf
      oallama bench model.gguf --arms stock-fit,stock-ngl,oato,auto --vram 6GiB -r 10 -o result.json
      oallama bench model.gguf --arms stock-ngl,auto -pg 512,128 -d 4096
      oallama bench --matrix many.toml -o many.json

    \f
    Each arm runs in its own process, with the same tokens. The result says how many times as fast as the first arm each
    arm is, with the 95 % interval. The placement is read back after the load. An arm gets no ratio if its weights lie
    elsewhere than planned, or if its configuration is the first arm's. Stock arms load no oallama plugin.
    """
    from oallama.bench.ab import run_bench
    from oallama.bench.arms import ArmMaker
    from oallama.bench.prepare import bench_tests, default_arms, prepare, shared_setting
    from oallama.placer import Placer
    from oallama.profile.acceptance import PUBLISHED
    from oallama.tune.run import tuned_arm

    if retune and not tuned:
        raise UsageError("--no-tuned cannot be combined with --retune")
    if policy.rules.need_oato and "oato" not in (arms or ()):
        raise UsageError("--affinity and --fill apply only to arm oato; add it to --arms")
    check_result(results.output[1])
    tests = bench_tests(timed.n_prompt, timed.n_gen, timed.pairs, timed.n_depth)
    placer = Placer.of_file(model, options, profile)
    note_unused(placer)
    setting = shared_setting(placer, tests, requests.n_parallel)
    auto = partial(tuned_arm, refresh=retune) if tuned else None
    with turn_bar(progress) as shown:
        step = DecodeStep(requests.n_parallel, n_slots=requests.n_parallel)
        rates = requests.accepted or PUBLISHED
        maker = ArmMaker(placer, setting, tests, policy.rules, shown, auto, step, requests.drafter(placer), rates)
        n_rounds, resident = -(-repetitions // 2), False if reload else None
        bench = prepare(maker, arms or default_arms(placer), n_rounds=n_rounds, resident=resident)
        result = run_bench(bench, shown, results.save, requests.start(placer, bench))
        results.save(result)
    results.tell(result)
    if result.interrupted:
        raise KeyboardInterrupt
