"""The rooms' import direction, read from the sources: arrows point right and never back.

cli -> serve -> gate -> bench -> placer -> {run, report} -> place -> plan -> {cost, stores} ->
{profile, model, setup} -> device -> core, and ggml_bridge, which knows nothing of oallama, is for the rooms that touch
native code.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    ("cli",),
    ("serve",),  # runs llama-server with a plan that the commands made
    ("gate",),  # measures plans against stock before one is used
    ("bench",),  # its arms are what users run: plans of the placer, in engines
    ("placer",),  # the front door for Python
    ("run", "report"),
    ("place",),
    ("plan",),  # the record that placements become
    ("cost", "stores"),
    ("profile", "model", "setup"),
    ("device",),
    ("core",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

TOUCH_NATIVE = (
    *("oallama.device", "oallama.profile", "oallama.model.memory", "oallama.run", "oallama.setup"),
    *(f"oallama.bench.{part}" for part in ("child", "fit", "loaded", "process", "readback", "timing")),
)
TOUCH_NATIVE_TOO = {
    "oallama.cli.checks": "doctor checks the bridge itself",
    "oallama.cli.export": "names the file of the plugin",
    "oallama.cli.tune": "starts itself as the bridge starts its own children",
    "oallama.serve.launch": "asks Linux to end llama-server with us, as the bridge's own children do",
    "oallama.serve.placement": "begins a thread as the bridge does",
    "oallama.serve.program": "llama-server must be of the ggml that the plug-in was made for",
    "oallama.serve.supervisor": "names signals as the bridge does",
    "oallama.model.chat_template": "templates are rendered in a child process, which the bridge knows how to run",
}
PURE = (
    *("oallama.cost", "oallama.place", "oallama.report", "oallama.plan.patterns", "oallama.plan.split"),
    *(f"oallama.bench.{part}" for part in ("records", "rows", "schedule", "stats", "stock", "verify")),
    *("oallama.gate.verdict", "oallama.core.options", "oallama.profile.fit"),
)
IMPURE_MODULES = {"os", "time", "random", "logging", "subprocess", "socket", "tempfile", "shutil", "threading"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that a file imports at run time, also inside functions; `if TYPE_CHECKING` blocks are left out."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def sources(package):
    return {module_name(path): imports(path) for path in sorted((ROOT / package).rglob("*.py"))}


OALLAMA = sources("oallama")
BRIDGE = sources("ggml_bridge")


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "oallama" else None


def inside(module, packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_every_room_has_its_level():
    rooms = {room(module) for module in OALLAMA} - {None, "__main__"}
    assert rooms <= LEVEL.keys()


def test_imports_between_rooms_go_right():
    wrong = []
    for module, imported in OALLAMA.items():
        here = room(module)
        if here not in LEVEL:  # oallama itself and __main__ open the doors
            continue
        for name in imported:
            there = room(name)
            if there in LEVEL and there != here and LEVEL[there] <= LEVEL[here]:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def circles(modules):
    """Modules that import each other, at any depth: the groups of more than one that Tarjan's algorithm finds."""
    graph = {module: sorted({name for name in imported if name in modules}) for module, imported in modules.items()}
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in index:
            visit(module)
    return found


@pytest.mark.parametrize("modules", [OALLAMA, BRIDGE], ids=["oallama", "ggml_bridge"])
def test_no_modules_import_each_other(modules):
    assert circles(modules) == []


def test_a_circle_is_seen():
    assert circles({"a": ["b"], "b": ["c", "os"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]


def test_only_rooms_that_touch_native_code_import_the_bridge():
    users = {module for module, imported in OALLAMA.items() if any(inside(name, ["ggml_bridge"]) for name in imported)}
    assert {m for m in users if not inside(m, TOUCH_NATIVE) and m not in TOUCH_NATIVE_TOO} == set()


def test_the_bridge_knows_nothing_of_oallama():
    assert [module for module, imported in BRIDGE.items() if any(inside(name, ["oallama"]) for name in imported)] == []


def test_only_rooms_that_touch_native_code_import_llama_cpp():
    users = {module for module, imported in OALLAMA.items() if any(inside(name, ["llama_cpp"]) for name in imported)}
    assert {module for module in users if not inside(module, TOUCH_NATIVE)} == set()


def test_planning_cost_and_reports_are_pure():
    wrong = [
        f"{module} imports {name}"
        for module, imported in OALLAMA.items()
        if inside(module, PURE)
        for name in imported
        if name.split(".")[0] in IMPURE_MODULES
    ]
    assert wrong == []


def test_the_guard_sees_imports_inside_functions_and_not_those_for_type_checkers(tmp_path):
    source = tmp_path / "m.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def f():\n    from c.d import e\n"
    )
    assert set(imports(source)) == {"typing", "typing.TYPE_CHECKING", "b", "c.d", "c.d.e"}


@pytest.mark.parametrize("module", ["oallama", "oallama.cli.main", "oallama.core.types", "ggml_bridge"])
def test_importing_costs_nothing_heavy(module):
    heavy = [
        "numpy",
        "llama_cpp",
        "jinja2",
        "gguf",
        "cffi",
        "psutil",
        "tqdm",
        "torch",
        "huggingface_hub",
        "prompt_toolkit",
    ]
    code = f"import sys, {module}; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_no_test_imports_another() -> None:
    """What several of them need is in a file beside them."""
    tests = Path(__file__).parents[1]
    found = re.compile(r"^(?:from|import) (?:\w+\.)?(test_\w+)", re.MULTILINE)
    for path in tests.rglob("*.py"):
        assert {*found.findall(path.read_text(encoding="utf-8"))} <= {path.stem}, path
