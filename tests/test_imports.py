"""The tree agrees with ARCHITECTURE.md; imports run one way between the four packages and between their folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "server", "checkpoints", "pallas_kernels")
ALLOWED = {  # the other packages that a package may import
    "server": {"jaxserve", "checkpoints", "pallas_kernels"},
    "jaxserve": {"checkpoints", "pallas_kernels"},
    "checkpoints": set[str](),
    "pallas_kernels": set[str](),
}
SHARED_TYPES = "jaxserve.pallas_kernels.types"  # the only module of the kernels that `checkpoints` may import
COMPOSITION_ROOT = "jaxserve.commands.cli"  # may import the server, inside the functions that start it


def files(package: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """A file's name as a module: `server/http/sse.py` is imported as `jaxserve.server.http.sse`."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if path.parts[0] == "jaxserve" else f"jaxserve.{name}"


MODULES = {name_of(path): path for package in PACKAGES for path in files(package)}


def package_of(module: str) -> str | None:
    """Which of the four packages a module belongs to; None: another project's."""
    first, _, rest = module.partition(".")
    if first != "jaxserve":
        return None
    inner = rest.partition(".")[0]
    return inner if inner in PACKAGES else "jaxserve"


def folder_of(module: str) -> str:
    """The folder directly below its package that a module lies in, or the module itself where it lies in none."""
    path = MODULES[module]
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else str(path)


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """(full name, at import) of every imported module; False if the import is inside a function, or for type checkers
    alone."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from package import name` may import a module of that name.
            yield from ((f"{module}.{alias.name}", at_import) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = inside or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside)

    return visit(ast.parse(source), True)


def imports_of(name: str) -> Iterator[tuple[str, bool]]:
    path = MODULES[name]
    return imports((ROOT / path).read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0])


def needs(name: str) -> set[str]:
    """Our own modules that are imported when a module is."""
    found = set()
    for module, at_import in imports_of(name):
        target = module if module in MODULES else module.rpartition(".")[0]
        if at_import and target in MODULES and target != name:
            found.add(target)
    return found


def why_not(name: str, module: str, at_import: bool) -> str | None:
    """Why one of our modules may not import another; None if it may."""
    mine = package_of(name)
    target = package_of(module)
    first = module.partition(".")[0]
    if first in ("tests", "benchmarks"):
        return "belongs to the workshop, not to the house"
    if first in PACKAGES and first != "jaxserve":
        return f"is called jaxserve.{module}: nothing but jaxserve stands at the top of an installation"
    if mine is None or target is None or target == mine or target in ALLOWED[mine]:
        return None
    if mine == "checkpoints" and (module == SHARED_TYPES or module.startswith(SHARED_TYPES + ".")):
        return None
    if name == COMPOSITION_ROOT and target == "server":
        return "must be imported inside the function that needs it" if at_import else None
    return f"{mine} may import only {', '.join(sorted(ALLOWED[mine])) or 'itself'}"


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes from which a circle can be reached."""
    graph = {name: needed & graph.keys() for name, needed in graph.items()}
    while graph:
        ends = {name for name, needed in graph.items() if not needed & graph.keys()}
        if not ends:
            break
        graph = {name: needed for name, needed in graph.items() if name not in ends}
    return set(graph)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package):
    mine = [name for name in MODULES if package_of(name) == package]
    assert mine
    wrong = [
        f"{MODULES[name]} imports {module}: {reason}"
        for name in mine
        for module, at_import in imports_of(name)
        if (reason := why_not(name, module, at_import))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_modules_have_no_circle_of_imports():
    """Considers only imports that run when a file is imported."""
    assert not circles({name: needs(name) for name in MODULES})


@pytest.mark.parametrize("package", ["jaxserve", "server"])
def test_folders_have_no_circle_of_imports(package):
    """Folders are layers: if one imports another, even inside a function, the other must not lead back to it."""
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        if package_of(name) != package:
            continue
        here = graph.setdefault(folder_of(name), set())
        for module, _ in imports_of(name):
            target = module if module in MODULES else module.rpartition(".")[0]
            if target in MODULES and package_of(target) == package and folder_of(target) != folder_of(name):
                here.add(folder_of(target))
    graph.pop("jaxserve/__init__.py", None)  # imports the public names when they are used
    assert not circles(graph)


def test_scheduling_needs_no_jax():
    """The scheduler plans with NumPy alone, so that it can be tested, and run, where there is no device."""
    modules = sorted(name for name in MODULES if name.startswith("jaxserve.scheduling."))
    assert len(modules) > 5
    code = f"import {', '.join(modules)}, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_the_command_line_imports_ray():
    """Replicas on a cluster are around the engine: nothing of the engine knows of them."""
    importers = {
        folder_of(name)
        for name in MODULES
        for module, _ in imports_of(name)
        if f"{module}.".startswith("jaxserve.ray.")
    }
    assert importers == {"jaxserve/ray", "jaxserve/commands"}


def test_axes_of_the_mesh_have_names():
    """How many parts a weight has is asked of its axis (`devices.mesh.num_shards`): not all devices need to share
    it."""
    asked = [str(path) for path in MODULES.values() if "mesh.size" in (ROOT / path).read_text()]
    assert asked == ["jaxserve/devices/mesh.py"]


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone, whatever their folder."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_packages_say_what_lives_there():
    """Each package's `__init__` has a docstring, and documents name only files that exist."""
    inits = [ROOT / path for path in MODULES.values() if path.name == "__init__.py"]
    assert len(inits) > 30
    assert [str(path) for path in inits if not ast.get_docstring(ast.parse(path.read_text()))] == []
    names = {path.name for path in MODULES.values()} | {path.name for path in ROOT.glob("[tb]*/**/*.py")}
    for document in ("ARCHITECTURE.md", "docs/internals.md", "CONTRIBUTING.md"):
        mentioned = re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", (ROOT / document).read_text())
        assert mentioned, document
        assert [name for name in mentioned if name not in names] == [], document


def test_the_core_can_be_read():
    """The files that ARCHITECTURE.md names as the core: at most 15, and 4,000 lines, up to where it says."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## The core") : text.index("## Seams")]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (?:\"(\w+)\")? ?\|", table, re.MULTILINE)
    assert 10 <= len(rows) <= 15
    lines = 0
    for file, end in rows:
        source = (ROOT / file).read_text()
        lines += (source[: source.index(f"# {end}")] if end else source).count("\n")
    assert lines <= 4000, lines


def test_the_rules_bite():
    """The checks of this file find violations."""
    kernels = "jaxserve.pallas_kernels.x"
    leaf = "jaxserve.checkpoints.x"
    cli = COMPOSITION_ROOT
    assert why_not(kernels, "jaxserve.checkpoints.load", True)
    assert why_not(kernels, "jaxserve.config", False)
    assert why_not(leaf, "jaxserve.pallas_kernels.kv_write", True)
    assert why_not(leaf, "pallas_kernels.types", True)
    assert why_not(leaf, "jaxserve.pallas_kernels.types.QuantArray", True) is None
    assert why_not(leaf, "jaxserve.config", False)
    assert why_not("jaxserve.llm", "jaxserve.server.process.run", False)
    assert why_not(cli, "jaxserve.server.process.run", True)
    assert why_not(cli, "jaxserve.server.process.run", False) is None
    assert why_not("jaxserve.server.process.app", "jaxserve.engine.engine", True) is None
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert not circles({"a": {"b"}, "b": {"c"}, "c": set()})
    source = "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\nif True:\n    import i\n"
    found = [("a.b", True), ("p.q.c", True), ("p.d.e", True), ("g.h", False), ("i", True)]
    assert sorted(imports(source, "p.q")) == sorted(found)
