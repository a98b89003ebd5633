"""`oallama`: the command group, and the conversion of errors to exit codes.

A subcommand's module is imported when it is called, so that `oallama --help` answers at once.
stdout carries only the result; output of native libraries and child processes goes to stderr.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from oallama import __version__
from oallama.cli.output import drop, log
from oallama.cli.signals import ignore_signals, interrupted_code, treat_as_ctrl_c
from oallama.core.errors import GGML_OUT_OF_MEMORY, OUT_OF_MEMORY, OallamaError
from oallama.device.interrupt import drop_no_interrupt
from oallama.report.text import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

START_PAGE = {
    "Run": {
        "run": "Answer a prompt.",
        "chat": "Chat with a model in the terminal.",
        "serve": "Serve a model over OpenAI's HTTP API.",
        "export": "Convert a plan to a command line of stock llama.cpp.",
    },
    "Understand": {
        "what-if": "Predict a model's speed on other cards.",
        "affinity-report": "Show where each operator goes, and why.",
        "plan": "Plan a placement, and write it to a file.",
        "simulate": "Predict what CPU, GPU and copies do while a plan runs.",
        "inspect": "Show a model's header and operators.",
    },
    "Measure": {
        "tune": "Find the fastest plan on this machine.",
        "bench": "Compare policies with stock llama.cpp.",
        "profile": "Time a model's matrix multiplications.",
    },
    "Models and machine": {
        "pull": "Download a model from Hugging Face.",
        "list": "List downloaded models.",
        "devices": "List the CPU and GPUs.",
        "setup": "Compile llama.cpp, or install a prebuilt one.",
        "doctor": "Check the installation, and say how to repair it.",
    },
}
"""Groups of commands with their short help, here so that listing commands loads no command."""

COMMANDS = {name: text for commands in START_PAGE.values() for name, text in commands.items()}

DEBUG_VARIABLE = "OALLAMA_DEBUG"

SPINS = 5000
"""Spins of libgomp before a waiting thread sleeps, 0.1 to 0.2 ms. On a quiet machine as fast as libgomp's 300,000; with
two busy programs on two cores, tokens are 2 to 15 times as fast (docs/decisions.md)."""

LIBRARIES_BYTES = 128 << 20  # address space that numpy and llama.cpp need; 108 MiB were measured

_MEMORY_REFUSED = (
    "MemoryError",  # of a child
    "can't start new thread",  # Python, without memory for a stack
    "returned NULL without setting an exception",  # Python, whose MemoryError was lost
    "error return without exception set",  # Python too, of a module in C
    "unknown encoding: idna",  # Python, which could not load its own module
    "std::bad_alloc",  # llama.cpp, which blames the file
    "failed to map segment from shared object",  # the dynamic linker
    "Memory allocation still failed",  # OpenBLAS, which then ends the process
    GGML_OUT_OF_MEMORY,
    "insufficient memory (attempted to allocate",  # ggml too, after which llama.cpp blames the file
    os.strerror(errno.ENOMEM),
)
"""Messages of libraries that run out of memory, in this process or in a child."""

_TUTORIAL = """\
Run large language models on machines whose GPU is too small for them. Each weight goes where it saves the most time.

\b
  oallama what-if model.gguf                       predict the gain on other cards
  oallama run model.gguf "Why is the sky blue?"    answer a prompt
  oallama affinity-report model.gguf               show what goes where, and why

Without MODEL, `oallama run` uses the built-in story model. Without a GPU, `--device emulated:rtx3060` emulates a GPU's
timing.
"""


class LazyGroup(click.Group):
    """A group whose commands are modules of oallama.cli, each with a `command`, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"oallama.cli.{cmd_name.replace('-', '_')}").command
        command.short_help = COMMANDS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; `help COMMAND` is its --help. For an unknown command the error suggests another."""
        word = str(args[0])
        if word == "help":
            if len(args) < 2:
                click.echo(ctx.get_help())
                ctx.exit()
            word, args = args[1], [args[1], "--help"]
        if word in COMMANDS or word.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        meant = _meant(word, args)
        raise click.UsageError(f"unknown command {word!r}" + (f"; {meant}" if meant else ""), ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for group, commands in START_PAGE.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


def _meant(word: str, args: list[str]) -> str:
    """Suggest a command for an unknown word: a model or a prompt to run, or a misspelt command. Returns "" without a
    suggestion."""
    from oallama.cli.prompt import is_model
    from oallama.core.text import suggestion

    if " " in word or is_model(word):
        return f"to run it: {shlex.join(['oallama', 'run', *args])}"
    return suggestion(word, COMMANDS, form="`oallama {}`")


@click.command(
    cls=LazyGroup,
    help=_TUTORIAL,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="oallama", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Show the help without a command."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 work failed, 2 wrong usage or unusable input, 130 interrupted,
    143 ended by SIGTERM."""
    try:
        treat_as_ctrl_c()
        drop_no_interrupt()
        reserve_stdout()
        code = exit_code(argv)
        drop_unwritten()
        ignore_signals()
    except KeyboardInterrupt:  # during the command, before it, or a dropped interrupt that is raised after it
        code = _interrupted()
    # CPython notes a KeyboardInterrupt that left an exec of text, as dataclasses have; its exit code would be -2
    exec("")
    sys.exit(code)


def exit_code(argv: Sequence[str] | None = None) -> int:
    """Run a command line; an expected failure is one line on stderr, never a traceback (unless OALLAMA_DEBUG=1). Raises
    KeyboardInterrupt."""
    stdout = sys.stdout
    try:
        return _result(argv)
    except SystemExit as stop:
        # click wraps stdout and exits when the reader of a pipe has gone; else this is shell completion
        return int(stop.code or 0) if sys.stdout is stdout else _reader_gone()
    except BrokenPipeError:
        return _reader_gone()
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return _fail(f"{error.format_message().rstrip('.')}{where}", 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except Exception as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _MEMORY_REFUSED):
            return _fail(OUT_OF_MEMORY, 1)
        if isinstance(error, OallamaError):
            return _fail(str(error), error.exit_code)
        if isinstance(error, OSError):
            return _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)
        return _fail(_unexpected(error), 1)


def _result(argv: Sequence[str] | None) -> int:
    """Run the group. Raises KeyboardInterrupt also if another error hides it: a failure to print it, or an error of
    CPython before 3.12, which hides it during the creation of a class."""
    try:
        _claim_libraries()
        result = cli.main(args=None if argv is None else list(argv), prog_name="oallama", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        raise
    return result if isinstance(result, int) else 0


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is an interrupt or was caused by one."""
    seen: set[int] = set()  # causes may form a cycle
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt | click.Abort):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _interrupted() -> int:
    """Report the interrupt. Drops unwritten output of stdout; a second Ctrl-C also drops that of stderr."""
    code = interrupted_code()
    try:
        drop(sys.stdout)
        _fail("interrupted", code)
    except KeyboardInterrupt:
        drop(sys.stderr)
    ignore_signals()
    return code


def _claim_libraries() -> None:
    """Raise MemoryError or OSError if numpy and llama.cpp cannot be loaded: numpy's OpenBLAS would end the process
    without a message. Give OpenBLAS a single thread, which is enough here; each further thread takes 40 MiB. Let
    llama.cpp's waiting threads sleep after SPINS, unless the user sets it otherwise."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    if sys.platform == "linux":
        mmap.mmap(-1, LIBRARIES_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


class ResultStream(io.FileIO):
    """Unbuffered stdout, whose errors name stdout."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise OSError(error.errno, f"cannot write the result to stdout: {why}") from None


def reserve_stdout() -> None:
    """Keep stdout for results: file descriptor 1 becomes stderr, and sys.stdout a private copy of what it was.

    Native libraries and child processes write to descriptor 1 directly, and only this keeps their output apart. A
    closed descriptor from 0 to 2 is opened to /dev/null, else the next opened file would get its number, and the
    output. Writing to a closed stdout fails.
    """
    closed = [n for n, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)) if stream is None]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process lives
    try:
        result = sys.stdout.fileno() if sys.stdout is not None else 1
        stderr_fd = sys.stderr.fileno() if sys.stderr is not None else 2
        private = os.open(os.devnull, os.O_RDONLY) if result in closed else os.dup(result)
    except (AttributeError, OSError, ValueError):  # not a file at all
        return
    on_terminal = os.isatty(private)
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    if sys.stdout is not None:
        sys.stdout.flush()
    os.dup2(stderr_fd, result)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(ResultStream(private, "w")), encoding, errors="replace", line_buffering=on_terminal
    )


def drop_unwritten() -> None:
    """Drop unwritten output of stdout, which the interpreter would report again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _reader_gone()


def _unexpected(error: Exception) -> str:
    if type(error).__module__.startswith("ggml_bridge."):  # its errors are one sentence too, but no OallamaError
        return str(error)
    return f"internal error, please report it: {type(error).__name__}: {error} (set {DEBUG_VARIABLE}=1 for details)"


def _fail(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1" and code not in (130, 143):
        import traceback

        traceback.print_exc()
    line = " ".join(message.split())
    try:
        log(f"oallama: {printable(line, 2000)}")
    except OSError:  # nobody reads it; the exit code stands
        drop(sys.stderr)
    return code


def _reader_gone() -> int:
    """End quietly if the reader of a pipe is gone."""
    drop(sys.stdout)
    return 0
