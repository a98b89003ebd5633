"""What the papers print, beside which our figures are put."""

OATO_PAPER = {"25%": 15.5, "50%": 20.7, "75%": 40.8}
"""Zhang et al., J. NUDT 47(6), 2025, section 4.5 (Fig. 10): LLaMA3-8B F16, prompt 64, 32 generated, so much of the
weights on an RTX 4090 beside a Xeon Silver 4314: per cent that OAllama.cpp was faster than llama.cpp, whole run."""

OATO_TTFT_75 = "about 2"
"""Section 4.3, the same model at 75 %: TTFT, times as fast as llama.cpp ("close to one time")."""

SCHEINFER_PROMPT = (1.69, 6.33)
"""Lin et al., arXiv 2411.15715, section V-B: times as fast as llama.cpp and Fiddler, over all models, cards
and caps."""

SCHEINFER_GENERATION = (1.11, 1.80)
SCHEINFER_WHOLE = (1.25, 2.04)

SCHEINFER_THREADS = {16: 1.45, 8: 1.48, 4: 1.63, 2: 2.09}
"""V-E1: CPU threads -> generation, times as fast as llama.cpp, on average."""
