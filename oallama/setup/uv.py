"""The path of uv, which installs all packages, and the user's settings for it, including pip's."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from oallama.setup.console import SetupError, capture

_DROPPED = {
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"),
    *("PIP_REQUIRE_VIRTUALENV", "UV_SYSTEM_PYTHON", "UV_PYTHON", "UV_PROJECT", "CFLAGS", "CXXFLAGS", "CMAKE_ARGS"),
}
"""Variables that would make pip and uv install elsewhere, or oallama's native part compile like llama.cpp."""
_OWN_INDEX = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_NO_INDEX", "UV_CONFIG_FILE", "UV_OFFLINE"),
)
_PIP_SETTING = re.compile(r"^(global|install|:env:)\.([a-z-]+)=(.*)$", re.MULTILINE)
_AS_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""pip's settings: the equivalent variable of uv, and its separator of values."""


def find_uv(python: Path, env: Mapping[str, str]) -> str:
    """Return the uv beside a Python, where oallama's dependencies install it, else the one on PATH. Raises
    SetupError."""
    uv_of_python = python.parent / "uv"
    program = str(uv_of_python) if uv_of_python.is_file() else shutil.which("uv", path=env.get("PATH"))
    if program is None:
        raise SetupError(f"uv is missing: run `{python} -m pip install uv`")
    return program


def package_environment(env: Mapping[str, str], python: Path) -> dict[str, str]:
    """Return the environment variables for uv and pip. If uv has no index of its own, it gets the settings of
    `python`'s pip, from pip.conf and PIP_*."""
    variables = {name: value for name, value in env.items() if name not in _DROPPED}
    variables.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", UV_NO_PROGRESS="1")
    has_own_index = any(env.get(name) for name in _OWN_INDEX) or any(file.exists() for file in _config_files(env))
    listed = capture([str(python), "-m", "pip", "config", "list"], variables) or ""
    order = ("global", "install", ":env:")
    for _, name, text in sorted(_PIP_SETTING.findall(listed), key=lambda setting: order.index(setting[0])):
        if name not in _AS_UV or (has_own_index and name in ("index-url", "extra-index-url", "find-links", "no-index")):
            continue
        variable, between = _AS_UV[name]
        if variable not in env:
            variables[variable] = between.join(str(ast.literal_eval(text)).split())
    # pip takes the best version of all indexes, and hashes are known
    if "UV_INDEX" not in env and "UV_INDEX" in variables:
        variables.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return variables


def packages_folder(python: Path, env: Mapping[str, str]) -> Path:
    """Return the folder of a Python's packages. Raises SetupError."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    output = capture([str(python), "-c", code], {name: value for name, value in env.items() if name not in _DROPPED})
    if output is None:
        raise SetupError(f"{python} does not run: set up the environment again")
    return Path(output.strip())


def _config_files(env: Mapping[str, str]) -> tuple[Path, ...]:
    home = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/"), ".config")
    return Path(home, "uv", "uv.toml"), Path("/etc/uv/uv.toml")
