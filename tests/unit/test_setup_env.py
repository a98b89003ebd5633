"""The set-up of a bare machine: what it builds for which machine, what it does when that fails, what it never leaves
behind. The programs outside (compilers, drivers, uv) are small scripts on a PATH of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from processes import PATIENCE_S, must_end, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import setup_env

from ggml_bridge.library import LLAMA_CPP_PYTHON_VERSION
from oallama.setup import build, gpu, install, machine, uv
from oallama.setup import console as console_module
from oallama.setup.console import Console, SetupError, lock, remedy

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


# ---- flags, key and order of variants


def args_of(variant: build.Variant, cpu: machine.Cpu, compiler: machine.Compiler, **env: str) -> tuple[str, ...]:
    return build.cmake_args(variant, cpu, compiler, env)


def test_amx_fault_is_built_around_only_where_it_is() -> None:
    plain = build.Variant(CPU_BUILD)
    assert args_of(plain, EPYC, GCC) == ("-DGGML_RPC=ON",)
    assert args_of(plain, XEON, CLANG) == ("-DGGML_RPC=ON",)
    assert args_of(plain, XEON, GCC) == ("-DGGML_RPC=ON", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse")
    without = args_of(build.Variant(CPU_BUILD, amx=False, repack=False), XEON, GCC)
    assert "-DCMAKE_CXX_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in without
    assert "-DGGML_CPU_REPACK=OFF" in without


def test_the_users_flags_are_kept_and_win() -> None:
    made = args_of(build.Variant(CPU_BUILD), XEON, GCC, CXXFLAGS="-g", CMAKE_ARGS='-DA="b c" -DGGML_RPC=OFF')
    assert "-DCMAKE_CXX_FLAGS=-g -fno-tree-dse -fno-dse" in made
    assert made[-2:] == ("-DA=b c", "-DGGML_RPC=OFF")


def test_what_fails_is_built_out_and_nothing_else() -> None:
    full = build.Variant(CPU_BUILD)
    no_amx = build.Variant(CPU_BUILD, amx=False)
    cuda = build.Variant(gpu.Backend("cuda", "CUDA build"))
    assert install.next_variant(full, {"AMX": "died"}, True, True) == no_amx
    assert install.next_variant(full, {"CPU_REPACK": "wrong"}, True, True) == build.Variant(CPU_BUILD, repack=False)
    assert install.next_variant(no_amx, {"AMX": "died"}, True, True) is None
    assert install.next_variant(full, {"CPU": "wrong"}, False, True) is None, "nothing can replace the plain layout"
    assert install.next_variant(full, {install.UNUSABLE: "x"}, True, True) is None
    given_up = install.next_variant(cuda, {install.UNUSABLE: "x"}, False, True)
    assert given_up is not None and given_up.backend.name == "cpu"
    assert install.next_variant(cuda, {install.UNUSABLE: "x"}, False, False) is None, "asked for by name"
    kept = install.next_variant(cuda, {"CPU_REPACK": "wrong"}, False, True)
    assert kept is not None and kept.backend.name == "cuda"


# ---- commands, console, faults


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("The virtual environment was not created successfully because ensurepip is not available", "python3-venv"),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "check the network"),
        ("  × No solution found when resolving dependencies", "lacks a version"),
        ("error: Failed to fetch\n  cause: dns error", "check the network"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "SSL_CERT_FILE"),
        ("No CMAKE_CXX_COMPILER could be found.", "no working C++ compiler"),
    ],
)
def test_known_faults_have_a_remedy(output: str, advice: str) -> None:
    found = remedy(["something before", output, "something after"])
    assert found is not None and advice in found


def test_progress_is_the_builds_own_counter(console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = program(
        tmp_path, "build", "echo '-- [1/2]'; echo '  [57/197] c++ -DX'; echo '[ 45%] Building'; echo '[x]'"
    )
    seen: list[str] = []
    with console.step("x", "y") as step:
        monkeypatch.setattr(step, "progress", seen.append)
        console_module.run(console, step, [str(script)], os.environ, "building")
    assert seen == ["", "57/197", "45%", "45%"]


# ---- packages


def pip_settings(tmp_path: Path, *lines: str) -> Path:
    """A Python whose pip is configured so."""
    text = "\n".join(lines)
    return program(tmp_path / "venv" / "bin", "python", f"[ \"$4\" != list ] || cat <<'END'\n{text}\nEND")


def test_pips_settings_are_uvs(tmp_path: Path) -> None:
    python = pip_settings(
        tmp_path, "global.index-url='http://mirror/simple'", "global.cert='/old.pem'", ":env:.cert='/new.pem'",
        "install.find-links='/a /b'", "global.extra-index-url='http://one\\nhttp://two'", "global.timeout='9'",
    )  # fmt: skip
    made = uv.package_environment({"HOME": str(tmp_path)}, python)
    assert made["UV_DEFAULT_INDEX"] == "http://mirror/simple" and made["SSL_CERT_FILE"] == "/new.pem"
    assert made["UV_FIND_LINKS"] == "/a,/b" and made["UV_INDEX"] == "http://one http://two"
    assert made["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def requirements(file: Path) -> dict[str, str]:
    """Package -> its first line in a lock; each must be known by a hash."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = {line.partition("==")[0]: line for line in lines if "==" in line and not line.startswith(" ")}
    assert all(lines[lines.index(line) + 1].startswith("    --hash=sha256:") for line in found.values())
    return found


def test_the_locks_have_what_pyproject_asks_for() -> None:
    """Run scripts/lock where they do not."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    asked = [*project["project"]["dependencies"], *groups["build"]]
    asked += [text for name, texts in extras.items() if name != "train" for text in texts]
    locked = [requirements(ROOT / name) for name in setup_env.LOCKS]
    for wanted in map(Requirement, asked):
        version = Version(locked[0][canonicalize_name(wanted.name)].partition("==")[2].split()[0])
        assert wanted.specifier.contains(version), wanted
    assert locked[1]["llama-cpp-python"].rstrip(" \\") == groups["llama"][0]
    assert build.pinned_version() == LLAMA_CPP_PYTHON_VERSION
    assert all(locked[0][name] == line for name, line in locked[1].items() if name in locked[0])


# ---- llama.cpp: built, kept, tested

UV = """#!/bin/sh
echo "uv $*" >> "$CALLS"
for word; do last=$word; done
case "$*" in
*--target*" cmake ninja")
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin"; cp "$CMAKE" "$2/bin/cmake";;
*--target*)
    made=$UV_CACHE_DIR/sdists/x/src; mkdir -p "$made/vendor/llama.cpp"; touch "$made/vendor/llama.cpp/CMakeLists.txt";;
*) mkdir -p "$PACKAGES/llama_cpp";;
esac
"""
# cmake makes what it was asked for: `-B DIR` a build folder, `--target …` the programs; `$BUILD_FAILS` is run before.
CMAKE = """#!/bin/sh
echo "cmake $*" >> "$CALLS"
if [ "$1" = -S ]; then mkdir -p "$4"; echo "$*" > "$4/flags"; exit 0; fi
folder=$2; mkdir -p "$folder/bin"
sh -c "$BUILD_FAILS" || exit 1
if grep -q CUDA "$folder/flags"; then echo "nvcc fatal"; exit 1; fi
while [ "$1" != --target ]; do shift; done
shift
for name; do echo "$name" > "$folder/bin/$name"; done
cp "$folder/flags" "$folder/bin/libllama.so.0"; ln -s libllama.so.0 "$folder/bin/libllama.so"
"""
OK = """echo '{"CPU": "ok"}'"""


class Place:
    """A machine whose compiler, uv and cmake are scripts, with an environment and a cache of its own."""

    def __init__(self, folder: Path, console: Console, selftest: str = OK, cpu: machine.Cpu = EPYC) -> None:
        self.folder, self.console, self.cpu = folder, console, cpu
        self.packages = folder / "venv" / "packages"
        self.packages.mkdir(parents=True, exist_ok=True)
        (folder / "calls").touch()
        answers = f'*sysconfig*) echo {self.packages};; *check_layouts*) echo multiplied >> "$CALLS"; {selftest};;'
        program(folder / "venv" / "bin", "python", f'case "$*" in {answers} esac')
        for name, script in (("venv/bin/uv", UV), ("cmake", CMAKE)):
            (folder / name).write_text(script, encoding="utf-8")
            (folder / name).chmod(0o755)
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "OALLAMA_CACHE_DIR": str(folder / "cache"),
            "CALLS": str(folder / "calls"), "PACKAGES": str(self.packages), "CMAKE": str(folder / "cmake"),
            "BUILD_FAILS": "true", "CUDA_HOME": str(folder / "no-cuda"),
        }  # fmt: skip

    def run(self, wish: str = "cpu", backend: gpu.Backend | None = None, refresh: bool = False) -> install.Installed:
        made = install.Installer(self.console, self.folder / "venv", self.env, wish)
        made.cpu, made.compiler = self.cpu, replace(GCC, cxx=machine.find_compiler(os.environ).cxx)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(install, "choose_backend", lambda *_: backend or CPU_BUILD)
            return made.run(refresh=refresh)

    def calls(self, word: str) -> int:
        return sum(word in line for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines())

    @property
    def library(self) -> str:
        return (self.packages / "llama_cpp" / "lib" / "libllama.so").read_text(encoding="utf-8")


@pytest.fixture
def make_place(tmp_path: Path, console: Console) -> Callable[..., Place]:
    return lambda *words, **more: Place(tmp_path, console, *words, **more)


def test_libraries_and_programs_come_out_of_one_build_that_is_kept(make_place: Callable[..., Place]) -> None:
    place = make_place()
    made = place.run()
    folder = place.packages / "llama_cpp" / "lib"
    assert {path.name for path in folder.iterdir()} == {*build.PROGRAMS, "libllama.so", "libllama.so.0"}
    assert (folder / "libllama.so").is_symlink() and made.layouts == {"CPU": "ok"}
    (kept,) = (place.folder / "cache" / "stock").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["bin", "recipe.json", "selftest.json"]
    for flag in ("BUILD_SHARED_LIBS=ON", "GGML_RPC=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"):
        assert f"-D{flag}" in place.library.split()
    assert place.run() == made and place.calls("cmake --build") == 1 and place.calls("uv") == 3, "nothing to do"
    (place.folder / "venv" / install.STAMP).unlink()
    place.run()
    assert (place.calls("cmake --build"), place.calls("multiplied")) == (1, 1), "from the cache"


def test_a_layout_that_crashes_is_rebuilt_without_it_and_remembered(make_place: Callable[..., Place]) -> None:
    tested = """if grep -q mno-amx "$PACKAGES/llama_cpp/lib/libllama.so"; then echo '{"CPU_REPACK": "ok", "CPU": "ok"}'
        else echo '{"AMX": "died with SIGSEGV", "CPU_REPACK": "ok", "CPU": "ok"}'; fi"""
    place = make_place(tested, XEON)
    first = place.run()
    assert first.layouts == {"CPU_REPACK": "ok", "CPU": "ok"}
    assert first.notes == ["cpu does not work (AMX: died with SIGSEGV), so cpu without AMX is used"]
    assert first.notes[0] in said(place.console) and "-mno-amx-tile" in place.library
    (place.folder / "venv" / install.STAMP).unlink()
    assert place.run() == first and place.calls("cmake --build") == 2, "from the cache"
    before = place.calls("multiplied")
    place.run(refresh=True)
    assert (place.calls("cmake --build"), place.calls("multiplied")) == (2, before + 2), "refresh tests again"


def test_a_gpu_build_that_fails_gives_a_cpu_build_unless_asked_for_by_name(make_place: Callable[..., Place]) -> None:
    cuda = gpu.Backend("cuda", "CUDA build", ("-DGGML_CUDA=ON",))
    place = make_place()
    made = place.run("auto", cuda)
    assert made.backend == "cpu" and "compiling llama.cpp (cuda) failed" in made.notes[0]
    with pytest.raises(SetupError, match=r"compiling llama.cpp \(cuda\) failed"):
        place.run("cuda", cuda)
    assert "GGML_RPC" in place.library, "what was there stays"


def test_a_build_that_fails_is_not_kept_and_the_next_goes_on(make_place: Callable[..., Place]) -> None:
    place = make_place()
    place.env["BUILD_FAILS"] = "echo 'fatal error: Killed signal terminated program cc1plus'; false"
    for _ in range(2):
        with pytest.raises(SetupError, match="out of memory"):
            place.run()
        assert [path.suffix for path in (place.folder / "cache" / "stock").iterdir()] == [".part"]
    place.env["BUILD_FAILS"] = "true"
    place.run()
    assert place.calls("--no-deps --target") == 1, "fetched once"
    assert not list((place.folder / "cache" / "stock").glob("*.part"))


def test_a_build_that_others_can_change_is_refused(make_place: Callable[..., Place]) -> None:
    place = make_place()
    place.run()
    (program_file,) = (place.folder / "cache").rglob("llama-cli")
    program_file.chmod(0o646)
    (place.folder / "venv" / install.STAMP).unlink()
    with pytest.raises(SetupError, match="can be changed by other users: remove"):
        place.run()


def test_ctrl_c_ends_the_compilers_and_the_next_run_goes_on(make_place: Callable[..., Place]) -> None:
    place = make_place()
    pid_file = place.folder / "compiler.pid"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom oallama.setup.console import Console, guarded\n"
        "from oallama.setup.install import Installer\n"
        f"folder = Path({str(place.folder)!r})\nconsole = Console(sys.stderr, folder / 'log')\n"
        "installer = Installer(console, folder / 'venv', os.environ, 'cpu')\n"
        "sys.exit(guarded(console, 'set-up', lambda: installer.run() and 0))\n"
    )
    env = {**place.env, "PYTHONPATH": str(ROOT), "BUILD_FAILS": f"echo $$ > {pid_file}; sleep 60"}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: pid_file.exists() and pid_file.read_text())
    child.send_signal(signal.SIGTERM)  # treated as Ctrl-C, which a background process may be started without
    _, told = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130 and told.rstrip().endswith("set-up interrupted: run it again to go on")
    must_end(int(pid_file.read_text()))


# ---- the environment of a checkout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with an environment whose uv and python note what they are asked for."""
    made = tmp_path / "project"
    (made / "ggml_bridge" / "native").mkdir(parents=True)
    (made / "pyproject.toml").touch()
    for name in setup_env.LOCKS:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("uv==1 \\\n    --hash=sha256:00\n", encoding="utf-8")
    (made / "ggml_bridge" / "native" / "a.cpp").write_text("int a;", encoding="utf-8")
    note, venv = f'echo "$* $SKBUILD_BUILD_DIR" >> {tmp_path}/calls', made / ".venv"
    program(venv / "bin", "uv", f"{note}; echo '#!{venv}/bin/python' > {venv}/bin/oallama")
    program(venv / "bin", "python", f'{note}; [ "$1" != -c ] || echo "True {venv}"')
    return made


def checkout(root: Path, console: Console, *extras: str, **env: str) -> setup_env.Checkout:
    return setup_env.Checkout(root, ".venv", extras, console, {"PATH": os.environ["PATH"], **env})


def test_finished_environment_is_up_to_date_until_something_changes(root: Path, console: Console) -> None:
    checkout(root, console, "test").install()
    assert checkout(root, console, "test").up_to_date()
    assert checkout(root, console).up_to_date(), "more than asked for is fine"
    assert not checkout(root, console, "docs").up_to_date()
    (root / "ggml_bridge" / "native" / "a.cpp").write_text("int b;", encoding="utf-8")
    assert not checkout(root, console).up_to_date()


def test_packages_are_known_by_their_hashes_unless_asked_otherwise(root: Path, console: Console) -> None:
    checkout(root, console, "test").install()
    calls = (root.parent / "calls").read_text(encoding="utf-8").splitlines()
    installs = [line for line in calls if line.startswith("pip install")]
    assert all(f"--constraint {root / name}" in line for line in installs for name in setup_env.LOCKS)
    assert f"--editable {root}[test]" in installs[-1]
    assert (root / ".venv" / "uv.txt").read_text(encoding="utf-8") == "uv==1 \\\n    --hash=sha256:00\n"
    (root.parent / "calls").unlink()
    checkout(root, console, OALLAMA_UNLOCKED="1").install()
    assert "--constraint" not in (root.parent / "calls").read_text(encoding="utf-8")


def test_unfinished_or_moved_environment_is_made_anew(root: Path, console: Console) -> None:
    assert checkout(root, console).fault() is None, "one that was made by hand is kept"
    (root / ".venv" / setup_env.UNFINISHED).touch()
    assert checkout(root, console).fault() == "the last set-up was cut short"
    (root / ".venv" / setup_env.UNFINISHED).unlink()
    checkout(root, console).install()
    program(root / ".venv" / "bin", "oallama", f"exec {root}/.venv/bin/python")
    assert checkout(root, console).fault() is None and checkout(root, console).up_to_date()
    moved = root.rename(root.parent / "elsewhere")
    assert checkout(moved, console).fault() == "it was moved" and not checkout(moved, console).up_to_date()


def test_second_set_up_waits_for_the_first(tmp_path: Path, console: Console) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path; from oallama.setup.console import Console, lock\n"
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


def test_cuda_without_a_card_needs_the_architecture_named(tmp_path: Path, bin_env: dict[str, str]) -> None:
    nvcc(tmp_path / "bin")
    with pytest.raises(SetupError, match="CUDAARCHS"):
        choose("cuda", bin_env)
    for env, args in (({"CUDAARCHS": "90"}, ""), ({}, "-DCMAKE_CUDA_ARCHITECTURES=90")):
        chosen = choose("cuda", {**bin_env, **env}, args)
        assert chosen.name == "cuda" and not any("ARCHITECTURES" in flag for flag in chosen.flags)


def test_wrong_backend_is_exit_code_2_and_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OALLAMA_BACKEND", "quantum")
    assert setup_env.main(root, []) == 2
    assert capsys.readouterr().err.startswith("error: OALLAMA_BACKEND=quantum is not known")


def test_wrong_plain_products_are_never_accepted(make_place: Callable[..., Place]) -> None:
    place = make_place("""echo '{"CPU": "3 of 9 products are wrong"}'""")
    with pytest.raises(SetupError, match=r"does not work \(CPU: 3 of 9 products are wrong\): name another compiler"):
        place.run()
    assert not (place.packages / "llama_cpp" / "lib").exists()


def test_a_self_test_that_cannot_run_starts_no_rebuild(make_place: Callable[..., Place]) -> None:
    place = make_place("echo 'ImportError: no ggml_bridge' >&2; exit 1")
    with pytest.raises(SetupError, match=r"cannot run: ImportError: no ggml_bridge"):
        place.run()
    assert place.calls("cmake --build") == 1
    assert not list(place.folder.rglob("selftest.json")), "and is not remembered as the build's fault"
