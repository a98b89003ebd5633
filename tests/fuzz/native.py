"""Native targets, under address and undefined-behaviour sanitizers, and libFuzzer where there is clang."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


TARGETS = {"native-plan": "fuzz_plan", "native-weight": "fuzz_weight", "native-parameters": "fuzz_parameters"}
"""By the program of tests/native that each is."""


def run(name: str, n: int | None, minutes: float | None, seed: int, kept: Path, replay: Sequence[Path]) -> bool:
    """Try so many inputs, or for so long, or these; whether there was a fault. What it prints is the program's own."""
    program = build(TARGETS[name])
    folder = kept / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    if replay:
        flags = [str(path) for path in replay]
    else:
        flags = [f"-seed={seed % (1 << 32) or 1}", f"-artifact_prefix={folder}/"]
        flags += [f"-runs={n}"] if n is not None else []
        flags += [f"-max_total_time={round(60 * minutes)}"] if minutes is not None else []
        flags += ["-print_final_stats=1", str(corpus)] if _libfuzzer(program) else []
    begin = time.monotonic()
    done = subprocess.run([str(program), *flags], capture_output=True, text=True, env=environment())
    seconds = time.monotonic() - begin
    tried = re.search(r"Done (\d+) ", done.stdout + done.stderr)
    if done.returncode:
        print(f"fault: {name}\n{done.stderr[-4000:]}", flush=True)
    n_tried = int(tried[1]) if tried else len(replay)
    how = "libFuzzer" if _libfuzzer(program) else "no coverage"
    rate, faults = f"{n_tried / max(seconds, 1e-9):.0f}/s", int(done.returncode != 0)
    print(f"{name}: {n_tried} inputs in {seconds:.0f} s ({rate}), {how}, {faults} faults, --seed {seed}")
    return done.returncode != 0


def environment() -> dict[str, str]:
    """For a program under sanitizers: the first fault ends it."""
    return {
        **os.environ,
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1",
    }


def build(target: str) -> Path:
    """The program. Exits with what went wrong."""
    import ggml_bridge

    compiler = shutil.which("clang++") or os.environ.get("CXX") or "c++"
    folder = ROOT / "build" / f"native-fuzz-{Path(compiler).name}"
    options = ["-DOALLAMA_NATIVE_TESTS=ON", "-DOALLAMA_SANITIZE=address,undefined", f"-DCMAKE_CXX_COMPILER={compiler}"]
    libraries = f"-DLLAMA_CPP_LIB_DIR={ggml_bridge.load().libraries.folder}"
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *options, libraries],
        ["cmake", "--build", str(folder), "--target", target, "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"fuzz: {target} cannot be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder / target


def _libfuzzer(program: Path) -> bool:
    cache = (program.parent / "CMakeCache.txt").read_text(encoding="utf-8")
    return re.search(r"^OALLAMA_LIBFUZZER:INTERNAL=1", cache, re.MULTILINE) is not None
