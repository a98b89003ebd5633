"""Set-up on made-up machines: what is built on which and what is said, what a failure leaves, what is kept. What it
calls (compilers, drivers, uv, cmake) are shell scripts."""

import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from processes import PATIENCE_S, must_end, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import setup_env

from ggml_bridge.layouts import layout_faults
from ggml_bridge.library import INSTALLED, LLAMA_CPP_BUILD, LLAMA_CPP_PYTHON_VERSION
from oallama.core.errors import OallamaError, UsageError
from oallama.setup import build, gpu, install, machine, prebuilt, uv, vulkan
from oallama.setup.console import TAIL_LINES, Console, SetupError, lock, remedy, run

ROOT = Path(__file__).resolve().parents[2]
GCC = machine.Compiler("/usr/bin/gcc", "/usr/bin/g++", "gcc", "12.2.0", "x86_64-linux-gnu")
CLANG = machine.Compiler("/usr/bin/clang", "/usr/bin/clang++", "clang", "16.0.6", "x86_64-linux-gnu")
XEON = machine.read_cpu("processor: 0\nmodel name : Xeon\nflags : avx2 amx_tile amx_int8\n\nprocessor: 1\nflags : none")
EPYC = machine.read_cpu("processor: 0\nmodel name : EPYC\nflags : avx2 avx512f")
CPU, CUDA = gpu.GpuBackend("cpu", "CPU build"), gpu.GpuBackend("cuda", "CUDA build")


class Machine:
    """A machine with nothing on its PATH but what a test puts into `bin`, and with a cache of its own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "calls").touch()
        self.console = Console((folder / "said").open("w+"), folder / "setup.log")
        self.console.open_log()
        self.env = {
            "PATH": str(folder / "bin"), "HOME": str(folder), "CUDA_HOME": str(folder), "ROCM_PATH": str(folder),
            "OALLAMA_CACHE_DIR": str(folder / "cache"), "CALLS": str(folder / "calls"),
        }  # fmt: skip

    def program(self, path, script=""):
        made = self.folder / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        made.chmod(0o755)
        return made

    def programs(self, scripts):
        for path, script in scripts.items():
            self.program(path, script)

    def choose(self, wish, cmake_args=""):
        return gpu.choose_backend(wish, self.env, "c++", cmake_args)

    def said(self):
        return (self.folder / "said").read_text(encoding="utf-8")

    def calls(self, word):
        """How often a program was called with this word."""
        return sum(word in line for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(vulkan, "_DRIVER_FOLDERS", (str(tmp_path / "drivers"),))
    return Machine(tmp_path)


# ---- the processor and the compiler


def test_cpu_is_known_by_its_first_processor_on_x86_and_arm():
    assert XEON.has_amx and XEON.model == "Xeon"
    assert not EPYC.has_amx
    arm = machine.read_cpu("processor: 0\nFeatures : asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40")
    assert arm.features == {"asimd", "sve"} and "0xd40" in arm.model
    assert len({XEON.digest, EPYC.digest, arm.digest}) == 3


@pytest.mark.parametrize(
    ("banner", "family", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", "gcc", "12.2.0"),
        ("c++ (GCC) 14.2.1 20250110\nCopyright (C) 2024 Free Software Foundation, Inc.", "gcc", "14.2.1"),
        ("Debian clang version 16.0.6 (19)\nTarget: x86_64-pc-linux-gnu", "clang", "16.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)\nTarget: arm64-apple-darwin23", "clang", "15.0.0"),
    ],
)
def test_compiler_says_what_it_is(here, banner, family, version):
    here.programs({"bin/g++-x": f"printf '%s\\n' '{banner}'", "bin/gcc-x": ""})
    found = machine.find_compiler({**here.env, "CXX": "g++-x"})
    assert (found.family, found.version) == (family, version)
    assert found.cc == str(here.folder / "bin" / "gcc-x"), "the C compiler of the same family and version"


def test_missing_or_broken_compiler_is_one_sentence(here):
    with pytest.raises(SetupError, match=r"no working C\+\+ compiler: install one"):
        machine.find_compiler(here.env)
    with pytest.raises(SetupError, match="CXX=icpx is not a program"):
        machine.find_compiler({**here.env, "CXX": "icpx"})
    stub = here.program("bin/c++", "echo 'xcode-select: note: no developer tools were found' >&2; exit 1")
    with pytest.raises(SetupError, match="cannot compile a small program"):
        machine.check_compiler(machine.Compiler("cc", str(stub), "clang", "1", ""), here.env)


# ---- GPU back ends

SMI = 'case "$1" in -L) echo "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)";; *) echo {cap}; echo {cap};; esac'
NVCC = """case "$1" in --list-gpu-arch) printf "compute_80\\ncompute_89\\n";; -E) {headers};;
--dryrun) echo "#\\$ TOP=$HOME/toolkit";; esac"""
NVIDIA = {"bin/nvidia-smi": SMI.format(cap="8.9")}
TOOLKIT = {"bin/nvcc": NVCC.format(headers="exit 0")}
AMD = {"bin/rocminfo": "echo '  Name:                    AMD Ryzen'; echo '  Name:                    gfx1100'"}
ROCM = {"bin/hipcc": "", "bin/hipconfig": 'echo "/rocm$1"'}
HIP_LIBRARIES = {"lib/cmake/hipblas/config": "", "lib/cmake/rocblas/config": ""}
ARC = {"bin/vulkaninfo": "echo 'deviceType = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU'; echo 'deviceName = Arc A770'"}
LLVMPIPE = {"bin/vulkaninfo": "echo 'deviceType = PHYSICAL_DEVICE_TYPE_CPU'; echo 'deviceName = llvmpipe'"}
# A compiler that does without what $LACKS names: headers, identifiers of them, options.
VULKAN_SDK = {
    "bin/glslc": "",
    "bin/c++": 'for part in $LACKS; do case "$(/bin/cat check.cpp) $*" in *$part*) exit 1;; esac; done',
}


@pytest.mark.parametrize(
    ("programs", "name", "why"),
    [
        ({}, "cpu", "CPU build: no GPU driver answers"),
        (NVIDIA, "cpu", "NVIDIA GeForce RTX 4090 answers, but nvcc is missing"),
        ({**NVIDIA, "bin/nvcc": NVCC.format(headers="exit 1")}, "cpu", "libcublas-dev"),
        ({**TOOLKIT, "bin/nvidia-smi": SMI.format(cap="12.0")}, "cpu", "cannot compile for sm_120"),
        (NVIDIA | TOOLKIT, "cuda", "RTX 4090 (sm_89 only)"),
        (AMD, "cpu", "gfx1100 answers, but hipcc is missing"),
        (AMD | ROCM, "cpu", "hipblas is missing"),
        (AMD | ROCM | HIP_LIBRARIES, "hip", "ROCm build for gfx1100 only"),
        (LLVMPIPE | VULKAN_SDK, "cpu", "no GPU driver answers"),
        (ARC | VULKAN_SDK, "vulkan", "Vulkan build for Arc A770"),
        ({**ARC, **VULKAN_SDK, "bin/c++": "exit 1"}, "cpu", "Arc A770 answers, but the Vulkan loader and headers"),
    ],
)
def test_a_back_end_is_built_where_its_card_answers_and_its_toolchain_is_there(here, programs, name, why):
    here.programs(programs)
    chosen = here.choose("auto")
    assert chosen.name == name and why in chosen.why
    assert here.choose("cpu").flags == (), "OALLAMA_BACKEND=cpu overrides"


def test_a_back_end_is_built_for_the_card_that_answers(here):
    stubs = here.folder / "toolkit" / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    here.programs(NVIDIA | TOOLKIT)
    without_libcuda = here.choose("auto").flags
    (stubs / "libcuda.so").touch()
    flags = here.choose("auto").flags
    assert {"-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=89"} < set(flags)
    assert f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{stubs.parent}" in flags
    assert set(without_libcuda) - set(flags) == {"-DGGML_CUDA_NO_VMM=ON"}
    here.programs(AMD | ROCM | HIP_LIBRARIES)
    hip = here.choose("hip")
    assert hip.flags == ("-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100")
    assert hip.env == (("HIPCXX", "/rocm-l/clang"), ("HIP_PATH", "/rocm-R"))


def test_a_back_end_that_is_asked_for_by_name_needs_no_card(here):
    here.programs(LLVMPIPE | VULKAN_SDK | TOOLKIT)
    assert (here.choose("vulkan").flags, here.choose("vulkan").env) == (("-DGGML_VULKAN=ON",), ())
    with pytest.raises(SetupError, match="set CUDAARCHS to the card's architecture"):
        here.choose("cuda")
    named = here.choose("cuda", "-DCMAKE_CUDA_ARCHITECTURES=90")
    here.env["CUDAARCHS"] = "90"
    for chosen in (named, here.choose("cuda")):
        assert chosen.name == "cuda" and not any("ARCHITECTURES" in flag for flag in chosen.flags)


@pytest.mark.parametrize(
    ("lacks", "there", "missing", "advice"),
    [
        ("", ("glslc", "apt", "driver"), [], None),
        ("vulkan.h spirv.hpp", (), [vulkan.GLSLC, vulkan.LOADER, vulkan.SPIRV, vulkan.DRIVER],
         "glslc missing: sudo apt install glslc; "
         "the Vulkan loader and headers missing: sudo apt install libvulkan-dev; "
         "spirv-headers missing: sudo apt install spirv-headers; "
         "a Vulkan driver missing: sudo apt install mesa-vulkan-drivers"),
        ("-lvulkan", ("glslc", "driver"), [vulkan.LOADER],
         "the Vulkan loader and headers missing: sudo apt install libvulkan-dev"),
        ("VkLayerSettingEXT", ("glslc", "driver"), [vulkan.NEW_HEADERS],
         "Vulkan headers of 1.3.272 or later missing: set VULKAN_SDK to a Vulkan SDK of 1.3.272 or later"),
        ("", ("driver",), [vulkan.GLSLC], "glslc missing: sudo apt install glslc"),
        ("", ("glslc", "named driver"), [], None),
    ],
)  # fmt: skip
def test_what_vulkan_lacks_is_named_at_once_with_its_command(here, lacks, there, missing, advice):
    compiler = here.program("bin/c++", VULKAN_SDK["bin/c++"])
    if "glslc" in there:
        here.program("bin/glslc")
    if "driver" in there:
        here.program("drivers/icd.d/lvp_icd.json")
    env = {**here.env, "LACKS": lacks, "VK_DRIVER_FILES": "/a.json" if "named driver" in there else ""}
    assert [*vulkan.missing_to_build(env, str(compiler)), *vulkan.missing_to_run(env)] == missing
    if advice is None:
        vulkan.check(str(compiler), env)
    else:
        with pytest.raises(SetupError) as refused:
            vulkan.check(str(compiler), env)
        assert str(refused.value) == advice


# ---- flags, and the order of variants


@pytest.mark.parametrize(
    ("variant", "cpu", "compiler", "env", "args"),
    [
        (build.Variant(CPU), EPYC, GCC, {}, ()),
        (build.Variant(CPU), XEON, CLANG, {}, ()),
        (build.Variant(CPU), XEON, GCC, {}, ("-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",)),
        (build.Variant(CPU, amx=False, repack=False), XEON, GCC, {},
         ("-DCMAKE_C_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
          "-DCMAKE_CXX_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16", "-DGGML_CPU_REPACK=OFF")),
        (build.Variant(CPU), XEON, GCC, {"CXXFLAGS": "-g", "CMAKE_ARGS": '-DA="b c" -DGGML_RPC=OFF'},
         ("-DCMAKE_CXX_FLAGS=-g -fno-tree-dse -fno-dse", "-DA=b c", "-DGGML_RPC=OFF")),
    ],
)  # fmt: skip
def test_amx_fault_is_built_around_where_it_is_and_the_users_flags_win(variant, cpu, compiler, env, args):
    assert build.cmake_args(variant, cpu, compiler, env) == ("-DGGML_RPC=ON", *args)


@pytest.mark.parametrize(
    ("variant", "bad", "has_amx", "auto", "following"),
    [
        (build.Variant(CPU), "AMX", True, True, build.Variant(CPU, amx=False)),
        (build.Variant(CPU), install.DIED, True, True, build.Variant(CPU, amx=False)),
        (build.Variant(CPU), "CPU_REPACK", True, True, build.Variant(CPU, repack=False)),
        (build.Variant(CPU), install.DIED, False, True, build.Variant(CPU, repack=False)),
        (build.Variant(CPU, amx=False), "AMX", True, True, None),
        (build.Variant(CPU), "CPU", False, True, None),  # nothing can replace the plain layout
        (build.Variant(CPU), install.UNUSABLE, True, True, None),
        (build.Variant(CUDA), "CPU_REPACK", False, True, build.Variant(CUDA, repack=False)),
        (build.Variant(CUDA), install.UNUSABLE, False, False, None),  # asked for by name
        (build.Variant(CUDA), install.UNUSABLE, False, True,
         build.Variant(gpu.GpuBackend("cpu", "CPU build: the cuda build does not work"))),
    ],
)  # fmt: skip
def test_what_fails_is_built_out_and_nothing_else(variant, bad, has_amx, auto, following):
    assert install.next_variant(variant, {bad: "wrong"}, has_amx, auto) == following


# ---- programs that are run


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("The virtual environment was not created successfully because ensurepip is not available", "python3-venv"),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "check the network"),
        ("  × No solution found when resolving dependencies", "lacks a required version"),
        ("error: Failed to fetch\n  cause: dns error", "check the network"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "SSL_CERT_FILE"),
        ("No CMAKE_CXX_COMPILER could be found.", "no working C++ compiler"),
    ],
)
def test_known_faults_have_a_remedy(output, advice):
    found = remedy(["something before", output, "something after"])
    assert found is not None and advice in found


@pytest.mark.parametrize(
    ("first", "last", "advice"),
    [
        ("Connection refused, trying again", "Permission denied", "cannot write a file"),
        ("cc1plus: fatal error: Killed", "ninja: build stopped", "the compiler ran out of memory"),
    ],
)
def test_the_last_known_fault_counts_and_an_earlier_one_if_the_last_lines_have_none(here, first, last, advice):
    script = here.program("build", f"echo '{first}'; for _ in $(seq 30); do echo warning; done; echo '{last}'; exit 1")
    with here.console.step("x", "y") as step, pytest.raises(SetupError, match=f"building failed: {advice}") as caught:
        run(here.console, step, [str(script)], os.environ, "building")
    assert caught.value.tail[-1] == last and len(caught.value.tail) == TAIL_LINES


def test_progress_is_the_builds_own_counter(here, monkeypatch):
    script = here.program("build", "echo '-- [1/2]'; echo '  [57/197] c++ -DX'; echo '[ 45%] Building'; echo '[x]'")
    seen = []
    with here.console.step("x", "y") as step:
        monkeypatch.setattr(step, "progress", seen.append)
        run(here.console, step, [str(script)], os.environ, "building")
    assert [counter for counter, _ in itertools.groupby(seen)] == ["", "57/197", "45%"]


def test_the_time_goes_on_while_a_program_says_nothing(here, monkeypatch):
    shown, patience = here.folder / "shown", 10 * int(PATIENCE_S)
    script = f"echo '[1/2] long'; for _ in $(seq {patience}); do [ -e {shown} ] && exit 0; sleep 0.1; done; exit 1"
    seen = []

    def progress(counter):
        seen.append(counter)
        if seen.count("1/2") > 1:
            shown.touch()

    with here.console.step("x", "y") as step:
        monkeypatch.setattr(step, "progress", progress)
        run(here.console, step, [str(here.program("build", script))], os.environ, "building")


def test_second_set_up_waits_for_the_first(here):
    entered = threading.Event()

    def second():
        with lock(here.folder / "lock", here.console):
            entered.set()

    thread = threading.Thread(target=second)
    with lock(here.folder / "lock", here.console):
        thread.start()
        until(lambda: f"another set-up is running (process {os.getpid()}): waiting" in here.said())
        assert not entered.is_set()
        assert (here.folder / "lock").stat().st_mode & 0o077 == 0, "others could hold it for ever"
    thread.join()
    assert entered.is_set()


# ---- packages


def test_pips_settings_are_uvs(here):
    settings = (
        "global.index-url='http://mirror/simple'", "global.cert='/old.pem'", ":env:.cert='/new.pem'",
        "install.find-links='/a /b'", "global.extra-index-url='http://one\\nhttp://two'", "global.timeout='9'",
    )  # fmt: skip
    listed = "\n".join(settings)
    python = here.program("venv/bin/python", f"[ \"$4\" != list ] || /bin/cat <<'END'\n{listed}\nEND")
    made = uv.package_environment(here.env, python)
    assert made["UV_DEFAULT_INDEX"] == "http://mirror/simple" and made["SSL_CERT_FILE"] == "/new.pem"
    assert made["UV_FIND_LINKS"] == "/a,/b" and made["UV_INDEX"] == "http://one http://two"
    assert made["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def requirements(file):
    """Package -> its first line in a lock; each must be known by a hash."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = {line.partition("==")[0]: line for line in lines if "==" in line and not line.startswith(" ")}
    assert all(lines[lines.index(line) + 1].startswith("    --hash=sha256:") for line in found.values())
    return found


def test_the_locks_have_what_pyproject_asks_for():
    """Run scripts/lock where they do not."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    asked = [*project["project"]["dependencies"], *groups["build"]]
    asked += [text for name, texts in extras.items() if name != "train" for text in texts]
    ours, llama = (requirements(ROOT / name) for name in setup_env.LOCKS)
    for wanted in map(Requirement, asked):
        version = Version(ours[canonicalize_name(wanted.name)].partition("==")[2].split()[0])
        assert wanted.specifier.contains(version), wanted
    assert llama["llama-cpp-python"].rstrip(" \\") == groups["llama"][0]
    assert groups["llama"] == [f"{build.BINDINGS}=={LLAMA_CPP_PYTHON_VERSION}"]
    assert build.SOURCE.version.endswith(f".{LLAMA_CPP_BUILD}")
    assert all(ours[name] == line for name, line in llama.items() if name in ours)


# ---- llama.cpp: compiled, kept, tested

# uv and cmake make what they are asked for. cmake: `-B DIR` a build folder, `--target …` the programs in it.
COMPILES = {
    "bin/c++": 'case "$1" in --version) echo "c++ (GCC) 12.2.0"; echo "Free Software Foundation";; esac',
    "bin/cc": "",
    "venv/bin/python": """case "$*" in
*sysconfig*) echo "$PACKAGES";;
*check_layouts*) echo multiplied >> "$CALLS"; eval "$SELFTEST";;
esac""",
    "venv/bin/uv": """echo "uv $*" >> "$CALLS"
case "$*" in
*--target*" cmake ninja")
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin"; cp "$HOME/cmake" "$2/bin/cmake";;
*"pip compile"*)
    echo "sdist = { url = \\"file://$HOME/source.tar.gz\\" }" > "$(echo "$*" | sed 's/.*--output-file //')";;
*) mkdir -p "$PACKAGES/llama_cpp";;
esac""",
    "cmake": """echo "cmake $*" >> "$CALLS"
if [ "$1" = -S ]; then mkdir -p "$4"; echo "$*" > "$4/flags"; exit 0; fi
folder=$2; mkdir -p "$folder/bin"
sh -c "$BUILD_FAILS" || exit 1
if grep -q CUDA "$folder/flags"; then echo "nvcc fatal"; exit 1; fi
while [ "$1" != --target ]; do shift; done
shift
for name; do echo "$name" > "$folder/bin/$name"; done
cp "$folder/flags" "$folder/bin/libllama.so.0"; ln -s libllama.so.0 "$folder/bin/libllama.so" """,
}


class Compiling(Machine):
    def __init__(self, folder):
        super().__init__(folder)
        self.programs(COMPILES)
        self.lib = folder / "venv" / INSTALLED
        self.stamp = folder / "venv" / install.STAMP
        self.env |= {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PACKAGES": str(folder / "packages"),
            "SELFTEST": """echo '{"CPU": "ok"}'""", "BUILD_FAILS": "true",
        }  # fmt: skip
        package = folder / f"{build.SOURCE.name}-{build.SOURCE.version}"
        (package / build.SOURCE.folder).mkdir(parents=True)
        with tarfile.open(folder / "source.tar.gz", "w:gz") as tar:
            tar.add(package, package.name)

    def install(self, wish="cpu", cpu=EPYC, refresh=False, amx=True):
        made = install.Installer(self.console, self.folder / "venv", self.env, wish, amx)
        made.cpu = cpu
        return made.run(refresh=refresh)

    def flags(self):
        """Those that the library in the environment was built with."""
        return (self.lib / "libllama.so").read_text(encoding="utf-8").split()


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    made = Compiling(tmp_path)
    monkeypatch.setattr(build, "SOURCE", replace(build.SOURCE, sha256=prebuilt.digest(tmp_path / "source.tar.gz")))
    return made


def test_libraries_and_programs_come_out_of_one_build_that_is_kept(compiling):
    made = compiling.install()
    assert {path.name for path in compiling.lib.iterdir()} == {*build.PROGRAMS, "libllama.so", "libllama.so.0"}
    assert (compiling.lib / "libllama.so").is_symlink() and made.layouts == {"CPU": "ok"}
    (kept,) = (compiling.folder / "cache" / "stock").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["bin", "recipe.json"]
    for flag in ("BUILD_SHARED_LIBS=ON", "GGML_RPC=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"):
        assert f"-D{flag}" in compiling.flags()
    n_calls = compiling.calls("")
    assert compiling.install() == made and compiling.calls("") == n_calls, "nothing to do"
    compiling.stamp.unlink()
    compiling.install()
    assert (compiling.calls("cmake --build"), compiling.calls("multiplied")) == (1, 2), "from the cache, tested anew"


def test_a_layout_that_crashes_is_rebuilt_without_it_and_remembered(compiling):
    compiling.env["SELFTEST"] = """if grep -q mno-amx "$LLAMA_CPP_LIB_PATH/libllama.so"
        then echo '{"CPU_REPACK": "ok", "CPU": "ok"}'
        else echo '{"AMX": "died with SIGSEGV", "CPU_REPACK": "ok", "CPU": "ok"}'; fi"""
    first = compiling.install(cpu=XEON)
    assert first.layouts == {"CPU_REPACK": "ok", "CPU": "ok"}
    assert first.notes == ["cpu does not work (AMX: died with SIGSEGV); using cpu without AMX"]
    assert first.notes[0] in compiling.said()
    compiling.stamp.unlink()
    assert compiling.install(cpu=XEON) == first and compiling.calls("cmake --build") == 2, "from the cache"
    n_tests = compiling.calls("multiplied")
    compiling.install(cpu=XEON, refresh=True)
    assert (compiling.calls("cmake --build"), compiling.calls("multiplied")) == (2, n_tests + 2), "tested again"


@pytest.mark.parametrize("amx", [True, False])
def test_amx_is_left_out_where_that_is_asked_for(compiling, amx):
    compiling.install(cpu=XEON, amx=amx)
    assert ("-mno-amx-tile" in " ".join(compiling.flags())) == (not amx)


def test_a_layout_that_is_wrong_for_one_kind_of_mul_mat_loses_that_kind_alone(compiling):
    results = {"AMX": "ok", "AMX 3-D MUL_MAT": "died with SIGABRT", "CPU": "ok"}
    compiling.env["SELFTEST"] = f"echo '{json.dumps(results)}'"
    made = compiling.install(cpu=XEON)
    assert (made.layouts, made.notes, compiling.calls("cmake --build")) == (results, [], 1)
    assert layout_faults(compiling.lib) == {"AMX 3-D MUL_MAT": "died with SIGABRT"}
    compiling.stamp.unlink()
    assert compiling.install(cpu=XEON) == made and compiling.calls("cmake --build") == 1, "from the cache"
    assert layout_faults(compiling.lib) == {"AMX 3-D MUL_MAT": "died with SIGABRT"}


def test_a_gpu_build_that_fails_gives_a_cpu_build_unless_asked_for_by_name(compiling):
    compiling.programs(NVIDIA | TOOLKIT)
    made = compiling.install("auto")
    assert made.backend == "cpu" and "compiling llama.cpp (cuda) failed" in made.notes[0]
    with pytest.raises(SetupError, match=r"compiling llama.cpp \(cuda\) failed"):
        compiling.install("cuda")
    assert "-DGGML_RPC=ON" in compiling.flags(), "what was there stays"


def test_a_build_that_fails_is_not_kept_and_the_next_goes_on(compiling):
    compiling.env["BUILD_FAILS"] = "echo 'fatal error: Killed signal terminated program cc1plus'; false"
    for _ in range(2):
        with pytest.raises(SetupError, match="out of memory"):
            compiling.install()
        assert [path.suffix for path in (compiling.folder / "cache" / "stock").iterdir()] == [".part"]
    compiling.env["BUILD_FAILS"] = "true"
    compiling.install()
    assert compiling.calls("pip compile") == 1, "fetched once"
    assert not list((compiling.folder / "cache" / "stock").glob("*.part"))


def test_sources_that_are_another_file_or_not_to_be_had_are_refused_and_not_kept(compiling, monkeypatch):
    good = build.SOURCE
    monkeypatch.setattr(build, "SOURCE", replace(good, sha256="0" * 64))
    with pytest.raises(SetupError, match="do not trust it"):
        compiling.install()
    monkeypatch.setattr(build, "SOURCE", good)
    compiling.program("venv/bin/uv", "exit 1")
    with pytest.raises(
        SetupError, match=r"xllamacpp 2026.* with llama.cpp b\d+: .* --llama-cpp DIR or --llama-cpp TARBALL"
    ):
        compiling.install()
    assert not list((compiling.folder / "cache" / "sources").iterdir())


@pytest.mark.parametrize(
    ("selftest", "says"),
    [
        ("""echo '{"CPU": "3 of 9 products are wrong"}'""",
         r"does not work \(CPU: 3 of 9 products are wrong\): set CXX to another compiler"),
        ("echo 'ImportError: no ggml_bridge' >&2; exit 1", "of llama.cpp: ImportError: no ggml_bridge"),
    ],
)  # fmt: skip
def test_a_build_that_computes_wrong_or_cannot_be_tested_is_not_installed(compiling, selftest, says):
    compiling.env["SELFTEST"] = selftest
    with pytest.raises(SetupError, match=says):
        compiling.install()
    assert not compiling.lib.exists() and compiling.calls("cmake --build") == 1


def test_the_copy_that_will_be_used_is_what_is_tested(compiling):
    compiling.install()
    (kept,) = (compiling.folder / "cache" / "stock").iterdir()
    (kept / "bin" / "parts").mkdir()  # where the libraries there find what a copy of them lacks
    compiling.env["SELFTEST"] = """if [ -d "$LLAMA_CPP_LIB_PATH/parts" ]
        then echo '{"CPU": "ok"}'
        else echo '{"CPU": "parts"}'; fi"""
    with pytest.raises(SetupError, match=r"does not work \(CPU: parts\)"):
        compiling.install(refresh=True)
    assert (compiling.lib / "llama-server").is_file(), "what was there stays"


def test_libraries_replace_others_as_a_whole_and_are_installed_again_where_they_are_gone(compiling):
    compiling.install()
    (compiling.lib / "mark").touch()
    compiling.install(refresh=True)
    assert not (compiling.lib / "mark").exists() and list(compiling.lib.parent.iterdir()) == [compiling.lib]
    shutil.rmtree(compiling.lib)
    compiling.install()
    assert (compiling.lib / "llama-server").is_file()


def test_a_build_that_others_can_change_is_refused(compiling):
    compiling.install()
    (program,) = (compiling.folder / "cache").rglob("llama-cli")
    program.chmod(0o646)
    compiling.stamp.unlink()
    with pytest.raises(SetupError, match=r"other users can write to .*: change"):
        compiling.install()


def test_builds_may_lie_behind_a_link_to_another_disk(compiling):
    (compiling.folder / "disk").mkdir()
    (compiling.folder / "cache").mkdir()
    (compiling.folder / "cache" / "stock").symlink_to(compiling.folder / "disk")
    assert compiling.install().layouts == {"CPU": "ok"}
    (compiling.folder / "disk").chmod(0o777)
    compiling.stamp.unlink()
    with pytest.raises(SetupError, match=r"other users can write to .*disk: change"):
        compiling.install()


def test_ctrl_c_ends_the_compilers_and_says_how_to_go_on(compiling):
    pid_file = compiling.folder / "compiler.pid"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom oallama.setup.console import Console, guarded\n"
        "from oallama.setup.install import Installer\nfrom oallama.setup import build\n"
        "from dataclasses import replace\n"
        f"build.SOURCE = replace(build.SOURCE, sha256={build.SOURCE.sha256!r})\n"
        "home = Path(os.environ['HOME'])\n"
        "installer = Installer(Console(sys.stderr, home / 'log'), home / 'venv', os.environ, 'cpu')\n"
        "sys.exit(guarded(installer.console, 'set-up', lambda: installer.run() and 0))\n"
    )
    env = {**compiling.env, "PYTHONPATH": str(ROOT), "BUILD_FAILS": f"echo $$ > {pid_file}; sleep 60"}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: pid_file.exists() and pid_file.read_text())
    child.send_signal(signal.SIGTERM)  # treated as Ctrl-C, which a background process may be started without
    _, told = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130 and told.rstrip().endswith("set-up interrupted: run it again to continue")
    must_end(int(pid_file.read_text()))


# ---- the environment of a checkout


@pytest.fixture
def project(here):
    """A checkout with an environment whose uv and Python note what they are asked for."""
    made = here.folder / "project"
    for name in (*setup_env.LOCKS, "pyproject.toml", "ggml_bridge/native/a.cpp"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("uv==1 \\\n    --hash=sha256:00\n", encoding="utf-8")
    note, venv = f'echo "$* $SKBUILD_BUILD_DIR" >> {here.folder}/calls', made / ".venv"
    here.program("project/.venv/bin/uv", f"{note}; echo '#!{venv}/bin/python' > {venv}/bin/oallama")
    here.program("project/.venv/bin/python", f'{note}; [ "$1" != -c ] || echo "True {venv}"')
    return made


def checkout(root, here, *extras, **env):
    return setup_env.Checkout(root, ".venv", extras, here.console, {"PATH": os.environ["PATH"], **env})


def test_finished_environment_is_up_to_date_until_something_changes(project, here):
    checkout(project, here, "test").install()
    assert checkout(project, here, "test").up_to_date()
    assert checkout(project, here).up_to_date(), "more than asked for is fine"
    assert not checkout(project, here, "docs").up_to_date()
    (project / "ggml_bridge" / "native" / "a.cpp").write_text("int b;", encoding="utf-8")
    assert not checkout(project, here).up_to_date()


def test_packages_are_known_by_their_hashes_unless_asked_otherwise(project, here):
    checkout(project, here, "test").install()
    calls = (here.folder / "calls").read_text(encoding="utf-8").splitlines()
    installs = [line for line in calls if line.startswith("pip install")]
    assert all(f"--constraint {project / name}" in line for line in installs for name in setup_env.LOCKS)
    assert f"--editable {project}[test]" in installs[-1]
    assert (project / ".venv" / "uv.txt").read_text(encoding="utf-8") == "uv==1 \\\n    --hash=sha256:00\n"
    n_checked = here.calls("--constraint")
    checkout(project, here, OALLAMA_UNLOCKED="1").install()
    assert here.calls("--constraint") == n_checked


def test_unfinished_or_moved_environment_is_made_anew(project, here):
    assert checkout(project, here).fault() is None, "one that was made by hand is kept"
    (project / ".venv" / setup_env.UNFINISHED).touch()
    assert checkout(project, here).fault() == "the last set-up was cut short"
    (project / ".venv" / setup_env.UNFINISHED).unlink()
    checkout(project, here).install()
    here.program("project/.venv/bin/oallama", f"exec {project}/.venv/bin/python")
    assert checkout(project, here).fault() is None and checkout(project, here).up_to_date()
    moved = project.rename(here.folder / "elsewhere")
    assert checkout(moved, here).fault() == "it was moved" and not checkout(moved, here).up_to_date()


def test_wrong_backend_is_exit_code_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OALLAMA_BACKEND", "quantum")
    assert setup_env.main(tmp_path, []) == 2
    assert capsys.readouterr().err.startswith("error: unknown OALLAMA_BACKEND=quantum")


# ---- a llama.cpp that somebody else built

NAMES = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0", "libmtmd.so", "libggml-cpu-haswell.so", "llama-server")


@pytest.fixture
def folder(tmp_path):
    """As the official archives have it."""
    made = tmp_path / "served" / "llama-b11549"
    made.mkdir(parents=True)
    for name in NAMES:
        (made / name).write_text(name, encoding="utf-8")
    (made / "libllama.so").symlink_to("libllama.so.0")
    return made


def archive_of(file, name):
    made = file.parent / "llama.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        tar.add(file, name)
    return made


@pytest.fixture
def archive(folder):
    return archive_of(folder, folder.name)


@pytest.fixture
def digest(archive):
    return hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.fixture
def take(here):
    def taken(given, sha256=None):
        with here.console.step("llama.cpp", "taking") as step:
            return prebuilt.take(str(given), sha256, here.folder / "cache", step)

    return taken


def test_a_folder_is_taken_as_it_is_and_an_archive_is_unpacked_once(take, folder, archive, digest):
    assert take(folder) == take(folder.parent) == folder
    unpacked = take(archive, digest.upper())
    assert unpacked.name == "llama-b11549" and {*NAMES, "libllama.so"} == {path.name for path in unpacked.iterdir()}
    (unpacked / "mark").touch()
    assert (take(archive) / "mark").exists()


def test_an_address_needs_the_hash_of_what_is_there(take, archive, digest, tmp_path):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(archive.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UsageError, match="needs its hash; give --sha256"):
            take(f"{address}/llama.tar.gz")
        with pytest.raises(SetupError, match="do not trust it"):
            take(f"{address}/llama.tar.gz", "0" * 64)
        with pytest.raises(SetupError, match="cannot download"):
            take(f"{address}/other.tar.gz", "0" * 64)
        assert not list((tmp_path / "cache" / "llama.cpp").iterdir())
        assert (take(f"{address}/llama.tar.gz", digest) / "libllama.so").is_file()
        assert [path.suffix for path in (tmp_path / "cache" / "llama.cpp").iterdir()] == [""]
        server.shutdown()


def test_what_cannot_be_used_is_one_sentence_and_leaves_nothing(take, folder, archive, tmp_path):
    def refused(given, said, sha256=None):
        with pytest.raises(OallamaError, match=said) as error:
            take(given, sha256)
        assert "\n" not in str(error.value)
        assert not list((tmp_path / "cache").rglob("*"))[1:], "the folder for archives alone"

    refused(archive, "it is another file", "0" * 64)
    refused(archive, "must be the 64 hexadecimal digits", "00")
    refused(folder, "omit --sha256", "0" * 64)
    refused(tmp_path / "nowhere", "must be a folder, an archive")
    for cut in (archive.read_bytes()[:200], b"hello"):
        archive.write_bytes(cut)
        refused(archive, "it is cut off, or not an archive")
    (folder / "libggml.so.0").unlink()
    refused(folder, r"has no libggml\.so\.0")
    (folder / "libllama.so").unlink()
    refused(folder, r"no libllama\.so")


def archive_with(path, member):
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(member)
    return path


def member(name, **attributes):
    made = tarfile.TarInfo(name)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def test_nothing_of_an_archive_lands_outside(take, folder, tmp_path):
    made = tmp_path / "made.tar.gz"
    for hostile, said in (
        (member("../../outside"), "cannot unpack"),
        (member("outside/file", type=tarfile.FIFOTYPE), "cannot unpack"),
        (member("here", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "cannot unpack"),
        (member("here", type=tarfile.SYMTYPE, linkname=".."), "cannot unpack"),
        (member("n" * 5000), "cannot unpack"),
    ):
        with pytest.raises(SetupError, match=said):
            take(archive_with(made, hostile))
    assert not list(tmp_path.rglob("outside")) and not list((tmp_path / "cache" / "llama.cpp").iterdir())


def test_a_python_whose_tarfile_has_no_filter_unpacks_nothing(take, archive, tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(SetupError, match=r"cannot unpack .* safely: use 3\.10\.12"):
        take(archive)
    assert not list((tmp_path / "cache" / "llama.cpp").iterdir())


def test_an_unpacked_folder_that_others_could_have_put_there_is_refused(take, archive, digest, tmp_path):
    cache = tmp_path / "cache"
    (cache / "llama.cpp").mkdir(parents=True)
    (cache / "llama.cpp").chmod(0o777)
    with pytest.raises(SetupError, match=r"other users can write to .*: change its permissions"):
        take(archive)
    (cache / "llama.cpp").chmod(0o755)
    planted = cache / "llama.cpp" / digest[:16]  # what a second archive could share with this one
    planted.mkdir(parents=True)
    kept = cache / "llama.cpp" / digest
    assert take(archive).parent == kept
    for path, mode in ((kept, 0o777), (kept / "llama-b11549", 0o775 if os.getgid() != os.getuid() else 0o777),
                       (kept / "llama-b11549" / "libllama.so.0", 0o666)):  # fmt: skip
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(SetupError, match=f"other users can write to {path}: change"):
            take(archive)
        path.chmod(before)
    assert take(archive).parent == kept
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="other users can write to"):
        take(archive)
    kept.unlink()
    (tmp_path / "elsewhere").rename(kept)
    if os.getuid() == 0:
        os.chown(kept / "llama-b11549" / "libllama.so.0", 65534, 65534)
        with pytest.raises(SetupError, match="other users can write to"):
            take(archive)


def test_the_umask_does_not_make_what_is_unpacked_everybodys(take, archive, tmp_path):
    (tmp_path / "cache" / "llama.cpp").mkdir(parents=True)
    before = os.umask(0)
    try:
        take(archive)
    finally:
        os.umask(before)
    take(archive)


@pytest.mark.parametrize(("header", "said"), [(b"\x7fELF" + bytes(14) + b"\xb7\0", "aarch64"), (b"", "another")])
def test_libraries_for_another_processor_are_refused(tmp_path, header, said):
    (tmp_path / "libggml-base.so.0").write_bytes(header)
    with pytest.raises(SetupError, match=f"are for {said}.* but this machine is"):
        prebuilt.check_machine(tmp_path)


def test_a_copy_shares_the_files_of_a_build(tmp_path, folder):
    copy = tmp_path / "lib"
    prebuilt.copy_build(folder, copy)
    assert (copy / "llama-server").samefile(folder / "llama-server") and (copy / "libllama.so").is_symlink()
