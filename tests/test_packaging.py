"""What is installed: one top-level package with every module and data file, found whatever the current folder holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

from jaxserve import entry

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
SOURCES = {  # package -> its folder
    "jaxserve": "jaxserve",
    "jaxserve.checkpoints": "checkpoints",
    "jaxserve.pallas_kernels": "pallas_kernels",
    "jaxserve.server": "server",
}
DATA = (
    "checkpoints/demo/*",
    "checkpoints/demo-draft/*",
    "checkpoints/demo-eagle3/*",
    "checkpoints/demo-vision/*",
    "pallas_kernels/*.cc",
    "pallas_kernels/*.h",
    "pallas_kernels/tuning/*.json",
    "server/grafana.json",
    "server/static/*",
)


def installed_path(path: Path) -> str:
    """Where a file of the checkout lies below site-packages: server/http/sse.py -> jaxserve/server/http/sse.py."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts if parts[0] == "jaxserve" else ("jaxserve", *parts))


def modules() -> set[str]:
    return {installed_path(path) for folder in SOURCES.values() for path in (ROOT / folder).rglob("*.py")}


def data_files() -> set[str]:
    return {installed_path(path) for pattern in DATA for path in ROOT.glob(pattern) if path.is_file()}


def test_links_make_one_package_of_four_folders():
    """A checkout imports, an editor finds and a wheel holds what the links in `jaxserve` lead to, and every folder with
    modules has an `__init__`."""
    for folder in set(SOURCES.values()) - {"jaxserve"}:
        assert (ROOT / "jaxserve" / folder).readlink() == Path("..") / folder
    folders = {path.rpartition("/")[0] for path in modules()}
    assert len(folders) > 30
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_other_file_is_package_data():
    """A new data file must match a pattern of pyproject.toml, and DATA here. Documents are not installed."""
    found = {
        installed_path(path)
        for folder in SOURCES.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found - data_files() == {"jaxserve/checkpoints/FORMATS.md"}
    listed = {
        f"{SOURCES[name]}/{pattern}" for name, patterns in SETTINGS["package-data"].items() for pattern in patterns
    }
    assert listed == set(DATA)
    for pattern in set(DATA) - {"pallas_kernels/tuning/*.json"}:  # no tuned table is bundled so far
        assert any(ROOT.glob(pattern)), f"nothing matches {pattern}"


def test_versions_agree():
    """The package, the Helm chart and the first heading of the changelog have one version."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "jaxserve" / "Chart.yaml").read_text())
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (chart["version"], chart["appVersion"], newest and newest[1]) == (ours, ours, ours)


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder whose modules are named like ours, and fail when they are imported."""
    for name in ("server.py", "batch.py", "checkpoints/__init__.py", "pallas_kernels/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError('imported the decoy {name}')\n")
    return tmp_path


PROGRAM = """
import sys
import jaxserve.server.process.run
import jaxserve.checkpoints.load
import jaxserve.pallas_kernels.registry
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "jaxserve"]
print(*sorted({module.__file__ for module in ours}), sep="\\n")
for name in ("server", "checkpoints", "pallas_kernels", "batch"):
    assert name not in sys.modules, name
"""


def run_among_decoys(folder: Path, path: Path, *arguments: str) -> str:
    """The output of Python with `folder` as the current one and `path` as the only entry of PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_among_decoys(folder: Path, path: Path) -> None:
    """Imports, `python -m jaxserve` and processes that `entry` starts find the modules below `path`."""
    files = run_among_decoys(folder, path, "-c", PROGRAM).split()
    assert len(files) > 20
    assert [file for file in files if not Path(file).is_relative_to(path)] == []
    assert run_among_decoys(folder, path, "-m", "jaxserve", "--version").startswith("jaxserve ")
    started = entry.command("jaxserve.server.process.run")[1:]
    started[1] = str(path / "jaxserve" / "entry.py")
    run_among_decoys(folder, path, *started)


@pytest.mark.slow
def test_checkout_among_decoys(decoys: Path):
    check_among_decoys(decoys, ROOT)


def can_build_here() -> bool:
    """Whether this environment holds the setuptools that pyproject.toml asks for."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the checkout: setuptools would add what an earlier build left in `build/`."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SOURCES.values():
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-w", str(folder)]
    if can_build_here():
        command.append("--no-build-isolation")  # else pip fetches setuptools
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("setuptools 77 is neither installed nor to be had from the package index")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_one_package_with_every_file(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert {name.partition("/")[0] for name in files} == {"jaxserve"}
    assert files == modules() | data_files()


@pytest.mark.slow
def test_wheel_among_decoys(wheel: Path, tmp_path: Path, decoys: Path):
    installed = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(installed)
    check_among_decoys(decoys, installed)
