"""Options of `oallama bench` as records: what is timed, how, and where results go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.bench.formats import FORMATS
from oallama.cli.help import Group, option
from oallama.cli.options import as_record, chart_option, count, parsed
from oallama.cli.output import check_result, emit, talk, write_chart, write_file
from oallama.device.spec import parse_cpus

if TYPE_CHECKING:
    from oallama.bench.records import BenchResult, BenchTest

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


@dataclass(frozen=True, slots=True)
class TimedOptions:
    """What is timed: lists of token counts, each with each; pairs: a prompt and the generation behind it."""

    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    n_depth: tuple[int, ...]

    def tests(self) -> tuple[BenchTest, ...]:
        """Raises UsageError where nothing is left."""
        from oallama.bench.prepare import bench_tests

        return bench_tests(self.n_prompt, self.n_gen, self.pairs, self.n_depth)


timed_options = as_record(
    "timed",
    TimedOptions,
    option(
        "-p", "--n-prompt", type=parsed(parse_counts), default="512", show_default=True, metavar="N,…",
        group=Group.TIMED,
        help="Prompts to time; 0: none.",
    ),
    option(
        "-n", "--n-gen", type=parsed(parse_counts), default="128", show_default=True, metavar="N,…",
        group=Group.TIMED,
        help="Generations to time; 0: none.",
    ),
    option(
        "-pg", "pairs", type=parsed(parse_pair), multiple=True, metavar="PP,TG", group=Group.TIMED,
        help="Time PP prompt tokens and TG generated ones, together and each.",
    ),
    option(
        "-d", "--n-depth", type=parsed(parse_counts), default="0", show_default=True, metavar="N,…",
        group=Group.TIMED,
        help="Tokens in the KV cache before.",
    ),
)  # fmt: skip
"""The command gets `timed`, a TimedOptions."""


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Where a comparison goes. output: (format, file or None for stdout)."""

    output: tuple[str, str | None]
    chart: str | None
    as_json: bool

    def check(self) -> None:
        """Raises UsageError where it is known beforehand that a file cannot be written."""
        check_result(self.output[1])
        check_result(self.chart)

    def save(self, result: BenchResult) -> None:
        """What there is so far, to the file, so that it is valid whenever measuring ends."""
        form, file = self.output
        if file is not None and any(series.kept for series in result.series):
            write_file(file, text_of(result, form))

    def tell(self, result: BenchResult) -> None:
        """What was measured, to where it was asked for; the picture last, as that alone may still fail."""
        form, file = self.output
        if file is not None:
            talk(f"wrote {file}")
        if self.as_json or file is None:
            emit(text_of(result, "json" if self.as_json else form))
        if self.as_json or form != "md" or file is not None:
            for warning in result.warnings:
                talk(f"warning: {warning}")
        if self.chart is not None and any(series.kept for series in result.series):
            draw(result, self.chart)


result_options = as_record(
    "results",
    ResultOptions,
    option(
        "-o", "--output", type=parsed(parse_output), default="md", show_default=True, metavar="FORMAT|FILE",
        help="md, csv, json, jsonl, sql, or a file that ends so.",
    ),
    chart_option,
    option("--json", "as_json", is_flag=True, help="Print one JSON document."),
)  # fmt: skip
"""The command gets `results`, a ResultOptions."""


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How arms take turns."""

    cpus: tuple[int, ...] | None
    seed: int
    reload: bool


turn_options = as_record(
    "turns",
    TurnOptions,
    option(
        "--cpus", type=parsed(parse_cpus), metavar="LIST", group=Group.TIMED, advanced=True,
        help="Pin the arms to these CPUs, like 0 or 0-3.",
    ),
    option("--seed", type=count(0), default=0, show_default=True, metavar="N", group=Group.TIMED,
           advanced=True, help="Seed of the random tokens."),
    option("--reload", "reload", is_flag=True, group=Group.TIMED, advanced=True,
           help="Load an arm anew for each turn, as where not all fit at once."),
)  # fmt: skip
"""The command gets `turns`, a TurnOptions."""


def draw(result: BenchResult, chart: str) -> None:
    from oallama.bench.rows import rows
    from oallama.report.bench import bench_chart

    write_chart(chart, bench_chart(rows(result)))


def text_of(result: BenchResult, form: str) -> str:
    from oallama.bench.formats import formatted
    from oallama.bench.rows import rows

    return formatted(rows(result), form)
