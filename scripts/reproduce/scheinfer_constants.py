"""What ScheInfer (Lin et al., arXiv 2411.15715) prints that its formulas are computed from: testbed A (RTX A6000, Xeon
Platinum 8358, PCIe 4.0 x16) and INT4 where not said otherwise."""

from __future__ import annotations

from reproduce.figures import published

GPU = (4.7e-6, 8.1e-13)  # Table I: alpha in seconds, beta in seconds per T*M*H
CPU = (1.1e-5, 5.4e-12)
LINK = (3.0e-6, 2.6e-11)  # beta in seconds per byte
LAUNCH_S = 4.4e-5
BYTES_PER_WEIGHT = 0.5  # INT4 without scales

TABLE_I_BETA = {  # testbed: (GPU FP16, GPU INT4, CPU FP16, CPU INT4, PCIe)
    "A": (3.2e-12, 8.1e-13, 1.6e-11, 5.4e-12, 2.6e-11),
    "B": (2.6e-12, 6.5e-13, 1.5e-11, 6.5e-12, 2.5e-11),
    "C": (3.6e-12, 9.2e-13, 2.5e-11, 8.4e-12, 4.1e-11),
}
PEAK_GB_PER_S = {"A": (768, 31.5), "B": (936, 31.5), "C": (616, 15.75)}  # vendors' GPU memory, and PCIe x16

_OF = published()
RATES = {n: _OF[f"scheinfer/rate-{n}"] for n in (16, 8, 4, 2)}
"""V-E2: CPU threads -> r_CG of LLaMA-2-70B in decode, r_GG = 0."""

FIXED = {rate: _OF[f"scheinfer/fixed-{rate:g}"] for rate in (0.0, 0.25, 0.5, 0.75)}
"""V-E2: fixed r_CG -> speed-up of the solved one over it."""

MEMORY = {
    model: {gb: _OF[f"scheinfer/memory-{model}-{gb}"] for gb in sizes}
    for model, sizes in {"Mixtral-7B": (12, 16, 20), "LLaMA-2-70B": (24, 28, 32)}.items()
}
"""V-E3: GB of device memory -> speed-up by assigning r_GG."""

TOKENS = {
    model: (gb, {n: _OF[f"scheinfer/tokens-{model}-{n}"] for n in (64, 256, 1024)})
    for model, gb in {"Mixtral-7B": 12, "LLaMA-2-70B": 24}.items()
}
"""V-E4: GB of device memory, and prompt length -> speed-up by assigning tokens."""
