"""`oallama bench`: policies and stock llama.cpp against each other, honestly."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oallama.bench.formats import FORMATS
from oallama.cli.bench_progress import bench_progress
from oallama.cli.options import (
    CONTEXT,
    PLACEMENT,
    chart_option,
    check_gate,
    count,
    gate_option,
    gathered,
    model_argument,
    parsed,
    profile_option,
    refresh_gate_option,
)
from oallama.cli.output import check_result, emit, talk, write_chart, write_file
from oallama.cli.policy import affinity_option, fill_option, note_unused
from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.device.spec import parse_cpus

if TYPE_CHECKING:
    from oallama.bench.ab import Bench
    from oallama.bench.records import BenchResult
    from oallama.place.affinity import FillRule
    from oallama.place.oato import AffinityRule

DEFAULT_REPS = 6


def parse_counts(text: str) -> tuple[int, ...]:
    """`512` or `128,512`: token counts, 0 for none. Raises ValueError."""
    if not re.fullmatch(r"\s*[0-9]{1,7}(\s*,\s*[0-9]{1,7})*\s*", text):
        raise ValueError(f"{text!r} is not a list of token counts; write it like 512 or 128,512")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def parse_pair(text: str) -> tuple[int, int]:
    """`512,128`: prompt and generated tokens. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*", text)
    if not match or not int(match[1]) + int(match[2]):
        raise ValueError(f"{text!r} is not a prompt and a generation; write it like 512,128")
    return int(match[1]), int(match[2])


def parse_names(text: str) -> tuple[str, ...]:
    """`auto,stock-fit`: distinct names in order. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{text!r} is not a list of different arms; write it like stock-fit,auto")
    return names


def parse_output(text: str) -> tuple[str, str | None]:
    """(format, file or None for stdout): a format's name, or a file whose suffix is one. Raises ValueError."""
    if text in FORMATS:
        return text, None
    suffix = Path(text).suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise ValueError(f"{text!r} is neither a format ({', '.join(FORMATS)}) nor a file that ends in one")
    return suffix, text


@click.command("bench")
@model_argument
@click.option(
    "--arms", type=parsed(parse_names), metavar="A,B,…",
    help="What is compared, the first being what ratios refer to: policies, plan files (*.json), and stock-cpu, "
    "stock-ngl, stock-fit, stock-ncmoe, with -ubN behind the name for micro-batches of N tokens.  "
    "[default: stock-fit,auto; without a device stock-cpu,auto]",
)  # fmt: skip
@click.option(
    "--stock-args", "stock_args", multiple=True, metavar='"FLAGS"',
    help="One more arm: stock llama.cpp with your flags (-ngl, -ot, -ncmoe, -cmoe, -fa, -ctk, -ctv, -t, -b, -ub).",
)  # fmt: skip
@click.option(
    "-p", "--n-prompt", type=parsed(parse_counts), default="512", show_default=True, metavar="N,…",
    help="Prompts to time; 0: none.",
)  # fmt: skip
@click.option(
    "-n", "--n-gen", type=parsed(parse_counts), default="128", show_default=True, metavar="N,…",
    help="Generations to time; 0: none.",
)  # fmt: skip
@click.option(
    "-pg", "pairs", type=parsed(parse_pair), multiple=True, metavar="PP,TG",
    help="A prompt and the generation after it, timed together and each.",
)  # fmt: skip
@click.option(
    "-d", "--n-depth", type=parsed(parse_counts), default="0", show_default=True, metavar="N,…",
    help="Tokens in the KV cache before.",
)  # fmt: skip
@click.option(
    "-r", "--repetitions", type=count(2, 1000), default=DEFAULT_REPS, show_default=True, metavar="N",
    help="Samples of each arm and test, taken in turns A B B A, so rounded up to an even number; a ratio needs 6.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=parsed(parse_output), default="md", show_default=True, metavar="FORMAT|FILE",
    help="md, csv, json, jsonl or sql to stdout, or a file that ends in one of these.",
)  # fmt: skip
@chart_option
@click.option("-oe", "--output-err", type=click.Choice(FORMATS), metavar="FORMAT", help="The same on stderr as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, whatever -o writes.")
@gathered(*PLACEMENT, *CONTEXT)
@affinity_option
@fill_option
@profile_option
@click.option(
    "--cpus", type=parsed(parse_cpus), metavar="LIST",
    help="Pin the arms to these CPUs, like 0 or 0-3; a worker is pinned by --device.",
)  # fmt: skip
@click.option("--seed", type=count(0), default=0, show_default=True, metavar="N", help="Of the tokens that are timed.")
@click.option("--delay", type=count(0, 3600), default=0, metavar="SECONDS", help="To cool off before each turn.")
@click.option("--reload", "reload", is_flag=True, help="Load an arm anew for each turn, as where not all fit at once.")
@gate_option
@refresh_gate_option
@click.option("--progress/--no-progress", default=None, help="Show a bar.  [default: on a terminal]")
def command(
    model: str,
    arms: tuple[str, ...] | None,
    stock_args: tuple[str, ...],
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    n_depth: tuple[int, ...],
    repetitions: int,
    output: tuple[str, str | None],
    chart: str | None,
    output_err: str | None,
    as_json: bool,
    options: Options,
    affinity: AffinityRule,
    fill: FillRule,
    profile: str | None,
    cpus: tuple[int, ...] | None,
    seed: int,
    delay: int,
    reload: bool,
    gate: bool,
    refresh_gate: bool,
    progress: bool | None,
) -> None:
    """Measure arms against each other: each in a process of its own, in turns, with the same tokens and under the same
    memory cap, and say how many times faster than the first each one is, with the 95 % interval of that.

    No ratio is given where two arms turn out to be the same, or where an arm did not do what it says: where the weights
    lie is read back after the load. Stock arms load no plugin of ours.

    \b
      oallama bench model.gguf
      oallama bench model.gguf --arms stock-fit,stock-ngl,oato,auto --vram 6GiB -r 10 -o result.json
      oallama bench model.gguf --stock-args "-ngl 20 -fa on" --arms auto -pg 512,128 -d 4096
    """
    from oallama.bench.arms import ArmMaker
    from oallama.bench.prepare import bench_tests, default_arms, prepare, shared_setting
    from oallama.gate.run import gated_arm
    from oallama.place.decide import Rules
    from oallama.placer import Placer

    format, file = output
    check_gate(gate, refresh_gate)
    rules = Rules(affinity, fill)
    if rules.are_oatos and "oato" not in (arms or ()):
        raise UsageError("--affinity and --fill say how oato places, and no arm is oato; name it in --arms")
    check_result(file)
    check_result(chart)
    tests = bench_tests(n_prompt, n_gen, pairs, n_depth)
    placer = Placer.of_file(model, options, profile)
    note_unused(placer)
    setting = shared_setting(placer, tests, cpus or (), seed)
    auto = partial(gated_arm, refresh=refresh_gate) if gate else None
    with bench_progress(progress) as shown:
        maker = ArmMaker(placer, setting, tests, rules, shown, auto)
        bench = prepare(
            maker,
            arms or default_arms(placer),
            stock_args,
            n_blocks=-(-repetitions // 2),
            delay_s=float(delay),
            resident=False if reload else None,
        )
        result = run(bench, format, file, shown)
    tell(result, format, file, as_json, output_err, chart)
    if result.interrupted:
        raise KeyboardInterrupt


def tell(
    result: BenchResult, format: str, file: str | None, as_json: bool, output_err: str | None, chart: str | None
) -> None:
    """What was measured, to where it was asked for; the picture last, as that alone may still fail."""
    if file is not None:
        talk(f"wrote {file}")
    if as_json or file is None:
        emit(_text(result, "json" if as_json else format))
    if output_err is not None:
        talk(_text(result, output_err))
    if as_json or format != "md" or file is not None:
        for warning in result.warnings:
            talk(f"warning: {warning}")
    if chart is not None and any(series.kept for series in result.series):
        _draw(result, chart)


def run(bench: Bench, format: str, file: str | None, progress: Any) -> BenchResult:
    """Measure; a file gets what is there after every block, so that it is valid whenever this ends."""
    from oallama.bench.ab import run_bench

    def save(result: BenchResult) -> None:
        if file is not None and any(series.kept for series in result.series):
            write_file(file, _text(result, format))

    result = run_bench(bench, progress, save)
    save(result)
    return result


def _draw(result: BenchResult, chart: str) -> None:
    from oallama.bench.rows import rows
    from oallama.report.bench import bench_chart

    write_chart(chart, bench_chart(rows(result)))


def _text(result: BenchResult, format: str) -> str:
    from oallama.bench.formats import formatted
    from oallama.bench.rows import rows

    return formatted(rows(result), format)
