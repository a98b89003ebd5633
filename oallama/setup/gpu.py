"""Chooses the GPU back end to build: one whose driver answers *and* whose toolchain is installed; else the CPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.setup import vulkan
from oallama.setup.console import DRIVER_S, SetupError, capture, compiles

CHOICES = ("auto", "cpu", "cuda", "hip", "vulkan")


@dataclass(frozen=True)
class GpuBackend:
    """A back end to build. `flags` go to CMake, `env` to its environment; `why` is shown to the user."""

    name: str
    why: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Missing:
    """Why a back end cannot be built. card: a card answered, so that only the toolchain is missing."""

    why: str
    card: bool = False


def asked_backend(env: Mapping[str, str]) -> str:
    """Return OALLAMA_BACKEND, by default `auto`. Raises UsageError for an unknown choice."""
    wish = env.get("OALLAMA_BACKEND", "").strip().lower() or "auto"
    if wish not in CHOICES:
        raise UsageError(f"unknown OALLAMA_BACKEND={wish}: choose from {', '.join(CHOICES)}")
    return wish


def choose_backend(wish: str, env: Mapping[str, str], cxx: str, cmake_args: str) -> GpuBackend:
    """Return the back end to build, from asked_backend (`wish`) and this machine's drivers.

    `cxx` checks for headers; `cmake_args` (the user's CMAKE_ARGS) may name the architecture of a card that does not
    answer here. Raises SetupError if it cannot be built.
    """
    if wish == "cpu":
        return GpuBackend("cpu", "CPU build, as OALLAMA_BACKEND=cpu requests")
    finders: dict[str, Callable[[], GpuBackend | Missing]] = {
        "cuda": lambda: _cuda(env, cmake_args, wish == "cuda"),
        "hip": lambda: _hip(env, cmake_args, wish == "hip"),
        "vulkan": lambda: _vulkan(env, cxx, wish == "vulkan"),
    }
    if wish != "auto":
        backend = finders[wish]()
        if isinstance(backend, Missing):
            raise SetupError(f"cannot build OALLAMA_BACKEND={wish}: {backend.why}")
        return backend
    reasons = []
    for find in finders.values():
        backend = find()
        if isinstance(backend, GpuBackend):
            return backend
        if backend.card:
            reasons.append(backend.why)
    return GpuBackend("cpu", "CPU build: " + ("; ".join(reasons) or "no GPU driver answers"))


def gpu_hint(env: Mapping[str, str]) -> str:
    """Return signs of GPUs that need no driver query. While they stay the same, drivers are not queried again."""
    nodes = ["/dev/nvidiactl", "/dev/dxg", "/dev/kfd", *sorted(map(str, Path("/dev/dri").glob("renderD*")))]
    programs = ("nvidia-smi", "nvcc", "rocminfo", "hipcc", "vulkaninfo", "glslc")
    seen = [node for node in nodes if Path(node).exists()]
    seen += [program for name in programs if (program := _find(name, env))]
    names = ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDAARCHS", "ROCM_PATH", "VULKAN_SDK")
    return " ".join(seen + [f"{name}={env[name]}" for name in names if name in env])


def _cuda(env: Mapping[str, str], cmake_args: str, forced: bool) -> GpuBackend | Missing:
    listed = capture(["nvidia-smi", "-L"], env, DRIVER_S) or ""
    cards = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", listed, re.MULTILINE)
    if not cards and not forced:
        return Missing("no NVIDIA driver answers")
    nvcc = _find("nvcc", env)
    if nvcc is None:
        return _lacks(cards, "nvcc is missing: install the CUDA toolkit")
    architectures = _cuda_architectures(env) if cards else []
    named = env.get("CUDAARCHS") or "CMAKE_CUDA_ARCHITECTURES" in cmake_args
    if not cards and not named:
        return Missing("no NVIDIA driver answers, so set CUDAARCHS to the card's architecture (e.g. 89)")
    known = re.findall(r"compute_(\d+)", capture([nvcc, "--list-gpu-arch"], env) or "")
    if unknown := [item for item in architectures if known and item not in known]:
        return _lacks(cards, f"{nvcc} cannot compile for sm_{unknown[0]}: install a newer CUDA toolkit")
    if not compiles([nvcc, "-E"], "#include <cublas_v2.h>\n", env, suffix=".cu"):
        return _lacks(cards, f"{nvcc} cannot use cublas_v2.h: install libcublas-dev, and a C++ compiler nvcc supports")
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    if cards:
        flags.append(f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures) or 'native'}")
    target = f"sm_{', sm_'.join(architectures)}" if architectures else "its architecture"
    why = f"CUDA build for {_names(cards)} ({target} only)" if cards else "CUDA build for the given architecture"
    return GpuBackend("cuda", why, (*flags, *_cuda_link_flags(nvcc, env)))


def _cuda_architectures(env: Mapping[str, str]) -> list[str]:
    """Return the cards' compute capabilities without the dot, each once (`89`); empty if the driver is too old."""
    listed = capture(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], env, DRIVER_S) or ""
    return sorted({major + minor for major, minor in re.findall(r"^\s*(\d+)\.(\d)\s*$", listed, re.MULTILINE)}, key=int)


def toolkit_root(nvcc: str, env: Mapping[str, str]) -> Path:
    """Return the folder of an nvcc's toolkit; nvcc may be a wrapper elsewhere."""
    dry = capture([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], env, merge_stderr=True) or ""
    top = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE)
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def _cuda_link_flags(nvcc: str, env: Mapping[str, str]) -> list[str]:
    """Return flags with which the library finds the toolkit's libraries, and works without libcuda if it cannot be
    linked."""
    toolkit = toolkit_root(nvcc, env)
    stubs = ("lib*/stubs", "targets/*/lib/stubs", "lib/*/stubs")
    flags = [] if any(any(toolkit.glob(f"{place}/libcuda.so")) for place in stubs) else ["-DGGML_CUDA_NO_VMM=ON"]
    libraries = next((path for path in (toolkit / "lib64", toolkit / "lib") if path.is_dir()), None)
    if libraries and toolkit != Path("/usr"):
        flags.append(f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{libraries}")
    return flags


def _hip(env: Mapping[str, str], cmake_args: str, forced: bool) -> GpuBackend | Missing:
    rocminfo = _find("rocminfo", env)
    listed = (capture([rocminfo], env, DRIVER_S) if rocminfo else None) or ""
    cards = sorted(set(re.findall(r"^\s*Name:\s+(gfx[0-9a-f]+)\s*$", listed, re.MULTILINE)))
    if not cards and not forced:
        return Missing("no AMD driver answers")
    hipcc = _find("hipcc", env)
    if hipcc is None:
        return _lacks(cards, "hipcc is missing: install ROCm's HIP SDK")
    if not cards and "GPU_TARGETS" not in cmake_args:
        return Missing("no AMD driver answers, so name the card in CMAKE_ARGS (e.g. -DGPU_TARGETS=gfx1100)")
    root = Path(hipcc).resolve().parent.parent
    for library in ("hipblas", "rocblas"):
        if not any(any(root.glob(f"{place}/cmake/{library}")) for place in ("lib*", "lib*/*")):
            return _lacks(cards, f"{library} is missing: install {library}-dev")
    settings = []
    hipconfig = str(Path(hipcc).parent / "hipconfig")
    if clang := (capture([hipconfig, "-l"], env) or "").strip():
        settings.append(("HIPCXX", f"{clang}/clang"))
    if path := (capture([hipconfig, "-R"], env) or "").strip():
        settings.append(("HIP_PATH", path))
    flags = ("-DGGML_HIP=ON", f"-DGPU_TARGETS={';'.join(cards)}") if cards else ("-DGGML_HIP=ON",)
    return GpuBackend("hip", f"ROCm build for {_names(cards) or 'the card named'} only", flags, tuple(settings))


def _vulkan(env: Mapping[str, str], cxx: str, forced: bool) -> GpuBackend | Missing:
    cards = [name for name, kind in vulkan.devices(env) if kind != "CPU"]
    if not cards and not forced:
        return Missing("no Vulkan driver answers with a GPU")
    if missing := vulkan.missing_to_build(env, cxx):
        return _lacks(cards, vulkan.advice(missing))
    return GpuBackend("vulkan", f"Vulkan build for {_names(cards) or 'any device'}", ("-DGGML_VULKAN=ON",))


def _lacks(cards: list[str], what: str) -> Missing:
    return Missing(f"{_names(cards)} answers, but {what}" if cards else what, bool(cards))


def _names(cards: list[str]) -> str:
    return ", ".join(sorted(set(cards)))


def _find(program: str, env: Mapping[str, str]) -> str | None:
    """Return a program on PATH, or in its toolkit's usual folder."""
    if program == "nvcc" and env.get("CUDACXX"):
        return shutil.which(env["CUDACXX"], path=env.get("PATH"))
    rocm = env.get("ROCM_PATH") or "/opt/rocm"
    toolkits = {
        "nvcc": env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/usr/local/cuda",
        "rocminfo": rocm,
        "hipcc": rocm,
        "glslc": env.get("VULKAN_SDK"),
    }
    toolkit = toolkits.get(program)
    return shutil.which(program, path=env.get("PATH")) or (
        shutil.which(program, path=f"{toolkit}/bin") if toolkit else None
    )
