"""A llama.cpp that somebody else built: what is taken, and what is refused in one sentence."""

from __future__ import annotations

import hashlib
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from oallama.core.errors import OallamaError, UsageError
from oallama.setup.console import Console, SetupError
from oallama.setup.prebuilt import check, put, take

NAMES = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0", "libmtmd.so", "libggml-cpu-haswell.so", "llama-server")


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A folder as the official archives have it."""
    folder = tmp_path / "served" / "llama-b11312"
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "libllama.so").symlink_to("libllama.so.0")
    return folder


@pytest.fixture
def archive(build: Path) -> Path:
    made = build.parent / "llama.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        tar.add(build, build.name)
    return made


def taken(tmp_path: Path, given: object, sha256: str | None = None) -> Path:
    console = Console((tmp_path / "said").open("w"), tmp_path / "log")
    with console.step("llama.cpp", "taking") as step:
        return take(str(given), sha256, tmp_path / "cache", step)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def address(build: Path) -> Iterator[str]:
    folder = str(build.parent)

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *words: object) -> None:
            super().__init__(*words, directory=folder)  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_folder_is_taken_as_it_is_also_from_above(tmp_path: Path, build: Path) -> None:
    assert taken(tmp_path, build) == taken(tmp_path, build.parent) == build


def test_an_archive_is_unpacked_once(tmp_path: Path, archive: Path) -> None:
    folder = taken(tmp_path, archive, digest(archive).upper())
    assert folder.name == "llama-b11312" and {*NAMES, "libllama.so"} == {path.name for path in folder.iterdir()}
    (folder / "mark").touch()
    assert (taken(tmp_path, archive) / "mark").exists()


def test_an_address_needs_the_hash_of_what_is_there(tmp_path: Path, archive: Path, address: str) -> None:
    with pytest.raises(UsageError, match="needs its hash; give it in --sha256"):
        taken(tmp_path, f"{address}/llama.tar.gz")
    with pytest.raises(SetupError, match="do not trust it"):
        taken(tmp_path, f"{address}/llama.tar.gz", "0" * 64)
    with pytest.raises(SetupError, match="cannot be fetched"):
        taken(tmp_path, f"{address}/other.tar.gz", "0" * 64)
    assert not list((tmp_path / "cache" / "llama.cpp").iterdir())
    assert (taken(tmp_path, f"{address}/llama.tar.gz", digest(archive)) / "libllama.so").is_file()
    assert [path.suffix for path in (tmp_path / "cache" / "llama.cpp").iterdir()] == [""]


@pytest.mark.parametrize(
    ("what", "said"),
    [("cut", "it is cut off, or no archive"), ("text", "it is cut off, or no archive"), ("other", "no libllama.so"),
     ("half", "has no libggml.so.0"), ("nothing", "give a folder, an archive"), ("hash", "it is another file")],
)  # fmt: skip
def test_what_cannot_be_used_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, build: Path, archive: Path, what: str, said: str
) -> None:
    given, sha256 = archive, None
    if what == "cut":
        archive.write_bytes(archive.read_bytes()[:200])
    elif what == "text":
        archive.write_text("hello", encoding="utf-8")
    elif what == "other":
        given = tmp_path / "empty"
        given.mkdir()
    elif what == "half":
        given = build
        (build / "libggml.so.0").unlink()
    elif what == "nothing":
        given = tmp_path / "nowhere"
    else:
        sha256 = "0" * 64
    with pytest.raises(OallamaError, match=said) as error:
        taken(tmp_path, given, sha256)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_nothing_of_an_archive_lands_outside(tmp_path: Path, build: Path) -> None:
    made = tmp_path / "evil.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        tar.add(build / "llama-server", "../../outside")
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python's tarfile has no filters")
    with pytest.raises(SetupError, match="cannot be unpacked"):
        taken(tmp_path, made)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(("header", "said"), [(b"\x7fELF" + bytes(14) + b"\xb7\0", "aarch64"), (b"", "another")])
def test_libraries_for_another_processor_are_refused(tmp_path: Path, header: bytes, said: str) -> None:
    (tmp_path / "libggml-base.so.0").write_bytes(header)
    with pytest.raises(SetupError, match=f"are for {said}.* and this is"):
        check(tmp_path, Path(sys.executable), {})


def test_what_was_there_is_kept_beside_until_the_new_one_is_tested(tmp_path: Path, build: Path) -> None:
    place = tmp_path / "lib"
    put(build, place)
    assert (place / "llama-server").samefile(build / "llama-server") and (place / "libllama.so").is_symlink()
    (place / "mark").touch()
    put(build, place)
    assert not (place / "mark").exists() and (tmp_path / "lib.old" / "mark").exists()
