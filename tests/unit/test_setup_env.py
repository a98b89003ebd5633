"""The set-up of a bare machine: what it builds for which machine, what it does when that fails, what it never leaves
behind. The programs outside (compilers, drivers, pip) are small scripts on a PATH of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from processes import must_end, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from setup import commands, gpu, llama, llama_wheel, machine, untested
from setup.console import Console, format_seconds
from setup.environment import Environment, Stamp, digest_files, lock, native_sources
from setup.errors import SetupError, UsageError, remedy
from setup.main import Setup, clean_environment, main

SELFTEST = "print(json.dumps(check_layouts()))"  # a line of what the self-test's process is told
ROOT = Path(__file__).resolve().parents[2]
GCC = machine.Compiler("/usr/bin/gcc", "/usr/bin/g++", "gcc", "12.2.0", "x86_64-linux-gnu")
CLANG = machine.Compiler("/usr/bin/clang", "/usr/bin/clang++", "clang", "16.0.6", "x86_64-linux-gnu")
CPU_BUILD = gpu.Backend("cpu", "CPU build")
XEON = machine.read_cpu("processor: 0\nmodel name : Xeon\nflags : avx2 amx_tile amx_int8\n\nprocessor: 1\nflags : none")
EPYC = machine.read_cpu("processor: 0\nmodel name : EPYC\nflags : avx2 avx512f")


def program(folder: Path, name: str, script: str) -> Path:
    """An executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_env(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH holds nothing but what a test puts into tmp_path/bin."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "CUDA_HOME": str(tmp_path / "no-cuda")}


@pytest.fixture
def console(tmp_path: Path) -> Console:
    made = Console((tmp_path / "said").open("w+"), tmp_path / "setup.log")
    made.open_log()
    return made


def said(console: Console) -> str:
    console.stream.flush()
    return Path(console.stream.name).read_text(encoding="utf-8")


# ---- the machine


def test_cpu_is_known_by_its_first_processor_on_x86_and_arm() -> None:
    assert XEON.has_amx and XEON.model == "Xeon"
    assert not EPYC.has_amx
    arm = machine.read_cpu("processor: 0\nFeatures : asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40")
    assert arm.features == {"asimd", "sve"} and "0xd40" in arm.model
    assert len({XEON.digest, EPYC.digest, arm.digest}) == 3


def test_cpu_digest_ignores_the_order_of_flags_and_sees_each_of_them() -> None:
    digest = machine.read_cpu("model name : X\nflags : a b c").digest
    assert machine.read_cpu("model name : X\nflags : c a b").digest == digest
    assert machine.read_cpu("model name : X\nflags : a b").digest != digest
    assert machine.read_cpu("model name : Y\nflags : a b c").digest != digest


@pytest.mark.parametrize(
    ("env", "system", "expected"),
    [
        ({"HOME": "/h"}, "linux", "/h/.cache/oallama"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/oallama"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "linux", "/x/oallama"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "relative"}, "linux", "/h/.cache/oallama"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "OALLAMA_CACHE_DIR": "/o"}, "linux", "/o"),
    ],
)
def test_cache_folder(env: dict[str, str], system: str, expected: str) -> None:
    assert machine.cache_dir(env, system) == Path(expected)


@pytest.mark.parametrize(
    ("banner", "family", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", "gcc", "12.2.0"),
        ("c++ (GCC) 14.2.1 20250110\nCopyright (C) 2024 Free Software Foundation, Inc.", "gcc", "14.2.1"),
        ("Debian clang version 16.0.6 (19)\nTarget: x86_64-pc-linux-gnu", "clang", "16.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)\nTarget: arm64-apple-darwin23", "clang", "15.0.0"),
    ],
)
def test_compiler_says_what_it_is(
    tmp_path: Path, bin_env: dict[str, str], banner: str, family: str, version: str
) -> None:
    program(tmp_path / "bin", "g++-x", f"printf '%s\\n' '{banner}'")
    program(tmp_path / "bin", "gcc-x", "")
    found = machine.find_compiler({**bin_env, "CXX": "g++-x"})
    assert (found.family, found.version) == (family, version)
    assert found.cc == str(tmp_path / "bin" / "gcc-x"), "the C compiler of the same family and version"


def test_missing_or_broken_compiler_is_one_sentence(tmp_path: Path, bin_env: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=r"no working C\+\+ compiler: install one"):
        machine.find_compiler(bin_env)
    with pytest.raises(SetupError, match="CXX=icpx is not a program"):
        machine.find_compiler({**bin_env, "CXX": "icpx"})
    stub = program(tmp_path / "bin", "c++", "echo 'xcode-select: note: no developer tools were found' >&2; exit 1")
    with pytest.raises(SetupError, match=r"cannot compile a small program"):
        machine.check_compiler(machine.Compiler("cc", str(stub), "clang", "1", ""), bin_env)


def test_this_machines_compiler_is_found_and_works() -> None:
    found = machine.find_compiler(os.environ)
    assert found.family in ("gcc", "clang") and found.version[0].isdigit()
    machine.check_compiler(found, os.environ)


def test_build_jobs_follow_the_users_wish() -> None:
    assert machine.build_jobs({"CMAKE_BUILD_PARALLEL_LEVEL": "3"}) == 3
    assert 1 <= machine.build_jobs({}) <= (os.cpu_count() or 1)


# ---- GPU back ends


def nvidia(folder: Path, cap: str = "8.9") -> None:
    program(
        folder,
        "nvidia-smi",
        f'case "$1" in -L) echo "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)";; *) echo "{cap}"; echo "{cap}";; esac',
    )


def nvcc(folder: Path, cublas: bool = True) -> None:
    has = "exit 0" if cublas else "exit 1"
    program(
        folder,
        "nvcc",
        f'case "$1" in --list-gpu-arch) printf "compute_80\\ncompute_89\\n";; -E) {has};; '
        f'--dryrun) echo "#\\$ TOP={folder.parent}/toolkit";; esac',
    )


def choose(wish: str, env: dict[str, str], args: str = "", system: str = "linux") -> gpu.Backend:
    return gpu.choose_backend(wish, env, "c++", args, system)


def test_a_compiler_without_a_driver_gives_a_cpu_build(tmp_path: Path, bin_env: dict[str, str]) -> None:
    nvcc(tmp_path / "bin")
    chosen = choose("auto", bin_env)
    assert (chosen.name, chosen.flags) == ("cpu", ())
    assert "no GPU driver answers" in chosen.why


def test_a_driver_that_fails_or_lists_no_card_gives_a_cpu_build(tmp_path: Path, bin_env: dict[str, str]) -> None:
    nvcc(tmp_path / "bin")
    program(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA-SMI has failed' ; exit 9")
    assert choose("auto", bin_env).name == "cpu"
    program(tmp_path / "bin", "nvidia-smi", "echo 'No devices found.'")
    assert choose("auto", bin_env).name == "cpu"


def test_a_card_without_its_toolchain_gives_a_cpu_build_and_says_what_is_missing(
    tmp_path: Path, bin_env: dict[str, str]
) -> None:
    nvidia(tmp_path / "bin")
    assert "NVIDIA GeForce RTX 4090 answers, but there is no nvcc" in choose("auto", bin_env).why
    nvcc(tmp_path / "bin", cublas=False)
    assert "libcublas-dev" in choose("auto", bin_env).why
    nvidia(tmp_path / "bin", cap="12.0")
    chosen = choose("auto", bin_env)
    assert chosen.name == "cpu" and "cannot compile for sm_120" in chosen.why


def test_cuda_is_built_for_the_architecture_of_the_card_only(tmp_path: Path, bin_env: dict[str, str]) -> None:
    nvidia(tmp_path / "bin")
    nvcc(tmp_path / "bin")
    stubs = tmp_path / "toolkit" / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    without_libcuda = choose("auto", bin_env)
    (stubs / "libcuda.so").touch()
    chosen = choose("auto", bin_env)
    assert chosen.name == "cuda" and "RTX 4090 (sm_89 only)" in chosen.why
    assert "-DCMAKE_CUDA_ARCHITECTURES=89" in chosen.flags
    assert f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{tmp_path / 'toolkit' / 'lib64'}" in chosen.flags
    assert set(without_libcuda.flags) - set(chosen.flags) == {"-DGGML_CUDA_NO_VMM=ON"}
    assert choose("cpu", bin_env).flags == (), "OALLAMA_BACKEND=cpu overrides"


def test_cuda_without_a_card_needs_the_architecture_named(tmp_path: Path, bin_env: dict[str, str]) -> None:
    nvcc(tmp_path / "bin")
    with pytest.raises(SetupError, match="CUDAARCHS"):
        choose("cuda", bin_env)
    for env, args in (({"CUDAARCHS": "90"}, ""), ({}, "-DCMAKE_CUDA_ARCHITECTURES=90")):
        chosen = choose("cuda", {**bin_env, **env}, args)
        assert chosen.name == "cuda" and not any("ARCHITECTURES" in flag for flag in chosen.flags)


def test_rocm_is_built_for_the_card_that_answers(tmp_path: Path, bin_env: dict[str, str]) -> None:
    env = {**bin_env, "ROCM_PATH": str(tmp_path / "rocm")}
    rocm = tmp_path / "rocm" / "bin"
    program(rocm, "rocminfo", "echo '  Name:                    AMD Ryzen'; echo '  Name:                    gfx1100'")
    assert "gfx1100 answers, but there is no hipcc" in choose("auto", env).why
    program(rocm, "hipcc", "")
    program(rocm, "hipconfig", "echo /llvm/bin")
    assert "hipblas is missing" in choose("auto", env).why
    for library in ("hipblas", "rocblas"):
        (tmp_path / "rocm" / "lib" / "cmake" / library).mkdir(parents=True)
    chosen = choose("auto", env)
    assert chosen.flags == ("-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100")
    assert ("HIPCXX", "/llvm/bin/clang") in chosen.env


def test_a_vulkan_driver_on_the_processor_is_no_gpu(tmp_path: Path, bin_env: dict[str, str]) -> None:
    summary = "echo 'deviceType = PHYSICAL_DEVICE_TYPE_{}'; echo 'deviceName = {}'"
    program(tmp_path / "bin", "vulkaninfo", summary.format("CPU", "llvmpipe"))
    program(tmp_path / "bin", "glslc", "")
    program(tmp_path / "bin", "c++", "")
    assert choose("auto", bin_env).name == "cpu"
    chosen = choose("vulkan", bin_env)
    assert (chosen.flags, chosen.env) == (("-DGGML_VULKAN=ON",), ()), "asked for by name it is built"
    program(tmp_path / "bin", "vulkaninfo", summary.format("DISCRETE_GPU", "Arc A770"))
    assert choose("auto", bin_env).why == "Vulkan build for Arc A770"
    program(tmp_path / "bin", "c++", "exit 1")
    assert "Arc A770 answers, but the Vulkan loader and headers" in choose("auto", bin_env).why


def test_metal_is_for_macos(tmp_path: Path, bin_env: dict[str, str]) -> None:
    program(tmp_path / "bin", "system_profiler", "echo 'Metal Support: Metal 3'")
    program(tmp_path / "bin", "xcrun", "echo /clang")
    assert choose("auto", bin_env, system="darwin").name == "metal"
    with pytest.raises(SetupError, match="macOS only"):
        choose("metal", bin_env)


def test_unknown_backend_is_wrong_usage(bin_env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="OALLAMA_BACKEND=opencl is not known: use one of auto, cpu"):
        choose("opencl", bin_env)


def test_gpu_hint_sees_a_new_program_without_running_it(tmp_path: Path, bin_env: dict[str, str]) -> None:
    before = gpu.gpu_hint(bin_env)
    program(tmp_path / "bin", "nvidia-smi", f"touch {tmp_path}/was-run")
    assert gpu.gpu_hint(bin_env) != before
    assert not (tmp_path / "was-run").exists()


# ---- flags, key and order of variants


def args_of(variant: llama_wheel.Variant, cpu: machine.Cpu, compiler: machine.Compiler, **env: str) -> tuple[str, ...]:
    return llama_wheel.cmake_args(variant, cpu, compiler, env)


def test_amx_fault_is_built_around_only_where_it_is() -> None:
    plain = llama_wheel.Variant(CPU_BUILD)
    assert args_of(plain, EPYC, GCC) == ("-DGGML_RPC=ON",)
    assert args_of(plain, XEON, CLANG) == ("-DGGML_RPC=ON",)
    assert args_of(plain, XEON, GCC) == ("-DGGML_RPC=ON", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse")
    without = args_of(llama_wheel.Variant(CPU_BUILD, amx=False, repack=False), XEON, GCC)
    assert "-DCMAKE_CXX_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in without
    assert "-DGGML_CPU_REPACK=OFF" in without


def test_the_users_flags_are_kept_and_win() -> None:
    made = args_of(llama_wheel.Variant(CPU_BUILD), XEON, GCC, CXXFLAGS="-g", CMAKE_ARGS='-DA="b c" -DGGML_RPC=OFF')
    assert "-DCMAKE_CXX_FLAGS=-g -fno-tree-dse -fno-dse" in made
    assert made[-2:] == ("-DA=b c", "-DGGML_RPC=OFF")


def test_key_belongs_to_one_cpu_compiler_platform_and_set_of_flags() -> None:
    newer = machine.Compiler("gcc", "g++", "gcc", "13.1.0", GCC.target)
    keys = [
        llama_wheel.wheel_key("0.3.36", ("-DA",), EPYC, GCC, "linux-x86_64-glibc2.36"),
        llama_wheel.wheel_key("0.3.37", ("-DA",), EPYC, GCC, "linux-x86_64-glibc2.36"),
        llama_wheel.wheel_key("0.3.36", ("-DB",), EPYC, GCC, "linux-x86_64-glibc2.36"),
        llama_wheel.wheel_key("0.3.36", ("-DA",), XEON, GCC, "linux-x86_64-glibc2.36"),
        llama_wheel.wheel_key("0.3.36", ("-DA",), EPYC, newer, "linux-x86_64-glibc2.36"),
        llama_wheel.wheel_key("0.3.36", ("-DA",), EPYC, GCC, "linux-x86_64-glibc2.31"),
    ]
    assert len(set(keys)) == len(keys)
    moved = machine.Compiler("/opt/gcc", "/opt/g++", "gcc", GCC.version, GCC.target)
    assert llama_wheel.wheel_key("0.3.36", ("-DA",), EPYC, moved, "linux-x86_64-glibc2.36") == keys[0]


def test_pinned_version_comes_from_pyproject() -> None:
    assert llama_wheel.pinned_version('dependencies = ["llama-cpp-python==0.3.36", "numpy"]') == "0.3.36"
    with pytest.raises(SetupError, match="does not pin"):
        llama_wheel.pinned_version("dependencies = []")


def test_what_fails_is_built_out_and_nothing_else() -> None:
    full = llama_wheel.Variant(CPU_BUILD)
    no_amx = llama_wheel.Variant(CPU_BUILD, amx=False)
    cuda = llama_wheel.Variant(gpu.Backend("cuda", "CUDA build"))
    assert llama.next_variant(full, {"AMX": "died"}, True, True) == no_amx
    assert llama.next_variant(full, {"CPU_REPACK": "wrong"}, True, True) == llama_wheel.Variant(CPU_BUILD, repack=False)
    assert llama.next_variant(no_amx, {"AMX": "died"}, True, True) is None
    assert llama.next_variant(full, {"CPU": "wrong"}, False, True) is None, "nothing can replace the plain layout"
    assert llama.next_variant(full, {llama.UNUSABLE: "x"}, True, True) is None
    given_up = llama.next_variant(cuda, {llama.UNUSABLE: "x"}, False, True)
    assert given_up is not None and given_up.backend.name == "cpu"
    assert llama.next_variant(cuda, {llama.UNUSABLE: "x"}, False, False) is None, "asked for by name"
    kept = llama.next_variant(cuda, {"CPU_REPACK": "wrong"}, False, True)
    assert kept is not None and kept.backend.name == "cuda"


# ---- commands, console, faults


@pytest.mark.parametrize(
    ("line", "counter"),
    [
        ("  [57/197] /usr/bin/c++ -DX", "57/197"),
        ("[ 45%] Building CXX object", "45%"),
        ("-- Performing [1/2]", None),
        ("", None),
    ],
)
def test_build_counter(line: str, counter: str | None) -> None:
    assert commands.build_counter(line) == counter


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("The virtual environment was not created successfully because ensurepip is not available", "python3-venv"),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "check the network"),
        ("ERROR: No matching distribution found for numpy", "no fitting version"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "PIP_CERT"),
        ("No CMAKE_CXX_COMPILER could be found.", "no working C++ compiler"),
    ],
)
def test_known_faults_have_a_remedy(output: str, advice: str) -> None:
    found = remedy(["something before", output, "something after"])
    assert found is not None and advice in found


def test_unknown_fault_has_no_remedy_made_up() -> None:
    assert remedy(["everything is fine"]) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.041, "0.04 s"), (8.13, "8.1 s"), (59.96, "1 min 00 s"), (271.4, "4 min 31 s")]
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_failing_command_gives_its_last_lines_and_a_remedy(tmp_path: Path, console: Console) -> None:
    fails = program(tmp_path, "fails", "seq 100; echo 'No space left on device' >&2; exit 3")
    with pytest.raises(SetupError, match="fetching failed: the disk is full") as caught, console.step("x", "y") as step:
        commands.run(console, step, [str(fails)], os.environ, "fetching")
    assert caught.value.tail[-2:] == ("100", "No space left on device")
    assert len(caught.value.tail) <= 15
    log = console.log_path.read_text(encoding="utf-8")
    assert "\n1\n" in log and "No space left" in log, "the log has everything"
    assert said(console) == "", "no line for a step that failed"


def test_interrupt_ends_the_command_and_its_children(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = program(tmp_path, "build", f"sleep 60 & echo $! > {tmp_path}/child; echo '[1/2] c++'; wait")

    under_way = threading.Event()

    def interrupt() -> None:
        under_way.wait()
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), console.step("x", "y") as step:
        monkeypatch.setattr(step, "progress", lambda counter: under_way.set() if counter else None)
        commands.run(console, step, [str(script)], os.environ, "building")
    must_end(int((tmp_path / "child").read_text()))


def test_the_environment_for_pip_cannot_install_elsewhere() -> None:
    cleaned = clean_environment({"PIP_TARGET": "/t", "PYTHONPATH": "/p", "PIP_INDEX_URL": "u", "PIP_USER": "1"})
    assert cleaned["PIP_INDEX_URL"] == "u" and cleaned["PIP_USER"] == "0"
    assert not {"PIP_TARGET", "PYTHONPATH"} & set(cleaned)


# ---- wheels: built, kept, tested


def fake_python(tmp_path: Path, selftest: str) -> Path:
    """`python` as set-up calls it: `-m pip download` fetches a source package, `-m pip wheel` leaves a wheel that holds
    CMAKE_ARGS, `-c` runs the self-test."""
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("llama_cpp_python-0.3.36/pyproject.toml"), io.BytesIO())
    return program(
        tmp_path / "venv" / "bin",
        "python",
        f"""
        echo "$*" >> {tmp_path}/calls
        case "$*" in
        *"pip download"*)
            while [ "$1" != --dest ]; do shift; done
            mkdir -p "$2"; cp {tmp_path}/sdist.tar.gz "$2";;
        *"pip wheel"*)
            for source; do :; done; [ -f "$source/pyproject.toml" ] || exit 1
            mkdir -p "$SKBUILD_BUILD_DIR"; echo compiled >> "$SKBUILD_BUILD_DIR/objects"
            case "$CMAKE_ARGS" in *CUDA*) echo "nvcc fatal"; exit 1;; esac
            while [ "$1" != --wheel-dir ]; do shift; done
            mkdir -p "$2"; printf '%s' "$CMAKE_ARGS" > "$2/llama_cpp_python-0.3.36-py3-none-any.whl";;
        *"pip install"*) for last; do :; done; cat "$last" > {tmp_path}/installed;;
        *check_layouts*) {selftest};;
        esac""",
    )


def installer(
    tmp_path: Path, console: Console, selftest: str, cpu: machine.Cpu, wish: str = "auto"
) -> llama.LlamaInstaller:
    environment = Environment(tmp_path)
    environment.python = fake_python(tmp_path, selftest)
    env = {"PATH": os.environ["PATH"], "OALLAMA_CACHE_DIR": str(tmp_path / "cache")}
    return llama.LlamaInstaller(console, environment, llama.BuildMachine(env, cpu, GCC, wish), "0.3.36")


def calls(tmp_path: Path, word: str) -> int:
    return sum(word in line for line in (tmp_path / "calls").read_text(encoding="utf-8").splitlines())


def test_a_layout_that_crashes_is_rebuilt_without_it_and_remembered(tmp_path: Path, console: Console) -> None:
    tested = f"""case "$(cat {tmp_path}/installed)" in
        *mno-amx*) echo '{{"CPU_REPACK": "ok", "CPU": "ok"}}';;
        *) echo '{{"AMX": "died with SIGSEGV", "CPU_REPACK": "ok", "CPU": "ok"}}';; esac"""
    projects: list[int] = []
    first = installer(tmp_path, console, tested, XEON).install(CPU_BUILD, lambda: projects.append(1), False)
    assert first.layouts == {"CPU_REPACK": "ok", "CPU": "ok"}
    assert first.notes == ["cpu does not work (AMX: died with SIGSEGV), so cpu without AMX is used"]
    assert first.notes[0] in said(console), "and said so"
    assert "-mno-amx-tile" in (tmp_path / "installed").read_text(encoding="utf-8")
    assert (projects, calls(tmp_path, "pip wheel"), calls(tmp_path, SELFTEST)) == ([1], 2, 2)

    again = installer(tmp_path, console, tested, XEON).install(CPU_BUILD, lambda: projects.append(2), False)
    assert again == first
    assert (projects, calls(tmp_path, "pip wheel"), calls(tmp_path, SELFTEST)) == ([1, 2], 2, 2), "from the cache"
    assert "passed its self-test before" in said(console)

    installer(tmp_path, console, tested, XEON).install(CPU_BUILD, lambda: None, True)
    assert (calls(tmp_path, "pip wheel"), calls(tmp_path, SELFTEST)) == (2, 4), "refresh tests again"


def test_a_gpu_build_that_fails_gives_a_cpu_build_unless_asked_for_by_name(tmp_path: Path, console: Console) -> None:
    cuda = gpu.Backend("cuda", "CUDA build", ("-DGGML_CUDA=ON",))
    tested = """echo '{"CPU": "ok"}'"""
    made = installer(tmp_path, console, tested, EPYC).install(cuda, lambda: None, False)
    assert made.backend == "cpu" and "building llama.cpp (cuda) failed" in made.notes[0]
    with pytest.raises(SetupError, match=r"building llama.cpp \(cuda\) failed"):
        installer(tmp_path, console, tested, EPYC, "cuda").install(cuda, lambda: None, False)


def test_wrong_plain_products_are_never_accepted(tmp_path: Path, console: Console) -> None:
    with pytest.raises(SetupError, match=r"does not work \(CPU: 3 of 9 products are wrong\): name another compiler"):
        installer(tmp_path, console, """echo '{"CPU": "3 of 9 products are wrong"}'""", EPYC).install(
            CPU_BUILD, lambda: None, False
        )


def test_a_self_test_that_cannot_run_starts_no_rebuild(tmp_path: Path, console: Console) -> None:
    with pytest.raises(SetupError, match=r"cannot run \(ImportError: no ggml_bridge\)"):
        installer(tmp_path, console, "echo 'ImportError: no ggml_bridge' >&2; exit 1", XEON).install(
            CPU_BUILD, lambda: None, False
        )
    assert calls(tmp_path, "pip wheel") == 1
    assert not list(tmp_path.rglob("selftest.json")), "and is not remembered as the wheel's fault"


def test_a_build_that_fails_leaves_no_wheel_and_the_next_goes_on(tmp_path: Path, console: Console) -> None:
    cuda = gpu.Backend("cuda", "CUDA build", ("-DGGML_CUDA=ON",))
    for attempt in (1, 2):
        with pytest.raises(SetupError):
            installer(tmp_path, console, "", EPYC, "cuda").install(cuda, lambda: None, False)
        assert not (tmp_path / "cache" / "wheels").exists()
        (objects,) = (tmp_path / "cache" / "tmp").rglob("objects")
        assert objects.read_text(encoding="utf-8") == "compiled\n" * attempt, "in the same build folder"
        assert calls(tmp_path, "pip download") == 1
    installer(tmp_path, console, """echo '{"CPU": "ok"}'""", EPYC).install(CPU_BUILD, lambda: None, False)
    assert calls(tmp_path, "pip download") == 2, "another build starts afresh"
    assert not (tmp_path / "cache" / "tmp").exists(), "and one that ends leaves its wheel alone"


# ---- the environment and its stamp


def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "ggml_bridge" / "native").mkdir(parents=True)
    (root / "pyproject.toml").write_text('dependencies = ["llama-cpp-python==0.3.36"]', encoding="utf-8")
    (root / "ggml_bridge" / "native" / "a.cpp").write_text("int a;", encoding="utf-8")
    program(root / ".venv" / "bin", "python", "")
    program(root / ".venv" / "bin", "oallama", "")
    return root


def finished(root: Path, console: Console, extras: list[str]) -> Setup:
    env = {"PATH": os.environ["PATH"]}
    setup = Setup(root, llama.BuildMachine(env, EPYC, GCC, "auto"), console, extras)
    setup.environment.write_stamp(Stamp(setup.inputs(), extras, "key", "cpu"))
    return setup


def test_finished_environment_is_up_to_date_until_something_changes(tmp_path: Path, console: Console) -> None:
    root = project(tmp_path)
    setup = finished(root, console, ["test"])
    assert setup.up_to_date()
    assert Setup(root, setup.machine, console, []).up_to_date(), "more than asked for is fine"
    assert not Setup(root, setup.machine, console, ["plots"]).up_to_date()
    other_cpu = llama.BuildMachine(setup.machine.env, XEON, GCC, "auto")
    assert not Setup(root, other_cpu, console, ["test"]).up_to_date()
    assert not Setup(root, llama.BuildMachine(setup.machine.env, EPYC, GCC, "cpu"), console, ["test"]).up_to_date()
    (root / "ggml_bridge" / "native" / "a.cpp").write_text("int b;", encoding="utf-8")
    assert not setup.up_to_date()


def test_a_new_program_of_a_driver_that_changes_nothing_leaves_llama_cpp_alone(
    tmp_path: Path, console: Console
) -> None:
    root = project(tmp_path)
    program(root / ".venv" / "bin", "python", f'echo "$*" >> {tmp_path}/calls; echo True')
    env = {"PATH": os.environ["PATH"], "OALLAMA_CACHE_DIR": str(tmp_path / "cache")}
    before = Setup(root, llama.BuildMachine(env, EPYC, GCC, "cpu"), console, [])
    wheel = llama.working_recipe(CPU_BUILD, "0.3.36", EPYC, GCC, env, auto=False).key
    before.environment.write_stamp(Stamp(before.inputs(), [], wheel, "cpu"))
    program(tmp_path / "bin", "rocminfo", "")
    after = Setup(root, llama.BuildMachine({**env, "ROCM_PATH": str(tmp_path)}, EPYC, GCC, "cpu"), console, [])
    assert not after.up_to_date()
    assert after.run().wheel == wheel
    assert calls(tmp_path, "--editable") == 1 and calls(tmp_path, "--force-reinstall") == 0
    assert after.up_to_date()
    other = Setup(root, llama.BuildMachine({**env, "CMAKE_ARGS": "-DGGML_X=ON"}, EPYC, GCC, "cpu"), console, [])
    with pytest.raises(SetupError):  # nothing to fetch it from
        other.run()
    assert calls(tmp_path, "pip download") == 1


def test_another_environment_has_a_build_folder_of_its_own(tmp_path: Path, console: Console) -> None:
    root = project(tmp_path)
    for name in (".venv", ".venv-vulkan"):
        python = f'[ "$1 $2 $3" != "-m pip install" ] || echo "{name} $SKBUILD_BUILD_DIR" >> {tmp_path}/calls'
        program(root / name / "bin", "python", python)
        environment = Environment(root, name)
        with console.step("oallama", "installing") as step:
            environment.install_project(console, step, [], False, {"PATH": os.environ["PATH"]})
    folder = root / "build" / "venv-vulkan"
    assert (tmp_path / "calls").read_text(encoding="utf-8") == f".venv \n.venv-vulkan {folder}\n"
    for built in (folder, root / "build" / "py3-none-linux_x86_64"):
        built.mkdir(parents=True)
    Environment(root, ".venv-vulkan").drop_native_build()
    assert [path.name for path in (root / "build").iterdir()] == ["py3-none-linux_x86_64"]
    Environment(root).drop_native_build()
    assert not any((root / "build").iterdir())


def test_unfinished_moved_or_damaged_environment_is_not_taken_for_whole(tmp_path: Path, console: Console) -> None:
    root = project(tmp_path)
    setup = finished(root, console, [])
    with console.step("x", "y") as step:
        setup.environment.prepare(console, step, None, {})
    assert setup.environment.read_stamp() is None
    assert setup.environment.fault({}) == "the last set-up was cut short"
    setup.environment.settle()
    assert setup.environment.read_stamp() is not None
    (root / ".venv" / "oallama-setup.json").write_text('{"schema": 1, "inp', encoding="utf-8")
    assert setup.environment.read_stamp() is None
    finished(root, console, [])
    moved = root.rename(tmp_path / "elsewhere")
    assert Environment(moved).read_stamp() is None


def test_native_sources_are_what_is_compiled(tmp_path: Path) -> None:
    root = project(tmp_path)
    (root / "ggml_bridge" / "a.py").touch()
    (root / "CMakeLists.txt").touch()
    assert {path.name for path in native_sources(root)} == {"a.cpp", "CMakeLists.txt"}
    before = digest_files(root, native_sources(root))
    (root / "ggml_bridge" / "native" / "a.cpp").rename(root / "ggml_bridge" / "native" / "b.cpp")
    assert digest_files(root, native_sources(root)) != before


def test_second_set_up_waits_for_the_first(tmp_path: Path, console: Console) -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path; from setup.console import Console; from setup.environment import lock\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with lock(folder / 'lock', Console(sys.stderr, folder / 'log')):\n"
        "    print('held', flush=True); sys.stdin.read(); (folder / 'first-done').touch()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None and first.stdout is not None and first.stdout.readline() == b"held\n"

        def let_go() -> None:
            until(lambda: f"another set-up is running (process {first.pid}): waiting" in said(console))
            first.stdin.close()  # type: ignore[union-attr]

        teller = threading.Thread(target=let_go)
        teller.start()
        with lock(tmp_path / "lock", console):
            assert (tmp_path / "first-done").exists()
        teller.join()


def test_wrong_backend_is_exit_code_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OALLAMA_BACKEND", "quantum")
    assert main(project(tmp_path), []) == 2
    assert capsys.readouterr().err.startswith("error: OALLAMA_BACKEND=quantum is not known")


# ---- scripts/test and scripts/demo


def test_skipped_tests_are_reported_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "@pytest.mark.skip(reason='torch is not installed')\n"
        "def test_reference(n): pass\n"
        "def test_ok(): pass\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    reasons = untested.skipped(tmp_path / "missing.xml", report)
    assert {reason: len(tests) for reason, tests in reasons.items()} == {"torch is not installed": 2}
    lines = untested.report_lines(reasons, ["a graphics card: none answers here"])
    assert lines[0] == "  - a graphics card: none answers here"
    assert lines[1] == "  - torch is not installed (2 tests: test_x.test_reference)"
    assert untested.skipped(tmp_path / "missing.xml") == {}


@pytest.mark.parametrize(
    ("backends", "expected"),
    [(["CPU", "RPC"], "a graphics card: none answers"), (["CPU", "CUDA"], "back ends other than CUDA")],
)
def test_devices_that_are_not_here_are_named(backends: list[str], expected: str) -> None:
    listed = json.dumps({"devices": [{"name": f"{backend}0", "backend": backend} for backend in backends]})
    assert untested.absent_devices(listed)[0].startswith(expected)
    assert "failed" in untested.absent_devices(None)[0]


@pytest.mark.parametrize("name", ["demo", "test"])
def test_scripts_say_how_they_are_used(name: str) -> None:
    done = subprocess.run([ROOT / "scripts" / name, "--help"], capture_output=True, text=True, check=True)
    assert f"usage: scripts/{name}" in done.stdout and "set -" not in done.stdout


def test_demo_with_a_missing_model_is_wrong_usage(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "scripts" / "demo", str(tmp_path / "no.gguf")], capture_output=True, text=True)
    assert done.returncode == 2 and "no.gguf is not a file" in done.stderr and done.stdout == ""
