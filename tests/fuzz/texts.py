"""Texts that people and plans give: `--device`, sizes and shares, whole command lines."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import click

from fuzz.mutation import NUMBERS, TEXTS, damaged, number, text
from oallama.cli.main import cli
from oallama.core.errors import OallamaError, UsageError
from oallama.core.options import Options
from oallama.core.units import format_bytes, parse_bytes, parse_memory, parse_share
from oallama.device.emulated import parameters_of, use_parameters
from oallama.device.spec import parse_device
from oallama.report.text import printable

DEVICES = (
    "auto", "none", "CPU", "CUDA0", "Vulkan1", "rpc://127.0.0.1:50052", "rpc://host.example:1/",
    "emulated", "emulated:rtx3060", "emulated:rtx4090,vram=6GiB",
    "emulated,link=12.5GB/s,gbps=360,tflops=12.7,latency=1.5us", "emulated:h100,scale=8/2.5,cpus=1,values=drawn,seed=7",
    "emulated:./no-such.txt,vram=1GiB", "emulated:rtx3090,routing=no-such-file,lost_after=10,values=real",
)  # fmt: skip
KEYS = ("vram", "link", "gbps", "tflops", "latency", "scale", "cpus", "values", "seed", "routing", "lost_after")
VALUES = (
    "1", "0", "0.5", "1e-9", "1e9", "1e300", "1e-300", "4e-324", "1e400", "12.3456789", "100000000.1", "auto", "real",
    "1/3", "3/1e308", "6GiB", "1.5GB", "6000MiB", "64k", "50%", "q8_0", "us", "GB/s", "1e5GBps", "9" * 20,
    "9" * 400 + ".5", "0" * 5000 + "1",
)  # fmt: skip
MOST_SHOWN = 2000


def make_device(random: Random) -> bytes:
    """`--device` as somebody might mistype it, or a plan from a stranger might say it."""
    words = random.choice(DEVICES)
    for _ in range(random.choice((1, 1, 2, 3))):
        old, new = random.choice(":,=-/"), random.choice((":", ",", "=", "", "::"))
        words = random.choice(
            (
                f"{words},{random.choice(KEYS)}={random.choice((*VALUES, text(random)))}",
                f"{words},{random.choice(KEYS)}={random.choice(VALUES)}",
                f"{words}:{number(random)}-{number(random)},{text(random)}",
                words.replace(old, new, 1),
                "".join(random.choice((part, str(number(random)))) if part.isdigit() else part for part in words),
                text(random, words),
            )
        )
    return words.encode("utf-8", "surrogatepass")


def check_device(raw: bytes, folder: Path) -> None:
    """Parse it; what it says of itself parses back into it, and an emulated one has parameters."""
    spec = parse_device(decoded(raw))
    for one in (spec, spec.timed, spec.measured):
        assert parse_device(str(one)) == one, f"{one} does not parse back"
    if spec.emulated is not None:
        use_parameters(spec.emulated).encode()
        lines = parameters_of(spec.emulated).encode().decode().splitlines()
        assert not any(line.endswith((" inf", " nan", "per_s 0.0")) for line in lines), f"{spec}: {lines}"


PARSERS: dict[str, Callable[[str], Any]] = {
    "bytes": lambda words: format_bytes(parse_bytes(words)),
    "memory": lambda words: Options.given(vram=words, vram_fill=0.5),
    "share": lambda words: Options.given(gpu_weights=words),
    "seconds": parse_share,
    "size": parse_memory,
    "type": lambda words: Options.given(type_k=words, type_v=words, flash_attn="off"),
}


def make_value(random: Random) -> bytes:
    """`parser:value`, one of PARSERS and what it may be given."""
    words = random.choice((*VALUES, *TEXTS, str(random.choice(NUMBERS))))
    for _ in range(random.randrange(3)):
        words = text(random, words)
    return f"{random.choice(list(PARSERS))}:{words}".encode("utf-8", "surrogatepass")


def check_value(raw: bytes, folder: Path) -> None:
    """The parser gives a value, or raises ValueError or an error of ours."""
    name, _, words = decoded(raw).partition(":")
    try:
        PARSERS.get(name, parse_bytes)(words)
    except ValueError as error:
        raise UsageError(str(error)) from None  # what options.parsed makes of it


@functools.cache
def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {name: command for name in cli.list_commands(context) if (command := cli.get_command(context, name))}


def make_command(random: Random) -> bytes:
    """A command line, quoted as for a shell: options with values that fit, near and far."""
    name = random.choice(list(commands()))
    words = [name]
    for _ in range(random.randrange(6)):
        parameter = random.choice(commands()[name].params)
        if isinstance(parameter, click.Argument) or not parameter.opts:
            words.append(random.choice(("m.gguf", "512,128", text(random))))
            continue
        words.append(random.choice((*parameter.opts, *parameter.secondary_opts)))
        if not getattr(parameter, "is_flag", False):
            value = random.choice((*VALUES, *DEVICES, "on", "split", "1,2", "stock-fit,auto", "x.svg", "md"))
            words.append(text(random, value) if random.random() < 0.4 else value)
    line = shlex.join(words).encode("utf-8", "surrogatepass")
    return damaged(random, line) if random.random() < 0.1 else line


def check_command(raw: bytes, folder: Path) -> None:
    """Parse it as `oallama` does, without running the command."""
    try:
        words = shlex.split(os.fsdecode(raw.replace(b"\0", b"")))  # what an argv may hold
    except ValueError as error:
        raise UsageError(str(error)) from None
    command = commands().get(words[0] if words else "")
    if command is None:
        raise UsageError("no command")
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            context = command.make_context(words[0], words[1:], parent=click.Context(cli))
            Options.given(**{f.name: context.params[f.name] for f in fields(Options) if f.name in context.params})
        except click.exceptions.Exit as stop:
            raise OallamaError("help or a version") from stop
        except click.ClickException as error:
            shown = printable(" ".join(error.format_message().split()), MOST_SHOWN)  # as cli.main does
            raise UsageError(shown) from None


def decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
