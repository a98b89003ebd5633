"""Feed damaged inputs to our readers: each must be read, or refused with one sentence of ours.

    python tests/fuzz --list
    python tests/fuzz gguf -n 100000             # so many inputs
    python tests/fuzz plan --minutes 60          # or for so long
    python tests/fuzz plan --seed 7 --first 5000 # from this one on: two processes may share the inputs of a seed
    python tests/fuzz gguf --replay FILE…        # inputs that were kept

Only OallamaError may come out, within 2 s of CPU time and 512 MiB of memory; anything else is a fault. Its first input
is kept in build/fuzz/TARGET, one for each place in the code. Input i of a seed is always the same. Native code is
fuzzed by clang's libFuzzer where there is clang, else by a mutator of ours, under address and undefined-behaviour
sanitizers; its inputs are kept beside.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz import documents, gguf_files, native, texts
from oallama.core.errors import OallamaError

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2.0
MEMORY_BYTES = 512 << 20
MOST_SENTENCE = 2000  # characters of a refusal; it may repeat the input besides, at most twice as escapes
FOLDER = ROOT / "build" / "fuzz"


@dataclass(frozen=True, slots=True)
class Target:
    """make: one input; check: reads it, in a folder of its own, and raises OallamaError where it is refused."""

    make: Callable[[Random], bytes]
    check: Callable[[bytes, Path], None]
    suffix: str


TARGETS = {
    "gguf": Target(gguf_files.make, gguf_files.check, ".gguf"),
    "imatrix": Target(gguf_files.make_imatrix, gguf_files.check_imatrix, ".gguf"),
    "plan": Target(documents.maker(documents.plans), documents.check_plan, ".json"),
    "profile": Target(documents.maker(documents.profiles), documents.check_profile, ".json"),
    "verdict": Target(documents.maker(documents.verdicts), documents.check_verdict, ".json"),
    "routing": Target(documents.maker(documents.routings), documents.check_routing, ".json"),
    "machine": Target(documents.maker(documents.machines), documents.check_machine, ".json"),
    "device": Target(texts.make_device, texts.check_device, ".txt"),
    "value": Target(texts.make_value, texts.check_value, ".txt"),
    "command": Target(texts.make_command, texts.check_command, ".txt"),
}


class TookTooLong(BaseException):
    """An input took more CPU time than it may: no reader's `except Exception` may hold it up."""


@dataclass(slots=True)
class Counts:
    """Of one run."""

    tried: int = 0
    accepted: int = 0
    slowest_s: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 no fault, 1 faults."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="one of --list, or several, one after another")
    parser.add_argument("-n", type=int, metavar="N", help="inputs to try [10000, or any number with --minutes]")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so many")
    parser.add_argument("--seed", type=int, metavar="S", help="[a fresh one]")
    parser.add_argument(
        "--first", type=int, default=0, metavar="I", help="begin with this input of the seed [0]; not of native targets"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where failing inputs are kept [build/fuzz]")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="try these instead")
    parser.add_argument("--list", action="store_true", help="list the targets")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join([*TARGETS, *native.TARGETS]))
        return 0
    if not options.targets or not {*options.targets} <= {*TARGETS, *native.TARGETS}:
        parser.error(f"name one or more of {', '.join([*TARGETS, *native.TARGETS])}")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    n = options.n if options.n is not None or options.minutes is not None else 10_000
    failed = False
    for name in options.targets:
        if name in native.TARGETS:
            failed |= native.run(name, n, options.minutes, seed, options.folder, options.replay or ())
            continue
        TARGETS[name].make(Random(0))  # imports and makes what is made once
        with limits(), tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory_folder()) as folder:
            if options.replay:
                faults = [fault for path in options.replay if (fault := replayed(TARGETS[name], path, Path(folder)))]
                print("\n".join(faults) or f"{len(options.replay)} inputs, no fault")
                failed |= bool(faults)
            else:
                failed |= fuzz(name, n, options.minutes, seed, options.first, options.folder, Path(folder))
    return int(failed)


def fuzz(name: str, n: int | None, minutes: float | None, seed: int, first: int, kept: Path, folder: Path) -> bool:
    """Try inputs until there were n of them, or the time is over, or somebody ends it; whether there was a fault."""
    target, counts, faults = TARGETS[name], Counts(), dict[str, int]()
    begin = shown = time.monotonic()
    try:
        while (n is None or counts.tried < n) and (minutes is None or time.monotonic() - begin < 60 * minutes):
            raw = target.make(Random(f"{name} {seed} {first + counts.tried}"))
            fault = tried(target, raw, folder, counts)
            if fault:
                where = fault.splitlines()[0]
                if where not in faults:
                    path = _keep(kept / name, f"{seed}-{first + counts.tried}{target.suffix}", raw)
                    print(f"fault: {fault}\n  kept: python tests/fuzz {name} --replay {path}", flush=True)
                faults[where] = faults.get(where, 0) + 1
            counts.tried += 1
            if time.monotonic() - shown > 5 and sys.stderr.isatty():
                shown = time.monotonic()
                print(
                    f"\r{_summary(name, counts, len(faults), shown - begin, seed)} ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
    except KeyboardInterrupt:
        print(_summary(name, counts, len(faults), time.monotonic() - begin, seed))
        raise SystemExit(130) from None
    print(_summary(name, counts, len(faults), time.monotonic() - begin, seed))
    return bool(faults)


def _summary(name: str, counts: Counts, n_faults: int, seconds: float, seed: int) -> str:
    accepted = counts.accepted / max(counts.tried, 1)
    return (
        f"{name}: {counts.tried} inputs in {seconds:.0f} s ({counts.tried / max(seconds, 1e-9):.0f}/s), {accepted:.0%} "
        f"accepted, the slowest {counts.slowest_s:.2f} s, {n_faults} faults, --seed {seed}"
    )


def tried(target: Target, raw: bytes, folder: Path, counts: Counts | None = None) -> str:
    """What is wrong with how an input is taken, its first line saying where; "" for nothing."""
    begin = time.process_time()
    try:
        with at_most(SECONDS):
            target.check(raw, folder)
        if time.process_time() - begin > SECONDS:  # whoever was held up took the TookTooLong for an error of its own
            raise TookTooLong(f"more than {SECONDS:g} s")
    except OallamaError as error:
        message = str(error)
        if not message or len(message) > MOST_SENTENCE + 2 * len(raw) or not message.isprintable():
            return f"{type(error).__name__} without one clear sentence at {_place(error)}\n{message[:500]!r}"
    except (Exception, TookTooLong) as error:
        return f"{type(error).__name__} at {_place(error)}\n{str(error)[:500]!r}"
    else:
        if counts is not None:
            counts.accepted += 1
    finally:
        if counts is not None:
            counts.slowest_s = max(counts.slowest_s, time.process_time() - begin)
    return ""


def replayed(target: Target, path: Path, folder: Path) -> str:
    """What is wrong with how a kept input is taken, with its name; "" for nothing."""
    fault = tried(target, path.read_bytes(), folder)
    return f"{path}: {fault}" if fault else ""


def _place(error: BaseException) -> str:
    """The last of our lines that the error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
    own = [frame for frame in frames if "/scripts/" not in frame.filename] or frames
    if not own:
        return "?"
    return f"{own[-1].filename.removeprefix(str(ROOT) + '/')}:{own[-1].lineno}"


@contextmanager
def at_most(seconds: float) -> Any:
    """Raises TookTooLong in what takes more CPU time; a busy machine does not count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def limits() -> Any:
    """What one input may take. The memory is that of the process as it is now, and MEMORY_BYTES more."""

    def ring(*_: Any) -> None:
        raise TookTooLong(f"more than {SECONDS:g} s")

    before, limit = signal.signal(signal.SIGPROF, ring), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGPROF, before)


def _memory_folder() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _keep(folder: Path, name: str, raw: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(raw)
    return path
