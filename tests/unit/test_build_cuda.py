"""scripts/build_cuda: what is built, what travels, and that it does not get too large. The compile itself takes an
hour, so what stands for its result here are small files."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from cuda_build import pack, toolkit
from cuda_build.build import compiler_seconds
from cuda_build.launch import chosen
from cuda_build.main import main
from cuda_build.recipe import (
    CPU_VARIANTS,
    LIBRARIES,
    LIMIT_BYTES,
    TOOLKIT_WHEELS,
    best_cpu_variant,
    cpu_flags,
    cuda_flags,
    is_needed_source,
    parse_architectures,
    parse_programs,
)
from cuda_build.source import unpack_source_archive, write_source_archive

from oallama.core.errors import UsageError
from oallama.setup.console import SetupError

AVX2 = {"avx2", "fma", "f16c", "bmi2", "sse4_2"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16"}
AMX = AVX512 | {"amx_tile", "amx_int8", "amx_bf16"}


#
# what is built
#


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("90a", ("90a-real",)), ("sm_90a, 89", ("90a-real", "89-real")), ("120a,120a", ("120a-real",))],
)
def test_architectures_are_machine_code_only(text: str, wanted: tuple[str, ...]) -> None:
    assert parse_architectures(text) == wanted


@pytest.mark.parametrize("text", ["", "native", "9.0", "90a;89", "-DX"])
def test_other_architectures_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--arch"):
        parse_architectures(text)


@pytest.mark.parametrize(
    ("features", "name"), [(AMX, "amx"), (AVX512, "avx512"), (AVX2, "avx2"), (AMX - {"avx512vl"}, "avx2")]
)
def test_a_processor_gets_the_best_that_it_can_run(features: set[str], name: str) -> None:
    variant = best_cpu_variant(features)
    assert variant is not None and variant.name == name


def test_a_processor_that_can_run_none_is_told() -> None:
    assert best_cpu_variant({"sse4_2"}) is None


def test_amx_is_compiled_without_the_passes_that_break_it() -> None:
    amx = next(variant for variant in CPU_VARIANTS if variant.name == "amx")
    assert any("-fno-dse" in flag for flag in cpu_flags(amx))
    assert not any("CUDA" in flag for flag in cpu_flags(amx))


def test_nothing_is_compiled_for_this_machine_only() -> None:
    for flags in (cuda_flags(("90a-real",), True, True), *(cpu_flags(variant) for variant in CPU_VARIANTS)):
        assert "-DGGML_NATIVE=OFF" in flags and any("RPATH=$ORIGIN" in flag for flag in flags)


def test_programs_can_be_chosen() -> None:
    assert parse_programs("llama-bench,llama-server") == ("llama-bench", "llama-server")
    assert parse_programs("none") == () == parse_programs("")
    with pytest.raises(UsageError, match="--programs knows no llama-cli"):
        parse_programs("llama-cli")


def test_flash_attention_can_be_left_out() -> None:
    assert "-DGGML_CUDA_FA=ON" in cuda_flags(("89-real",), True, False)
    assert "-DGGML_CUDA_FA=OFF" in cuda_flags(("89-real",), False, False)


#
# the toolkit
#


def test_a_toolkit_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not run"):
        toolkit.toolkit_in(tmp_path, {})


def nvcc(root: Path) -> Path:
    (root / "bin").mkdir(parents=True)
    program = root / "bin" / "nvcc"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n", encoding="utf-8")
    program.chmod(0o755)
    return root


def with_cublas(root: Path) -> Path:
    for name in ("include/cublas_v2.h", "lib/libcublas.so.13"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_cublas_of_the_toolkit_needs_no_flags_of_its_own(tmp_path: Path) -> None:
    found = toolkit.toolkit_in(with_cublas(nvcc(tmp_path / "cuda")), {})
    assert found.version == "13.0.88" and len(found.flags()) == 2


def test_cublas_may_be_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = with_cublas(tmp_path / "site" / "nvidia" / "cu13")
    monkeypatch.setattr(toolkit, "site_folders", lambda: [str(tmp_path / "site")])
    flags = toolkit.toolkit_in(nvcc(tmp_path / "cuda"), {}).flags()
    assert f"-DCUDA_cublas_LIBRARY={package}/lib/libcublas.so.13" in flags
    assert f"-DCMAKE_CUDA_FLAGS=-I{package}/include" in flags


def test_a_toolkit_without_cublas_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "site_folders", lambda: [])
    with pytest.raises(SetupError, match="install nvidia-cublas"):
        toolkit.toolkit_in(nvcc(tmp_path / "cuda"), {})


def test_the_wheels_are_of_one_cuda() -> None:
    assert all("==13.0." in wheel for wheel in TOOLKIT_WHEELS)


def test_a_wheel_is_unpacked_without_its_scripts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        for name in ("x/__init__.py", "x/big.so", "x-1.data/scripts/x", "x-1.dist-info/METADATA"):
            archive.writestr(name, "")
    toolkit.unpack_wheel(tmp_path / "x.whl", tmp_path / "site", lambda name: not name.endswith("big.so"))
    files = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert files == {"x/__init__.py", "x-1.dist-info/METADATA"}


#
# the pack
#


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a build leaves: versioned libraries with their links, three libggml-cpu, our two, a package."""
    tree, built = tmp_path / "tree", tmp_path / "built"
    built.mkdir()
    for name in LIBRARIES:
        (built / f"lib{name}.so.0.1").write_text(f"{name} plain", encoding="utf-8")
        (built / f"lib{name}.so.0").symlink_to(f"lib{name}.so.0.1")
        (built / f"lib{name}.so").symlink_to(f"lib{name}.so.0")
    pack.copy_libraries(built, LIBRARIES, tree / "lib")
    for name in ("amx", "avx512"):
        (tree / "cpu" / name).mkdir(parents=True)
        (tree / "cpu" / name / "libggml-cpu.so.0").write_text(name, encoding="utf-8")
    (tree / "native").mkdir()
    for name in ("libggml_bridge.so", "libggml-oallama.so"):
        (tree / "native" / name).write_text("packed", encoding="utf-8")
    (tree / "site" / "llama_cpp").mkdir(parents=True)
    (tree / "site" / "llama_cpp" / "__init__.py").touch()
    return tree


def test_a_pack_comes_out_as_it_went_in(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "cpu_features", lambda: frozenset(AVX512))
    made = pack.write_pack(tree, {"llama_cpp_python": "0.3.36"}, tmp_path / "out", LIMIT_BYTES)
    assert made["archive_bytes"] == (tmp_path / "out" / pack.ARCHIVE).stat().st_size
    assert json.loads((tmp_path / "out" / pack.MANIFEST).read_text()) == made
    there = pack.unpack(tmp_path / "out", tmp_path / "there")
    assert (there / "lib" / "libllama.so").readlink() == Path("libllama.so.0")
    assert (there / "lib" / "libggml-cpu.so").read_text() == "avx512", "the one for this processor"
    assert (there / "lib" / "libggml-base.so").read_text() == "ggml-base plain"
    assert pack.read_manifest(there)["llama_cpp_python"] == "0.3.36"


def test_a_pack_is_unpacked_once(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "cpu_features", lambda: frozenset(AVX2))
    pack.write_pack(tree, {}, tmp_path / "out", LIMIT_BYTES)
    there = pack.unpack(tmp_path / "out", tmp_path / "there")
    (there / "mine").touch()
    assert (pack.unpack(tmp_path / "out", tmp_path / "there") / "mine").exists()
    (tree / "site" / "more.py").touch()
    pack.write_pack(tree, {}, tmp_path / "out", LIMIT_BYTES)
    assert not (pack.unpack(tmp_path / "out", tmp_path / "there") / "mine").exists(), "a new pack is unpacked anew"


def test_what_may_not_travel_is_refused_and_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    (tree / "lib" / "big.so").write_bytes(bytes(range(256)) * 64 + os.urandom(200_000))
    with pytest.raises(SetupError, match=r"the pack would be 0\.\d MiB and 0 MiB may travel: name fewer") as error:
        pack.write_pack(tree, {}, tmp_path / "out", 100_000)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_lies_beside_the_pack_counts(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "source.tar.xz").write_bytes(bytes(90_000))
    with pytest.raises(SetupError, match="may travel"):
        pack.write_pack(tree, {}, tmp_path / "out", 90_000)


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    (tmp_path / pack.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(SetupError, match="damaged"):
        pack.unpack(tmp_path, tmp_path / "there")
    with pytest.raises(SetupError, match="run scripts/build_cuda"):
        pack.unpack(tmp_path / "nowhere", tmp_path / "there")


def test_our_own_libraries_of_a_checkout_are_not_replaced(tree: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkout" / "build" / "native"
    place.mkdir(parents=True)
    (place / "libggml_bridge.so").write_text("own", encoding="utf-8")
    pack.install_native(tree, tmp_path / "checkout")
    assert (place / "libggml_bridge.so").read_text() == "own"
    assert (place / "libggml-oallama.so").read_text() == "packed"


def test_python_runs_from_the_pack(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "cpu_features", lambda: frozenset(AVX2))
    pack.write_pack(tree, {"native_digest": "other"}, tmp_path / "out", LIMIT_BYTES)
    (tmp_path / "root").mkdir()
    python, env = chosen(tmp_path / "root", "CUDA0", tmp_path / "out", {"PYTHONPATH": "/x"})
    there = tmp_path / "root" / "build" / "gpu" / "pack"
    assert python == Path(sys.executable)
    assert env["LLAMA_CPP_LIB_PATH"] == str(there / "lib")
    paths = env["PYTHONPATH"].split(":")
    assert paths[:2] == [str(tmp_path / "root" / "scripts"), str(tmp_path / "root")]
    assert str(there / "site") in paths and paths[-1] == "/x"
    assert (tmp_path / "root" / "build" / "native" / "libggml-oallama.so").is_file()


def test_without_a_pack_an_environment_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"scripts/build_cuda.*setup_env"):
        chosen(tmp_path, "CUDA0", None, {})
    python = tmp_path / ".venv-vulkan" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    found, env = chosen(tmp_path, "Vulkan0", None, {})
    assert found == python and env["GGML_VK_VISIBLE_DEVICES"] == "0"


#
# the source archive, and how long a build took
#


def test_the_source_archive_has_what_cuda_needs_and_no_more(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    llama = source / "vendor" / "llama.cpp"
    needed = ["CMakeLists.txt", "src/llama.cpp", "ggml/src/ggml.c", "ggml/src/ggml-cuda/mmq.cu", "common/arg.cpp",
              "ggml/src/ggml-cpu/arch/x86/repack.cpp", "include/llama.h"]  # fmt: skip
    others = ["README.md", "models/x.gguf", "ggml/src/ggml-vulkan/x.cpp", "tests/t.cpp", "tools/ui/a.js", "media/a.png"]
    for name in (*needed, *others):
        (llama / name).parent.mkdir(parents=True, exist_ok=True)
        (llama / name).write_text(name, encoding="utf-8")
    (source / "llama_cpp").mkdir()
    (source / "llama_cpp" / "llama.py").touch()
    wheels.mkdir()
    (wheels / "cffi.whl").touch()
    archive = write_source_archive(source, wheels, tmp_path / "out", LIMIT_BYTES)
    work = tmp_path / "work"
    unpack_source_archive(archive, work)
    there = work / "source" / "vendor" / "llama.cpp"
    assert {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()} == set(needed)
    assert (work / "source" / "llama_cpp" / "llama.py").is_file() and (work / "python-wheels" / "cffi.whl").is_file()
    with pytest.raises(SetupError, match="may travel"):
        write_source_archive(source, wheels, tmp_path / "out", 10)
    with pytest.raises(SetupError, match="--source-archive"):
        unpack_source_archive(tmp_path / "none.tar.xz", work)


def test_readmes_and_pictures_do_not_travel() -> None:
    assert not is_needed_source(Path("src/README.md")) and not is_needed_source(Path("ggml/src/ggml-cuda/a.png"))
    assert is_needed_source(Path("LICENSE")) and not is_needed_source(Path("Makefile"))


def test_an_interrupted_build_counts_all_that_was_compiled(tmp_path: Path) -> None:
    lines = ["# ninja log v5", "0\t30000\t1\ta.o\tff", "10\t20010\t1\tb.o\tee", "5\t1005\t1\tlib.so\tdd",
             "5\t1005\t1\tlib.so.0\tdd", "0\t10000\t2\ta.o\tff"]  # fmt: skip
    (tmp_path / ".ninja_log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert compiler_seconds(tmp_path) == 10 + 20 + 1
    assert compiler_seconds(tmp_path / "nowhere") == 0.0


def test_wrong_usage_is_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "build").mkdir()
    assert main(tmp_path, ["--arch", "turing"]) == 2
    with pytest.raises(SystemExit):
        main(tmp_path, ["--source", "x", "--source-archive"])
    assert not (tmp_path / "cache" / "cuda" / "source").exists()


def test_names_in_the_archive_are_nobodys(tree: Path, tmp_path: Path) -> None:
    pack.write_pack(tree, {}, tmp_path / "out", LIMIT_BYTES)
    data = io.BytesIO((tmp_path / "out" / pack.ARCHIVE).read_bytes())
    with tarfile.open(fileobj=data) as tar:
        assert all((entry.uid, entry.uname, entry.mtime) == (0, "", 0) for entry in tar)
