"""The rooms' import direction, read from the sources: arrows point right and never back.

cli -> serve -> tune -> bench -> placer -> tuned -> {run, report} -> planner -> plan -> {cost, stores} ->
{profile, model, setup} -> device -> core, and ggml_bridge, which knows nothing of oallama, is for the rooms that touch
native code.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    ("cli",),
    ("serve",),  # runs llama-server with a plan that the commands made
    ("tune",),  # measures plans against stock before one is used
    ("bench",),  # its arms are what users run: plans of the placer, in engines
    ("placer",),  # the front door for Python
    ("tuned",),  # what was measured, and which plan follows from it
    ("run", "report"),
    ("planner",),
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
    "oallama.run.die_with_parent": "asks Linux to end llama-server with us, as the bridge's own children do",
    "oallama.serve.placement_server": "begins a thread as the bridge does",
    "oallama.run.program": "llama-server must be of the ggml that the plug-in was made for",
    "oallama.serve.supervisor": "names signals as the bridge does",
}
PURE = (
    *("oallama.cost", "oallama.planner", "oallama.report", "oallama.plan.patterns", "oallama.plan.split"),
    *(f"oallama.bench.{part}" for part in ("records", "rows", "schedule", "stats", "stock", "verify")),
    *("oallama.tuned.classes", "oallama.tuned.result", "oallama.core.options", "oallama.profile.fit"),
)
IMPURE = {"os", "time", "random", "logging", "subprocess", "socket", "tempfile", "shutil", "threading"}


def imports(path):
    """Every module that a file imports at run time, also inside functions; `if TYPE_CHECKING` blocks are left out."""
    found, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        nodes.extend(node.orelse if for_types else ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def sources(package, root=ROOT):
    """What each module imports, by its name."""
    paths = sorted((root / package).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: imports(path) for name, path in zip(names, paths, strict=True)}


OALLAMA = sources("oallama")
CONTRIB = sources("oallama_contrib", ROOT / "contrib")
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
    """But for oallama itself and __main__, which open the doors."""
    assert [
        f"{module} imports {name}"
        for module, imported in OALLAMA.items()
        for name in imported
        if {room(module), room(name)} <= LEVEL.keys() and room(module) != room(name)
        if LEVEL[room(name)] <= LEVEL[room(module)]
    ] == []


@pytest.mark.parametrize("modules", [OALLAMA, CONTRIB, BRIDGE], ids=["oallama", "oallama_contrib", "ggml_bridge"])
def test_no_modules_import_each_other(modules):
    TopologicalSorter({module: modules.keys() & imported for module, imported in modules.items()}).prepare()


def users(package, of=OALLAMA):
    """Modules that import something of this package."""
    return {module for module, imported in of.items() if any(inside(name, [package]) for name in imported)}


def test_only_rooms_that_touch_native_code_import_the_bridge_and_llama_cpp():
    assert {m for m in users("ggml_bridge") if not inside(m, TOUCH_NATIVE)} <= TOUCH_NATIVE_TOO.keys()
    assert {m for m in users("llama_cpp") if not inside(m, TOUCH_NATIVE)} == set()
    assert users("oallama", BRIDGE) == set(), "the bridge knows nothing of oallama"
    assert users("oallama_contrib", OALLAMA | BRIDGE) == set(), "it is found by entry points"


def test_planning_cost_and_reports_are_pure():
    pure = {module: imported for module, imported in OALLAMA.items() if inside(module, PURE)}
    assert [(m, name) for m, imported in pure.items() for name in imported if name.split(".")[0] in IMPURE] == []


@pytest.mark.parametrize("module", ["oallama", "oallama.cli.main", "oallama.core.types", "ggml_bridge"])
def test_importing_costs_nothing_heavy(module):
    heavy = "numpy llama_cpp jinja2 gguf cffi psutil tqdm torch huggingface_hub prompt_toolkit"
    code = f"import sys, {module}; print(*[name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_no_test_imports_another() -> None:
    """What several of them need is in a file beside them."""
    tests = Path(__file__).parents[1]
    found = re.compile(r"^(?:from|import) (?:\w+\.)?(test_\w+)", re.MULTILINE)
    for path in tests.rglob("*.py"):
        assert {*found.findall(path.read_text(encoding="utf-8"))} <= {path.stem}, path
