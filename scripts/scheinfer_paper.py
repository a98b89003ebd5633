#!/usr/bin/env python3
"""Hold the slicing solver against ScheInfer: what it returns from the paper's Table I, and the ablations of section V-E
as predictions. Nothing is measured here; docs/scheinfer.md reads the numbers.

    scripts/scheinfer_paper.py          # writes docs/benchmarks/scheinfer.json
    scripts/scheinfer_paper.py -o -     # prints it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scheinfer import predict, published
from scheinfer.testbed import Betas

from oallama.cost.timeline import PAPER, Prefetch

OUTPUT = Path(__file__).parents[1] / "docs/benchmarks/scheinfer.json"


def document() -> dict[str, Any]:
    fixed = predict.fixed()
    cpus = {"table_i": Betas(), "16_threads": Betas(cpu=predict.implied_cpu_beta(published.RATES[16]))}
    return {
        "what": "ScheInfer's published numbers and what its own models predict; nothing here was measured",
        "table_i_speeds": predict.table_i_speeds(),
        "rates": predict.rates(),
        "other_rates": predict.other_rates(),
        "sweep": {threads: predict.sweep(threads) for threads in published.RATES},
        "streams": {"layer": predict.streams(PAPER), "continuous": predict.streams(Prefetch("ahead", 2))},
        "fixed": fixed,
        "fixed_means": predict.fixed_means(fixed),
        "memory": {name: predict.memory(betas) for name, betas in cpus.items()},
        "tokens": {name: predict.tokens(betas) for name, betas in cpus.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default=str(OUTPUT), help="JSON file, - for stdout (default: %(default)s)")
    options = parser.parse_args()
    text = json.dumps(document(), indent=1) + "\n"
    if options.output == "-":
        print(text, end="")
    else:
        Path(options.output).write_text(text)


if __name__ == "__main__":
    main()
