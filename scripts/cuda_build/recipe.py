"""Recipe of a CUDA build: parts and flags. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.setup.build import RELEASE_FLAGS

DEFAULT_ARCHITECTURES = "90a"  # H100 and H200
PYTHON = "3.12"  # of the other machine

TOOLKIT_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-culibos==13.0.85",
    "nvidia-cublas==13.0.2.14",
)
"""Together a toolkit: compiler, its headers and libdevice, the run-time, CUB and Thrust, cuBLAS. A driver of CUDA 13.0
runs what they make."""

LIBRARIES = ("ggml-base", "ggml", "ggml-cpu", "ggml-cuda", "ggml-rpc", "llama", "llama-common")
NATIVE = ("ggml_bridge", "ggml-oallama")  # ours
PROGRAMS = ("llama-bench", "llama-server")

PYTHON_PARTS = (
    "cffi", "click", "diskcache", "gguf", "hypothesis", "iniconfig", "jinja2", "markupsafe", "packaging",
    "pluggy", "prompt-toolkit", "psutil", "pycparser", "pygments", "pytest", "pyyaml",
    "sortedcontainers", "tqdm", "typing-extensions", "wcwidth",
)  # fmt: skip
"""What oallama, llama-cpp-python and the tests of cards import. numpy is left out: 17 MB, and whoever has torch has
it."""


@dataclass(frozen=True)
class Build:
    """Targets of one source tree with CMake's flags. Kept in `folder`, so that a build that was cut short goes on."""

    what: str  # is compiled, in words
    source: Path
    folder: Path
    flags: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class CpuVariant:
    """One libggml-cpu: the CPU features (/proc/cpuinfo's names) it needs, and the flags that use them."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


def _switched_on(*names: str) -> tuple[str, ...]:
    return tuple(f"-DGGML_{name}=ON" for name in names)


_AVX512 = _switched_on("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
_AVX512_NEEDS = frozenset(
    ["avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16"]
)  # fmt: skip

CPU_VARIANTS = (
    # GCC drops the stores that fill the AMX tile configuration unless told not to: see oallama/setup/build.py
    CpuVariant(
        "amx",
        _AVX512_NEEDS | {"amx_tile", "amx_int8", "amx_bf16"},
        (*_AVX512, *_switched_on("AMX_TILE", "AMX_INT8", "AMX_BF16"), "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"),
    ),
    CpuVariant("avx512", _AVX512_NEEDS, _AVX512),
    CpuVariant("avx2", frozenset(("avx2", "fma", "f16c", "bmi2")), ()),
)
"""Best first: nobody knows here which processor is beside the card. The last is in the main build."""


def best_cpu_variant(features: Iterable[str]) -> CpuVariant | None:
    """The first variant that a CPU with these features can run; None if none does."""
    have = frozenset(features)
    return next((variant for variant in CPU_VARIANTS if variant.needs <= have), None)


def parse_architectures(text: str) -> tuple[str, ...]:
    """`90a,89` as CMake's real architectures, `("90a-real", "89-real")`: machine code for these cards, and nothing that
    a driver would have to compile. Raises UsageError."""
    names = [name.strip().removeprefix("sm_") for name in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{2,3}[af]?", name) for name in names):
        raise UsageError(f"--arch {text} is not a list of CUDA architectures: write e.g. 90a or 90a,89,120a")
    return tuple(dict.fromkeys(f"{name}-real" for name in names))


_COMMON = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../lib",  # found by each other; no folder of this machine is named in them
    "-DGGML_NATIVE=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP")),
    *RELEASE_FLAGS,
)


def cuda_flags(architectures: Sequence[str]) -> tuple[str, ...]:
    """CMake's arguments for the main build, toolkit excepted.

    GGML_CUDA_NO_VMM: libcuda, which only a driver brings, is then not needed to link. Flash attention for F16 KV only:
    other KV types cost kernels by the dozen.
    """
    return (
        *_COMMON,
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}",
        "-DGGML_CUDA_NO_VMM=ON",
        "-DGGML_CUDA_NCCL=OFF",
        "-DGGML_CUDA_GRAPHS=ON",
        "-DGGML_CUDA_COMPRESSION_MODE=size",
        "-DGGML_CUDA_FA=ON",
        "-DGGML_CUDA_FA_QUANTS=f16-f16",
        "-DGGML_RPC=ON",
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined",  # of cuBLAS not all is here: the programs run elsewhere
        "-DLLAMA_BUILD_TOOLS=ON",
        "-DLLAMA_BUILD_SERVER=ON",
    )


def cpu_flags(variant: CpuVariant) -> tuple[str, ...]:
    """CMake's arguments for the library of one CPU variant alone."""
    return (*_COMMON, "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_SERVER=OFF", *variant.flags)
