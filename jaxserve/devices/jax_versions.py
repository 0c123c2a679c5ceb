"""Differences between the supported versions of JAX."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax.stages import Compiled

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])


# Bits of the narrowest numbers that programs for TPUs can copy from the host's memory. With narrower ones the libtpu of
# JAX 0.10 (0.0.42) gives both ends of a copy different tiles, and refuses the program; that of 0.11 (0.0.48) does not.
NARROWEST_FROM_HOST = 16 if JAX < (0, 11) else 4


def with_int4_arguments(compiled: Compiled) -> Compiled:
    """The same function, callable with int4 arrays.

    On CPU, JAX 0.10 describes the layout of an int4 array without its packing, but a compiled function's layout with
    it, and rejects the argument because they differ. The bytes are the same, so this removes the check.
    """
    if JAX < (0, 11):
        executable: Any = compiled._executable
        layouts = executable._xla_in_layouts
        executable._xla_in_layouts = [x if x is None or not x.sub_byte_element_size_in_bits else None for x in layouts]
    return compiled


def has_started() -> bool:
    """Whether JAX has started its devices, whose settings it reads no more."""
    return xla_bridge.backends_are_initialized()


def write_compile_cache_here() -> None:
    """Lets this process write to the persistent compilation cache. JAX (0.10 to 0.12) has only process 0 write, as if
    all hosts had one folder. With folders of their own, or on CPU, where entries differ by host, the others would
    compile at each start. Call it when the devices are known, because these follow the same number."""
    distributed.global_state.process_id = 0
