"""Chooses the assembler (ptxas) of kernels for NVIDIA GPUs.

XLA has the assembler that was installed with JAX for its own kernels. For those of jax-triton, and for Mosaic GPU
kernels, it takes the first one in PATH (jax 0.10.2 and 0.11.2). That of a CUDA toolkit that is installed beside JAX may
be too old for Triton's PTX, or one that JAX's own Mosaic GPU kernels refuse because it miscompiles them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from jax._src.lib import cuda_path


def of_triton() -> Path | None:
    """The assembler in Triton's package, CUDA 12.9's; None where there is none."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return path if path.exists() else None


def prefer() -> None:
    """Puts the assembler that came with JAX, or else Triton's, in front of PATH."""
    of_jax = Path(cuda_path) / "bin" / "ptxas" if cuda_path else None
    chosen = of_jax if of_jax and of_jax.exists() else of_triton()
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if chosen is not None and path[0] != str(chosen.parent):
        os.environ["PATH"] = os.pathsep.join([str(chosen.parent), *path])
