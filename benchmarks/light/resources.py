"""Stage `resources`: registers, spills and shared memory of the compiled kernels, and how many programs fit a
multiprocessor.

The assembler reports them. Mosaic GPU prints its report with MOSAIC_GPU_DUMP_PTXAS, and from JAX 0.11 on the shared
memory of a launch with MOSAIC_GPU_DUMP_RESOURCES. XLA dumps other kernels, Triton's among them, as PTX, which `ptxas
-v` assembles if it is installed. These settings (`ENVIRONMENT`) are read once, when JAX is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
HOPPER = {"registers": 65536, "shared": 228 << 10, "reserved": 1 << 10, "threads": 2048}  # of a multiprocessor

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


def parse(text: str) -> list[dict[str, Any]]:
    """Reads the kernels in reports of `ptxas -v` and Mosaic: name, target, registers, stack, spills, and shared memory
    of the assembler (static) and of the launch (dynamic), in bytes.

    Mosaic reports dynamic shared memory while it lowers: before all kernels, in the order of their assembly.
    """
    found: list[dict[str, Any]] = []
    dynamic = [int(x) for x in SHARED.findall(text)]
    for line in text.splitlines():
        if match := ENTRY.search(line):
            found.append({"kernel": match[1], "target": match[2]})
        elif found and (match := SPILLS.search(line)):
            stack, stores, loads = map(int, match.groups())
            found[-1] |= {"stack": stack, "spill_stores": stores, "spill_loads": loads}
        elif found and (match := USED.search(line)):
            found[-1] |= {"registers": int(match[1]), "static_shared": int(match[2] or 0)}
    mosaic = [one for one in found if "mosaic_gpu" in one["kernel"]]
    if len(dynamic) == len(mosaic):
        for one, bytes_ in zip(mosaic, dynamic, strict=True):
            one["dynamic_shared"] = bytes_
    return found


def programs(registers: int, shared: int, threads: int) -> int:
    """How many programs of `threads` threads fit a multiprocessor of Hopper at once. A thread's registers are allocated
    in multiples of eight."""
    by_registers = HOPPER["registers"] // (-(-registers // 8) * 8 * threads)
    by_shared = HOPPER["shared"] // (shared + HOPPER["reserved"])
    return min(by_registers, by_shared, HOPPER["threads"] // threads)


def assemble(folder: Path) -> Iterator[str]:
    """Yields the output of `ptxas -v` for each PTX file in a folder."""
    ptxas = shutil.which("ptxas") or next((str(x) for x in _packaged()), None)
    if ptxas is None:
        return
    for file in sorted(folder.glob("*.ptx")):
        target = re.search(r"^\.target\s+(\w+)", file.read_text(errors="replace"), re.MULTILINE)
        command = [ptxas, "-v", f"-arch={target[1] if target else 'sm_90a'}", "-o", os.devnull, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        yield done.stdout + done.stderr


def _packaged() -> Iterator[Path]:
    for folder in map(Path, sys.path):
        yield from folder.glob("nvidia/*/bin/ptxas")


@contextmanager
def captured(file: Path) -> Iterator[None]:
    """Redirects this process's standard output and error, also of C++ code, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with file.open("wb") as target:
        try:
            for number in (1, 2):
                os.dup2(target.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in zip((1, 2), saved, strict=True):
                os.dup2(before, number)
                os.close(before)


def run(record: Any, *, rehearse: bool) -> None:
    import jax

    from jaxserve.bench.kernel_shapes import cases
    from jaxserve.pallas_kernels.registry import Device, explain

    device = Device.of(jax.devices()[0])
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program prints nothing
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    wanted = _telling(list(cases("small" if rehearse else "full", dtype, 16)))
    for case in wanted:
        for backend, reason in explain(case.operation, device, case.problem).items():
            key = f"{case.part} {case.name}, {backend}"
            if reason is None and backend != "xla" and not record.has(key):
                with record.row(key) as row:
                    row |= _compile(case, backend)


def _telling(cases: list[Any]) -> list[Any]:
    """Selects the first case of each operation and each form of cache or weight, with few rows and with many."""
    chosen: dict[Any, Any] = {}
    for case in cases:
        kind = getattr(case, "kv_dtype", None) or getattr(case, "codes", None)
        many = getattr(case, "tokens", 0) > 64
        chosen.setdefault((case.part, kind, many, getattr(case, "head_dim", 0)), case)
    return list(chosen.values())


def _compile(case: Any, backend: str) -> dict[str, Any]:
    import jax

    from jaxserve.pallas_kernels.registry import load

    call = case.call(load(case.operation, backend))
    shapes = jax.eval_shape(partial(case.arguments, 0)) if jax.default_backend() != "cpu" else case.arguments(0)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        with captured(said):
            compiled = (
                jax.jit(lambda state, *arguments: call(state, *arguments))
                .lower(case.state() if case.part == "write_kv" else (), *shapes)
                .compile(compiler_options=None if jax.default_backend() == "cpu" else {"xla_dump_to": folder})
            )
        kernels = parse("\n".join([said.read_text(errors="replace"), *assemble(Path(folder))]))
    for kernel in kernels:
        if "dynamic_shared" in kernel and "registers" in kernel:
            # Warpgroups of 128 threads: in attention one that fetches and one or two that compute, in products one.
            threads = 256 if "decode" in kernel["kernel"] else 384 if "prompts" in kernel["kernel"] else 128
            shared = kernel["dynamic_shared"] + kernel["static_shared"]
            kernel["programs"] = programs(kernel["registers"], shared, threads)
    memory: Any = compiled.memory_analysis()
    return {"kernels": kernels, "temporaries": memory.temp_size_in_bytes, "code": memory.generated_code_size_in_bytes}
