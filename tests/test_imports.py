"""The rooms of the house import one way: server -> jaxserve -> {checkpoints, pallas_kernels}."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "server": {"server", "jaxserve", "checkpoints", "pallas_kernels"},
    "jaxserve": {"jaxserve", "checkpoints", "pallas_kernels"},
    "checkpoints": {"checkpoints"},
    "pallas_kernels": {"pallas_kernels"},
}
LEAVES = ("checkpoints", "pallas_kernels")
SHARED_TYPES = "pallas_kernels.types"  # what `checkpoints` may know of the kernels
COMPOSITION_ROOT = Path("jaxserve/cli.py")  # may import the server, inside the functions that start it


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """Every module that is imported, by its full name, and whether that happens when the file itself is imported."""

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
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside)

    return visit(ast.parse(source), True)


def files(room: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py"))


def why_not(path: Path, module: str, at_import: bool) -> str | None:
    """What is wrong with a file importing a module, if anything."""
    room, target = path.parts[0], module.split(".")[0]
    if target in ("tests", "benchmarks"):
        return "belongs to the workshop, not to the house"
    if target not in ALLOWED or target in ALLOWED[room]:
        return None
    if room == "checkpoints" and (module == SHARED_TYPES or module.startswith(SHARED_TYPES + ".")):
        return None
    if path == COMPOSITION_ROOT and target == "server":
        return "must be imported inside the function that needs it" if at_import else None
    return f"{room} may import only {', '.join(sorted(ALLOWED[room]))}"


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room):
    assert files(room)
    wrong = [
        f"{path} imports {module}: {reason}"
        for path in files(room)
        for module, at_import in imports((ROOT / path).read_text(), ".".join(path.parent.parts))
        if (reason := why_not(path, module, at_import))
    ]
    assert not wrong, "\n".join(wrong)


def test_files_have_no_cycle_of_imports():
    """Among imports that run when a file is imported, those for type checking alone excepted."""
    modules = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for room in ALLOWED for path in files(room)
    }

    def needs(name: str) -> set[str]:
        path = modules[name]
        source = (ROOT / path).read_text()
        found = set()
        for module, at_import in imports(source, ".".join(path.parent.parts)):
            target = module if module in modules else module.rpartition(".")[0]
            if at_import and target in modules and target != name:
                found.add(target)
        return found

    graph = {name: needs(name) for name in modules}
    while graph:
        leaves = {name for name, needed in graph.items() if not needed & graph.keys()}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in leaves}


def test_the_rules_bite():
    """What this file forbids, it finds."""
    kernels, leaf, cli = Path("pallas_kernels/x.py"), Path("checkpoints/x.py"), COMPOSITION_ROOT
    assert why_not(kernels, "checkpoints.load", True)
    assert why_not(kernels, "jaxserve", False)
    assert why_not(leaf, "pallas_kernels.kv_write", True)
    assert why_not(leaf, "pallas_kernels.types_of_something", True)
    assert why_not(leaf, "pallas_kernels.types.QuantArray", True) is None
    assert why_not(leaf, "jaxserve.config", False)
    assert why_not(Path("jaxserve/llm.py"), "server.run", False)
    assert why_not(cli, "server.run", True)
    assert why_not(cli, "server.run", False) is None
    assert why_not(Path("server/app.py"), "jaxserve.engine", True) is None
    source = "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\nif True:\n    import i\n"
    found = [("a.b", True), ("p.q.c", True), ("p.d.e", True), ("g.h", False), ("i", True)]
    assert sorted(imports(source, "p.q")) == sorted(found)
