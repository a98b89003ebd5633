"""The shell blocks of README, install and how-to pages, run as they stand there: page by page, in one shell each.

A block that cannot run here is marked in the page, in a comment before it: `<!-- not run: WHY -->`, or
`<!-- needs: llama-server -->`, which is run where that is built.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.stock import PROGRAMS, free_port, program
from processes import ROOT

from oallama.stores.default_model import FILE

MODEL = ROOT / "models" / FILE
HOW_TO = ("index", "install", "run", "serve", "what-if", "devices", "bench", "policies")
PAGES = ("README.md", *(f"docs/{name}.md" for name in HOW_TO))
BLOCK = re.compile(r"(?:^<!-- (not run|needs): ([^\n]+) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "50052"  # of the pages; it lies where the system takes ports for connections, and may be taken

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pages are for Linux"),
]


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(mark or "", what is needed or why it is not run, text) of each block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[tuple[str, str, str]] = BLOCK.findall(text)
    assert len(found) == len(re.findall(r"^ *```sh", text, re.MULTILINE)), f"{page} has a block that is not understood"
    marks = re.findall(r"^<!-- (?:not run|needs): ", text, re.MULTILINE)
    assert len(marks) == sum(bool(mark) for mark, *_ in found), f"{page} has a mark before no block"
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_says_why_not(page: str) -> None:
    for mark, said, text in blocks(page):
        assert not mark or (len(said.split()) > 2 if mark == "not run" else said == "llama-server"), text


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path, measured_cache: Path) -> None:
    usable = {"", "needs"} if PROGRAMS is not None and Path(program("llama-server")).is_file() else {""}
    script = "".join(text for mark, _, text in blocks(page) if mark in usable).replace(PORT, str(free_port()))
    (tmp_path / "models").symlink_to(MODEL.parent)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    path = (commands(tmp_path), Path(sys.executable).parent, os.environ["PATH"])
    environment = {
        **os.environ,
        "OLLAMA_MODELS": str(ollama_store(tmp_path)),
        "PATH": os.pathsep.join(map(str, path)),
        "OALLAMA_CACHE_DIR": str(measured_cache),
        **({"OALLAMA_LLAMA_SERVER": program("llama-server")} if "needs" in usable else {}),
        "MODEL": str(model_of(page, tmp_path)),
    }
    script = f"set -euxo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
    log = tmp_path / "log"
    with log.open("w") as out:  # no pipe: what is left in the background would hold it open
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            timeout=800,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-5000:]


MAKE_MODEL = (sys.executable, str(ROOT / "scripts/make_model.py"))


def commands(folder: Path) -> Path:
    """Write what the pages call by a short name, and .venv/bin/oallama, whose `serve` ends by itself."""
    oallama = shlex.quote(str(Path(sys.executable).parent / "oallama"))
    serve = f'timeout --preserve-status -s INT 15 {oallama} "$@" --port 0\n[ $? = 130 ]'
    scripts = {
        "bin/make_model.py": f'exec {shlex.join(MAKE_MODEL)} "$@"',
        ".venv/bin/oallama": f'[ "$1" = serve ] || exec {oallama} "$@"\n{serve}',
    }
    for name, text in scripts.items():
        script = folder / name
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        script.chmod(0o755)
    return folder / "bin"


def model_of(page: str, folder: Path) -> Path:
    """MODEL where a page has it downloaded: for the mixture of experts a small one."""
    if page != "docs/what-if.md":
        return MODEL
    made = folder / "small-moe.gguf"
    shape = ("--like", "moe-mini", "--layers", "2")
    subprocess.run([*MAKE_MODEL, *shape, "-o", str(made)], check=True, capture_output=True, timeout=120)
    return made


def ollama_store(folder: Path) -> Path:
    """The default model as ollama keeps it, under the name that the page uses."""
    data, store = MODEL.read_bytes(), folder / "ollama"
    digest = hashlib.sha256(data).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)}
    files = {
        f"blobs/sha256-{digest}": data,
        "manifests/registry.ollama.ai/library/llama3.2/latest": json.dumps(
            {"schemaVersion": 2, "layers": [layer]}
        ).encode(),
    }
    for name, content in files.items():
        (store / name).parent.mkdir(parents=True)
        (store / name).write_bytes(content)
    return store
