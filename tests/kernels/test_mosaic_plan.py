"""Sizes of Hopper's kernel for quantized weights: a multiprocessor has room for them, and they do all of the work."""

import pytest

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.quant_matmul.mosaic_plan import cycles, plan

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (264, 640), (1376, 11008)]
FORMATS = [(4, 128), (4, 32), (8, 0)]  # bits, group
TOKENS = [1, 8, 9, 16, 24, 32, 40, 56, 64, 65, 96, 300]


def chosen(tokens, shape, bits, group, **sizes):
    with tuning.trial("matmul", "mosaic_gpu", sizes):
        return plan(tokens, shape, (1, group or shape[1]), bits, shuffled=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_there_is_room(shape, bits, group):
    for tokens in TOKENS:
        sizes = chosen(tokens, shape, bits, group)
        assert sizes.outputs <= shape[0]
        assert sizes.n % 8 == 0
        assert 1 <= sizes.stages <= shape[1] // sizes.k // sizes.splits, "each slot is filled before it is refilled"
        slots = sizes.stages * (sizes.outputs * sizes.k * bits // 8 + sizes.n * sizes.k * 2)
        assert slots <= 226 << 10
        if sizes.warpgroups > 1:
            fetching, computing = sizes.registers
            assert 128 * (fetching + sizes.warpgroups * computing) <= 64 << 10
            assert fetching % 8 == computing % 8 == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_splits_share_all_inputs(shape, bits, group):
    for splits in (1, 2, 3, 5, 7):
        sizes = chosen(24, shape, bits, group, splits=splits)
        end = 0
        for split in range(sizes.splits):
            start, steps = (int(number) for number in sizes.steps_of(split, shape[1]))
            assert start == end
            assert 1 <= steps <= sizes.steps
            end = start + steps
        assert end == shape[1] // sizes.k


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_tiles_of_tokens_are_as_full_as_others(bits, group):
    for tokens in TOKENS:
        n = chosen(tokens, (4096, 4096), bits, group).n
        columns = -(-tokens // n)
        assert columns * n - tokens < 8 * columns


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_x_is_shared(shape):
    """Of int4's codes, x takes no more than once their bytes through the L2 cache; alone, twice at 64 tokens."""
    for tokens in (16, 32, 48, 64):
        sizes = chosen(tokens, shape, 4, 128)
        assert 2 * sizes.n <= sizes.outputs / 2
        alone = chosen(tokens, shape, 4, 128, warpgroups=1)
        assert alone.warpgroups == 1
        assert cycles(sizes, shape, 1, 4) <= cycles(alone, shape, 1, 4)


def test_one_warpgroup_alone():
    assert chosen(8, (28672, 4096), 4, 128).warpgroups == 1, "x is a quarter of the codes"
    assert chosen(128, (28672, 4096), 4, 128).warpgroups == 1, "sums of more tokens take all registers"
    assert chosen(64, (192, 4096), 4, 128).warpgroups == 1
    assert chosen(64, (28672, 4096), 4, 128, warpgroups=3).warpgroups == 2


def test_programs_in_pairs():
    """Pairs need an even number of whole tiles of outputs, and tokens that divide into two multiples of eight."""
    for shape in ((28672, 4096), (4096, 14336), (6144, 4096)):
        for tokens in (16, 32, 48, 64):
            sizes = chosen(tokens, shape, 4, 128)
            assert (sizes.cluster, shape[0] % (2 * sizes.outputs)) == (2, 0)
            assert cycles(sizes, shape, 1, 4) <= cycles(sizes._replace(cluster=1), shape, 1, 4)
    assert chosen(24, (28672, 4096), 4, 128).cluster == 1
    assert chosen(64, (3 * 256, 4096), 4, 128, warpgroups=2).cluster == 1
    assert chosen(8, (28672, 4096), 4, 128).cluster == 1
