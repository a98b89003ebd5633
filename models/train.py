#!/usr/bin/env python3
"""Train the small models that oallama ships, from nothing but the grammar in models/training.

Needs the `train` extra (torch). Ctrl-C stops after the present step; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
STEPS = {"stories": 1000, "stories-moe": 200}
VALIDATION_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 4000


def main() -> int:
    """Train, validate, export; 0 done, 2 wrong usage, 130 interrupted."""
    args = arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve each other where a core is shared
    try:
        import torch
        from training import documents, export, tokenizer
        from training.trainer import Settings, Trainer, validate
    except ImportError as error:
        print(f"{error}; install what training needs: pip install -e '.[train]'", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    precision = faster_precision() if args.precision == "auto" else args.precision
    settings = Settings(steps=args.steps or STEPS[args.model], seed=args.seed, model=args.model)
    texts = (documents.sample_document(args.seed, -1 - i).text for i in range(TOKENIZER_DOCUMENTS))
    trainer = Trainer(settings, tokenizer.Tokenizer.train(texts, settings.n_vocab, export.MARKS), precision)
    checkpoint = args.work_dir / f"{args.model}.pt"
    if checkpoint.exists():
        try:
            trainer.load(checkpoint)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"going on from step {trainer.progress.step} of {checkpoint}", file=sys.stderr)
    print(f"{settings.steps} steps, {precision}, {args.threads} threads", file=sys.stderr)
    if not train(trainer, checkpoint, args.checkpoint_every):
        print(f"stopped after step {trainer.progress.step}; the same command goes on from there", file=sys.stderr)
        return 130
    from tqdm import tqdm

    with tqdm(desc="validate", total=VALIDATION_DOCUMENTS, disable=None) as bar:
        result = validate(trainer.network, trainer.tokenizer, args.seed, VALIDATION_DOCUMENTS, lambda: bar.update(20))
    paths = export.export(trainer.network, trainer.tokenizer, args.model, args.out)
    log = training_log(trainer, result, args.threads, paths)
    (args.out / f"oallama-{args.model}-training.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({"validation": result, "wall_s": log["wall_s"], "files": log["files"]}, indent=1))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=tuple(STEPS), default="stories", help="which one; -moe has experts")
    parser.add_argument("--steps", type=int, help="optimizer steps; None: as the shipped file had")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and initial weights")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path, default=ROOT / "models", help="folder for the GGUF files and the log")
    parser.add_argument("--work-dir", type=Path, default=ROOT / ".train", help="folder for the checkpoint")
    parser.add_argument("--checkpoint-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument(
        "--precision", choices=("auto", "bf16", "f32"), default="auto", help="auto: the faster one here"
    )
    args = parser.parse_args()
    if (args.steps is not None and args.steps < 1) or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    return args


def faster_precision() -> str:
    """bf16 where this CPU multiplies bf16 matrices faster than f32 ones."""
    import torch

    seconds = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.ones(4096, 256, dtype=dtype)
        b = torch.ones(256, 512, dtype=dtype)
        torch.mm(a, b)
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            torch.mm(a, b)
            samples.append(time.perf_counter() - start)
        seconds[name] = min(samples)
    return min(seconds, key=seconds.__getitem__)


def train(trainer: Trainer, checkpoint: Path, every_s: float) -> bool:
    """Run the steps that are left; False if interrupted. Saves a checkpoint now and then and at the end."""
    from tqdm import tqdm

    stop: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: stop.append(number))
    saved, losses, steps, progress = time.monotonic(), [], trainer.settings.steps, trainer.progress
    with tqdm(desc="train", total=steps, initial=progress.step, unit="step", disable=None) as bar:
        while progress.step < steps and not stop:
            losses.append(trainer.train_step())
            bar.update()
            if progress.step % 20 == 0 or progress.step == steps:
                mean = sum(losses) / len(losses)
                progress.curve.append(
                    {"step": progress.step, "loss": round(mean, 4), "wall_s": round(progress.wall_s, 1)}
                )
                losses.clear()
                bar.set_postfix(loss=f"{mean:.4f}")
            if time.monotonic() - saved > every_s:
                trainer.save(checkpoint)
                saved = time.monotonic()
    trainer.save(checkpoint)
    signal.signal(signal.SIGINT, previous)
    return not stop


def training_log(trainer: Trainer, result: dict[str, float], threads: int, paths: list[Path]) -> dict[str, object]:
    """The record of the run."""
    return {
        "settings": asdict(trainer.settings),
        "shape": asdict(trainer.network.shape),
        "parameters": sum(w.numel() for w in trainer.network.parameters()),
        "training_tokens": trainer.settings.steps * trainer.settings.rows * trainer.settings.time,
        "precision": trainer.precision,
        "threads": threads,
        "wall_s": round(trainer.progress.wall_s, 1),
        "cpu_s": round(trainer.progress.cpu_s, 1),
        "validation": result,
        "files": {path.name: path.stat().st_size for path in paths},
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
            "gguf": version("gguf"),
        },
        "curve": trainer.progress.curve,
    }


if __name__ == "__main__":
    raise SystemExit(main())
