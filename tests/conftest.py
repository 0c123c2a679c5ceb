"""Fixtures for all tests. JAX runs on eight fake CPU devices, in float32, with a compilation cache between runs."""

import gc
import os
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests spend more time compiling than running. So LLVM's optimizations are turned off, and loops are emitted by XLA's
# older emitters, which take half as long to compile. They are gone in 0.11, which ends a process that sets the flag.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
MOST_MAPS = 20_000  # of the process's memory, at the end of a module
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
os.environ.setdefault("JAXSERVE_CACHE", str(CACHE))
os.environ["JAXSERVE_NO_PROGRAM_CACHE"] = "1"  # tests replace parts of programs, which keys do not tell

# Folders of the checkout that are packages of jaxserve. Imported by these names they would exist a second time, and in
# an installation not at all.
for name in ("server", "checkpoints", "pallas_kernels"):
    sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxserve.devices.compile_cache import enable_compile_cache  # noqa: E402

gc.set_threshold(50_000, 20, 50)  # tracing makes many objects and no garbage that has to be found early
enable_compile_cache()
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--most-cases", type=int, default=None, metavar="N", help="run at most N cases of each test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Of what -m has chosen, --most-cases keeps at most N cases of each test, evenly spread over its parameters. Of a
    test that is marked with `compiles` it keeps the first, of one that is marked with `quick` all."""
    most = config.getoption("most_cases")
    if most is None:
        return
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in tests.values():
        count = 1 if cases[0].get_closest_marker("compiles") else min(most, len(cases))
        count = len(cases) if cases[0].get_closest_marker("quick") else count
        kept.update(cases[i * len(cases) // count] for i in range(count))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True, scope="module")
def _free_executables():
    """Frees executables at a module's end if there are many. Each one of XLA's CPU backend has tens of memory maps, and
    a process that reaches the kernel's limit of 65,530 maps dies of a segmentation fault."""
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """A function that builds a case of `tiny_models` once and returns its folder."""
    import tiny_models

    built: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in built:
            built[case] = tiny_models.build(case, tmp_path_factory.mktemp(case))
            vocab = tiny_models.CASES[case].text["vocab_size"]
            tiny_models.build_tokenizer(built[case], vocab)
        return built[case]

    return folder


@pytest.fixture(scope="session")
def deep_folders(tmp_path_factory):
    """A function that builds a case of `tiny_models` with so many layers once and returns its folder."""
    import tiny_models

    built: dict[str, Path] = {}

    def folder(case: str, layers: int) -> Path:
        name = case if layers == tiny_models.CASES[case].config["num_hidden_layers"] else f"{case}_of_{layers}"
        if name not in built:
            own = tiny_models.CASES[case]
            deep = replace(own, config=own.config | {"num_hidden_layers": layers})
            with mock.patch.dict(tiny_models.CASES, {name: deep}):
                built[name] = tiny_models.build(name, tmp_path_factory.mktemp(name))
            tiny_models.build_tokenizer(built[name], own.config["vocab_size"])
        return built[name]

    return folder
