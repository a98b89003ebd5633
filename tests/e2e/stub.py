"""The stand-in for llama-server as a program of its own, beside the ggml that llama-server would be linked with."""

from __future__ import annotations

import sys
from pathlib import Path

from stub_llama_server import __file__ as STUB

from ggml_bridge.library import library_folder, soname


def stub_program(folder: Path) -> Path:
    made = folder / "bin" / "llama-server"
    made.parent.mkdir()
    made.write_text(f"#!{sys.executable}\n" + Path(STUB).read_text(encoding="utf-8"), encoding="utf-8")
    made.chmod(0o755)
    (made.parent / soname("ggml-base")).symlink_to(library_folder() / soname("ggml-base"))
    return made
