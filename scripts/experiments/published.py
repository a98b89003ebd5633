"""What the papers print, beside which our figures are put. Of ScheInfer (Lin et al., arXiv 2411.15715): testbed A (RTX
A6000, Xeon Platinum 8358, PCIe 4.0 x16) and INT4 where not said otherwise."""

OATO_PAPER = {"25%": 15.5, "50%": 20.7, "75%": 40.8}
"""Zhang et al., J. NUDT 47(6), 2025, section 4.5 (Fig. 10): LLaMA3-8B F16, prompt 64, 32 generated, so much of the
weights on an RTX 4090 beside a Xeon Silver 4314: per cent that OAllama.cpp was faster than llama.cpp, whole run."""

OATO_PAPER_END_TO_END = {"50%": 17.4}
"""Section 4.2 (Fig. 7): the same model, card and share, of which section 4.5 says another figure."""

OATO_TTFT_75 = "about 2"
"""Section 4.3, the same model at 75 %: TTFT, times as fast as llama.cpp ("close to one time")."""

SCHEINFER_PROMPT = (1.69, 6.33)
"""Lin et al., arXiv 2411.15715, section V-C: times as fast as llama.cpp and Fiddler, over all models, cards
and caps, prompts of 1024 tokens."""

SCHEINFER_GENERATION = (1.11, 1.87)
"""Section V-D, whose text says so."""

SCHEINFER_GENERATION_ABSTRACT = (1.11, 1.80)
"""Abstract and conclusion, of the same runs."""

SCHEINFER_WHOLE = (1.25, 2.04)
"""Section V-D, prompt and generation together."""

SCHEINFER_THREADS = {16: 1.45, 8: 1.48, 4: 1.63, 2: 2.09}
"""V-E1: CPU threads -> generation, times as fast as llama.cpp, on average."""

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

RATES = {16: 0.18, 8: 0.25, 4: 0.42, 2: 0.71}  # V-E2: CPU threads -> r_CG of LLaMA-2-70B in decode, r_GG = 0
FIXED = {0.0: 1.7, 0.25: 1.4, 0.5: 1.6, 0.75: 2.1}  # V-E2: fixed r_CG -> speed-up of the solved one over it
MEMORY = {  # V-E3: GB of device memory -> speed-up by assigning r_GG
    "Mixtral-7B": {12: 1.07, 16: 1.10, 20: 1.15},
    "LLaMA-2-70B": {24: 1.08, 28: 1.09, 32: 1.12},
}
TOKENS = {  # V-E4: GB of device memory, and prompt length -> speed-up by assigning tokens
    "Mixtral-7B": (12, {64: 1.9, 256: 5.6, 1024: 19.1}),
    "LLaMA-2-70B": (24, {64: 6.9, 256: 27.6, 1024: 45.6}),
}
