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
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e.stock import PROGRAMS, free_port, program

from oallama.stores.default_model import FILE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / FILE
HOW_TO = ("index", "install", "run", "serve", "what-if", "devices", "bench", "policies")
PAGES = ("README.md", *(f"docs/{name}.md" for name in HOW_TO))
BLOCK = re.compile(r"(?:^<!-- (not run|needs): ([^\n]+) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^ *```sh", re.MULTILINE)
MARK = re.compile(r"^<!-- (?:not run|needs): ", re.MULTILINE)
NEEDED = {"llama-server"}

PORT = "50052"  # of the pages; it lies where the system takes ports for connections, and may be taken

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pages are for Linux"),
]


@dataclass(frozen=True)
class Block:
    """needs: what must be there for it; why: why it is not run; both empty: it is run."""

    text: str
    needs: str = ""
    why: str = ""


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    assert len(found) == len(ANY_BLOCK.findall(text)), f"{page} has a block that is not understood"
    assert sum(bool(mark) for mark, *_ in found) == len(MARK.findall(text)), f"{page} has a mark before no block"
    return [
        Block(code, said if mark == "needs" else "", said if mark == "not run" else "") for mark, said, code in found
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_says_why_not(page: str) -> None:
    for block in blocks(page):
        assert not block.why or len(block.why.split()) > 2, block
        assert not block.needs or block.needs in NEEDED, block


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path, measured_cache: Path) -> None:
    with_server = PROGRAMS is not None and Path(program("llama-server")).is_file()
    ran = [block.text for block in blocks(page) if not block.why and (not block.needs or with_server)]
    (tmp_path / "models").symlink_to(MODEL.parent)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    environment = {
        **os.environ,
        **ollama_store(tmp_path),
        "PATH": f"{commands(tmp_path)}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OALLAMA_CACHE_DIR": str(measured_cache),
        **({"OALLAMA_LLAMA_SERVER": program("llama-server")} if with_server else {}),
        "MODEL": str(model_of(page, tmp_path)),
    }
    commands_run = "\n".join(ran).replace(PORT, str(free_port()))
    script = "set -euxo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + commands_run
    log = tmp_path / "log"
    with log.open("w") as out:  # no pipe: what is left in the background would hold it open
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            timeout=800,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-5000:]


def commands(folder: Path) -> Path:
    """Write what the pages call by a short name, and .venv/bin/oallama, whose `serve` ends by itself."""
    made = folder / "bin"
    oallama = shlex.quote(str(Path(sys.executable).parent / "oallama"))
    serve = f'timeout --preserve-status -s INT 15 {oallama} "$@" --port 0\n[ $? = 130 ]'
    call = shlex.join([sys.executable, str(ROOT / "scripts/make_model.py")])
    scripts = {
        made / "make_model.py": f'exec {call} "$@"',
        folder / ".venv/bin/oallama": f'[ "$1" = serve ] || exec {oallama} "$@"\n{serve}',
    }
    for script, text in scripts.items():
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        script.chmod(0o755)
    return made


def model_of(page: str, folder: Path) -> Path:
    """MODEL where a page has it downloaded: for the mixture of experts a small one."""
    if page != "docs/what-if.md":
        return MODEL
    made = folder / "small-moe.gguf"
    shape = "--layers 2 --embd 256 --ff 256 --heads 4 --kv-heads 2 --vocab 512 --experts 8 --experts-used 2"
    command = [sys.executable, str(ROOT / "scripts/make_model.py"), *shape.split(), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return made


def ollama_store(folder: Path) -> dict[str, str]:
    """The default model as ollama keeps it, under the name that the page uses."""
    data = MODEL.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    store = folder / "ollama"
    (store / "blobs").mkdir(parents=True)
    (store / "blobs" / f"sha256-{digest}").write_bytes(data)
    manifest = store / "manifests/registry.ollama.ai/library/llama3.2/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}), encoding="utf-8")
    return {"OLLAMA_MODELS": str(store)}
