"""A machine's rates from some of the runs: least squares of log ratios, in which points far off pull no harder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from card_fit.machine import FITTED, START, FittedMachine, rates, with_rates
from card_fit.models import CardModel
from card_fit.predict import Predictor
from card_fit.tables import PublishedRun

Vector = npt.NDArray[np.float64]

TRUSTED = 0.15  # log ratio up to which a run counts fully (Huber)
STEP = 0.02  # of a parameter's logarithm, for slopes
MAX_ROUNDS = 60
LEAST_GAIN = 1e-4  # of the loss; a round that gains less is the last
FURTHEST = 1.0  # that one round moves a parameter's logarithm


def fit(
    runs: Sequence[PublishedRun],
    models: Mapping[str, CardModel],
    start: FittedMachine = START,
    predictor_of: Callable[[FittedMachine], Predictor] | None = None,
) -> FittedMachine:
    """The machine that predicts these runs best. Rates are fitted as logarithms, so that none gets negative.
    predictor_of: predicts the runs on a machine; None: by the whole cost model."""
    predictor_of = predictor_of or (lambda machine: Predictor(machine, models, runs))
    x = np.log([rates(start)[name] for name in FITTED])

    def machine(point: Vector) -> FittedMachine:
        return with_rates(start, dict(zip(FITTED, np.exp(point).tolist(), strict=True)))

    def residuals(point: Vector) -> Vector:
        predictor = predictor_of(machine(point))
        out = [(predictor(run), run) for run in runs]
        pairs = [(made.prompt_tps / run.prompt_tps, made.eval_tps / run.eval_tps) for made, run in out]
        off: Vector = np.log(np.array(pairs)).ravel()
        return off

    damping, now = 1e-2, residuals(x)
    for _ in range(MAX_ROUNDS):
        slopes = np.column_stack([(residuals(x + step) - now) / STEP for step in STEP * np.eye(len(x))])
        weights = np.minimum(1.0, TRUSTED / np.maximum(np.abs(now), 1e-12))
        normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * now)
        gained = 0.0
        while damping < 1e6:
            scale = np.diag(np.diag(normal) + 1e-9)
            moved = x - np.clip(np.linalg.solve(normal + damping * scale, gradient), -FURTHEST, FURTHEST)
            then = residuals(moved)
            gained = 1 - loss(then) / loss(now)
            if gained > 0:
                x, now, damping = moved, then, damping / 4
                break
            damping *= 4
        if gained < LEAST_GAIN:
            break
    return replace(machine(x), notes=dict(start.notes))


def loss(off: Vector) -> float:
    """Huber's: squares up to TRUSTED, then straight on."""
    size = np.abs(off)
    return float(np.sum(np.where(size <= TRUSTED, size**2 / 2, TRUSTED * (size - TRUSTED / 2))))
