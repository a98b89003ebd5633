"""The steps of scripts/gpu_run, each a process of its own, the most telling first."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import ROOT, guarded, parser_of, write_document

from oallama.core.errors import UsageError

MIB = 1 << 20
REQUESTS = 200
PAUSE_EVERY, PAUSE_S = 10, 11.0
"""Requests between pauses, in which ggml-cuda throws captured graphs away: those unused for 10 s. More are captured."""
GROWTH_BYTES = 32 * MIB  # of the card's memory, from the second pause to the end: more is a leak
WORK = ROOT / "build" / "gpu"
MATRIX = ROOT / "scripts" / "matrix" / "card.toml"
CARD_FACTS = "name,driver_version,memory.total,compute_cap,pcie.link.gen.max,pcie.link.width.max"


@dataclass(frozen=True)
class CardStep:
    """One step. seconds: about how long it takes; words: its command line; env: variables that it adds."""

    name: str
    what: str
    seconds: int
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


def steps_of(device: str) -> list[CardStep]:
    """All of them, in the order in which they run."""
    python, script, model = sys.executable, str(Path(__file__)), str(WORK / "llama-1b-q4_0.gguf")
    oallama = (python, "-m", "oallama")
    tests = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "e2e"))
    make = (python, str(ROOT / "scripts" / "make_model.py"), "--quick")

    return [
        CardStep("doctor", "check everything that oallama builds on", 30, (*oallama, "doctor", "--json")),
        CardStep("correctness", "logits against the CPU's: every type, F16 with K of 4096", 240, tests,
                 (("OALLAMA_TEST_GPU", device),)),
        CardStep("model", "write a 1B with random weights", 10,
                 (*make, "--like", "llama-1b", "--type", "Q4_0", "-o", model)),
        CardStep("profile", "mul-mats, copies beside streamed weights, launches", 120,
                 (*oallama, "profile", model, "--device", device, "--json")),
        CardStep("token", "where a token goes: launching, computing, waiting, joining", 120,
                 (*oallama, "run", model, "Hello", "-n", "32", "--policy", "scheinfer", "--gpu-weights", "50%",
                  "--device", device, "--json")),
        CardStep("memory", f"the card's memory over {REQUESTS} requests with pauses", 360,
                 (python, script, "--memory", model, "--device", device)),
        CardStep("models", "write the models of the speed tables", 60, (*make, "--matrix", str(MATRIX))),
        CardStep("speed", f"the speed tables ({MATRIX.relative_to(ROOT)})", 1800,
                 (*oallama, "bench", "--matrix", str(WORK / "card.toml"), "-o", str(WORK / "speed.json"), "--json")),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a step failed, 2 wrong usage, 130 interrupted."""
    parser = parser_of("gpu_run", __doc__)
    parser.add_argument("--device", default="CUDA0", help="as oallama's --device (default: CUDA0)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP", help="run only this step; may be repeated"
    )
    parser.add_argument("--memory", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory:
        return guarded("gpu_run", lambda: _watch_memory(options.device, options.memory))
    return guarded("gpu_run", lambda: _run(options), "the same command continues")


def _run(options: argparse.Namespace) -> int:
    """Raises UsageError."""
    steps = steps_of(options.device)
    unknown = set(options.only) - {step.name for step in steps}
    if unknown:
        raise UsageError(f"unknown step {min(unknown)}; choose from {', '.join(step.name for step in steps)}")
    steps = [step for step in steps if not options.only or step.name in options.only]
    results = WORK / "results.json"
    document = _read(results, options.device)
    done = document["steps"]
    steps_left = [step for step in steps if done.get(step.name, {}).get("status") != 0]
    for step in steps:
        print(
            f"{'to do' if step in steps_left else 'done':6}{step.seconds:5} s  {step.name}: {step.what}",
            file=sys.stderr,
        )
    print(f"about {sum(step.seconds for step in steps_left) / 60:.0f} minutes to go", file=sys.stderr, flush=True)
    WORK.mkdir(parents=True, exist_ok=True)
    matrix = MATRIX.read_text(encoding="utf-8").replace('"CUDA0"', json.dumps(options.device))
    (WORK / "card.toml").write_text(matrix, encoding="utf-8")
    for step in steps_left:
        print(f"{step.name} …", file=sys.stderr, flush=True)
        done[step.name] = outcome = run_step(step)
        write_document(document, results)
        print(f"    {outcome['said'] or 'done'} ({outcome['seconds']} s)", file=sys.stderr, flush=True)
    return int(any(done[step.name]["status"] for step in steps))


def run_step(step: CardStep) -> dict[str, Any]:
    """Exit status, seconds, what it found on stdout (JSON where it is), and what it said last where it failed."""
    start = time.monotonic()
    done = subprocess.run(
        step.words,
        cwd=ROOT,
        env={**os.environ, **dict(step.env)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode in (130, 143):
        raise KeyboardInterrupt
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = done.stdout[-4000:]
    said = (lines or ["no message"])[-1][:400] if done.returncode else ""
    return {"status": done.returncode, "seconds": round(time.monotonic() - start, 1), "said": said, "found": found}


def _read(results: Path, device: str) -> dict[str, Any]:
    """Return the results of an earlier call. Raises UsageError."""
    try:
        document = json.loads(results.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"device": device, "cards": nvidia_cards(), "steps": {}}
    except ValueError as error:
        raise UsageError(f"{results} is not valid JSON ({error}): remove it") from None
    if not isinstance(document, dict) or document.get("device") != device:
        raise UsageError(f"{results} is for another device than {device}: move it away")
    return document


def nvidia_cards() -> list[dict[str, str]]:
    """CARD_FACTS of each; [] where no driver answers."""
    query = ["nvidia-smi", f"--query-gpu={CARD_FACTS}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [dict(zip(CARD_FACTS.split(","), line.split(", "), strict=False)) for line in listed.splitlines()]


#
# the card's memory, in a process of its own
#


def memory(bridge: Any, device: str, spec: str, model: Path) -> Iterator[dict[str, Any]]:
    """Bytes that are free on the card after each request, of which every tenth follows a pause. Prompts of seven
    lengths make programs, and graphs, of as many sizes."""
    from oallama.placer import Placer

    placer = Placer.load(model, device=spec, gpu_weights="50%")
    with placer.engine(placer.plan("scheinfer", n_prompt=64, n_gen=16)) as engine:
        for i in range(REQUESTS):
            paused = i > 0 and i % PAUSE_EVERY == 0
            time.sleep(PAUSE_S if paused else 0.0)
            engine.generate("Hello " * (1 + i % 7), max_tokens=8, seed=i)
            yield {"request": i + 1, "after_pause": paused, "free_bytes": bridge.device(device).memory_free}


def grown(rows: Sequence[dict[str, Any]]) -> str:
    """What is wrong with the rows of `memory`: less and less is free. "" where nothing is."""
    least = [min(row["free_bytes"] for row in rows[i : i + PAUSE_EVERY]) for i in range(0, len(rows), PAUSE_EVERY)]
    taken = least[2] - least[-1]
    return f"{taken / MIB:.0f} MiB less of the card's memory is free at the end" if taken > GROWTH_BYTES else ""


def _watch_memory(spec: str, model: Path) -> int:
    """Exit status: 1 where less and less of the memory is free."""
    from oallama.device.load_params import load_bridge
    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device
    from oallama.device.spec import parse_device

    with native_log(), open_device(parse_device(spec)) as device:
        rows = list(memory(load_bridge(), device.name, spec, model))
    write_document(rows, None)
    if fault := grown(rows):
        print(f"gpu_run: {fault}", file=sys.stderr)
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
