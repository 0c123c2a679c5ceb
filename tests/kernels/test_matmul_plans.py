"""All kinds of plans that Hopper's kernel for quantized weights gets, interpreted against float64 NumPy.

A kind is what the kernel's code branches on. Its cases are found by planning the weights of published models with all
numbers of tokens, so that no plan is chosen that no case has.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_quant_matmul import CODES, check, make_weight, numbers

from jaxserve.bench.kernel_shapes import WEIGHTS
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.quant_matmul import fragments, mosaic_gpu, mosaic_plan

# Outputs and inputs of weights, whole and as one of several devices has them: of Llama 3, Mixtral, gpt-oss, experts of
# Qwen3, small models, an output head.
SHAPES = (
    *WEIGHTS.values(), (4096, 1792), (3584, 4096), (5760, 2880), (2880, 2880), (1536, 2048), (2048, 768), (768, 4096),
    (896, 4864), (1376, 11008), (16032, 4096), (64, 4096),
)  # fmt: skip
GROUPS = {"int4": (0, 32, 64, 128), "int8": (0, 32, 64, 128), "fp8": (0, 128)}  # 0: all inputs
TOKENS = (*range(1, 130), 200, 256, 300, 384, 512, 1000)


class Kind(NamedTuple):
    codes: str
    shuffled: bool
    group: int  # 0: all inputs
    m: int
    k: int
    warpgroups: int
    split: bool
    cluster: int

    def __str__(self) -> str:
        order = "-shuffled" if self.shuffled else ""
        group = f"g{self.group}" if self.group else "channel"
        split = "-split" if self.split else ""
        pair = "-pair" if self.cluster > 1 else ""
        return f"{self.codes}-{group}{order}-{self.m}x{self.k}x{self.warpgroups}{split}{pair}"


def kinds() -> Iterator[tuple[Kind, int]]:
    """Each kind of plan with the smallest and the largest tile of tokens that it occurs with."""
    tiles: dict[Kind, set[int]] = {}
    for codes, groups in GROUPS.items():
        for group, shape, shuffled in ((g, s, o) for g in groups for s in SHAPES for o in (False, True)):
            size = group or shape[1]
            bits = 4 if codes == "int4" else 8
            if shape[1] % size or (shuffled and (codes == "fp8" or fragments.why_not(shape[1], size, CODES[codes]))):
                continue
            if not shuffled and mosaic_plan.step_size(shape[1], size, bits, 128) is None:
                continue
            for tokens in TOKENS:
                p = mosaic_plan.plan(tokens, shape, (1, size), bits, shuffled)
                kind = Kind(codes, shuffled, group, p.m, p.k, p.warpgroups, p.splits > 1, p.cluster)
                tiles.setdefault(kind, set()).add(p.n)
    for kind, found in sorted(tiles.items()):
        for n in sorted({min(found), max(found)}):
            yield kind, n


def small(kind: Kind) -> tuple[int, int]:
    """Outputs and inputs of a small weight whose plan can be of this kind. Where no programs are paired, the last tile
    of outputs overlaps the one before."""
    outputs = kind.m * kind.warpgroups
    inputs = math.lcm(kind.k, kind.group or kind.k) * (5 if kind.split else 3)
    alone = outputs if kind.m == 64 else outputs + 8  # a tile of 64 is chosen only where there are fewer than 128
    return 2 * outputs if kind.cluster == 2 else alone, inputs


# Planning takes seconds, which a collection spends only where the cases can run.
INTERPRETER = hasattr(plgpu, "InterpretGPUParams")
CASES = list(kinds()) if INTERPRETER else []


def test_the_kinds_are_found():
    found = {kind for kind, _ in CASES or kinds()}
    assert len(found) > 90
    assert {kind.warpgroups for kind in found} == {1, 2, 3}
    assert {kind.m for kind in found} == {64, 128}


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETER, reason="JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2")
@pytest.mark.parametrize(("kind", "n"), CASES, ids=str)
def test_interpreted(kind, n, capfd):
    rng = np.random.default_rng(n)
    shape = small(kind)
    bits = 4 if kind.codes == "int4" else 8
    block = (128 if kind.codes == "fp8" and kind.group else 1, kind.group)
    tokens = n - 3  # the last tile of tokens has room
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = make_weight(rng, shape, kind.codes, block)
    given = fragments.shuffle(w) if kind.shuffled else w
    jax.clear_caches()
    sizes = {"m": kind.m, "n": n, "k": kind.k, "warpgroups": kind.warpgroups, "splits": 1 + kind.split, "stages": 2}
    with tuning.trial("matmul", "mosaic_gpu", sizes):
        p = mosaic_gpu.plan(tokens, shape, given.block, bits, kind.shuffled)
        chosen = Kind(kind.codes, kind.shuffled, kind.group, p.m, p.k, p.warpgroups, p.splits > 1, p.cluster)
        assert (chosen, p.n, p.stages) == (kind, n, 2)
        with interpreter(detect_races=True) as interpret:
            check(mosaic_gpu.quant_matmul(x, given, interpret=interpret), x, w)
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err
