"""The shapes that kernels are compared and tuned on: small ones for CPU and tests, Llama 3's for accelerators."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.bench.kernel_cases import AttentionCase, Case, MatmulCase, WriteCase
from jaxserve.bench.recurrent_cases import SHAPES, RecurrentCase

OPERATIONS = ("decode", "prompts", "mixed", "write_kv", "matmul", "recurrent")

# Name: codes, rows and inputs that share a scale (0: all), whether there are zero points.
FORMATS: dict[str, tuple[str, tuple[int, int], bool]] = {
    "int8 channel": ("int8", (1, 0), False),
    "int8 g128": ("int8", (1, 128), False),
    "int4 g32": ("int4", (1, 32), False),
    "int4 g64": ("int4", (1, 64), False),
    "int4 g128": ("int4", (1, 128), False),
    "int4 g128 zero": ("int4", (1, 128), True),
    "fp8 tensor": ("fp8", (0, 0), False),
    "fp8 channel": ("fp8", (1, 0), False),
    "fp8 128x128": ("fp8", (128, 128), False),
}
# Name: outputs, inputs.
WEIGHTS = {
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate-up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B gate-up": (57344, 8192),
    "70B down": (8192, 28672),
}


def cases(sizes: str, dtype: str, page_size: int) -> Iterator[Case]:
    """All cases of `sizes` (small or full), the most important ones of each operation first.

    Args:
      dtype: dtype of the activations.
      page_size: tokens per page.
    """
    yield from (small if sizes == "small" else full)(dtype, page_size)


def small(dtype: str, page_size: int) -> Iterator[Case]:
    def attention(name: str, *rows: tuple[int, int], kv_dtype: str | None = None, group: int = 2) -> AttentionCase:
        return AttentionCase(name, dtype, rows, 2, group, 64, page_size, kv_dtype)

    yield attention("4 x 300", *[(1, 300)] * 4)
    yield attention("1 x 1000, group 7", (1, 1000), group=7)
    yield attention("4 x 300, int8 cache", *[(1, 300)] * 4, kv_dtype="int8")
    yield attention("1 x 200", (200, 200))
    yield attention("3 decodes, 2 chunks", (1, 40), (1, 200), (1, 100), (64, 150), (30, 30))
    yield WriteCase("64 tokens", dtype, 64, 2, 64, page_size)
    yield WriteCase("64 tokens, int8", dtype, 64, 2, 64, page_size, "int8")
    for name in ("int8 channel", "int4 g128", "fp8 128x128"):
        yield from (matmul(name, "512x256", (512, 256), tokens, dtype) for tokens in (1, 64))
    for kind, (sizes, _) in SHAPES.items():
        yield RecurrentCase(f"{kind}, 4 decodes", dtype, kind, sizes, (1,) * 4)
        yield RecurrentCase(f"{kind}, 100 tokens", dtype, kind, sizes, (100,))


def matmul(name: str, weight: str, shape: tuple[int, int], tokens: int, dtype: str) -> MatmulCase:
    codes, block, zero = FORMATS[name]
    return MatmulCase(f"{weight} {name}, {tokens} rows", dtype, codes, block, *shape, tokens, zero)


def full(dtype: str, page_size: int) -> Iterator[Case]:
    yield from decodes(dtype, page_size)
    yield from prompts(dtype, page_size)
    for kv_dtype, tokens in ((None, 64), (None, 2048), (None, 8192), ("int8", 2048), ("fp8", 2048)):
        name = f"{tokens} tokens" + (f", {kv_dtype}" if kv_dtype else "")
        yield WriteCase(name, dtype, tokens, page_size=page_size, kv_dtype=kv_dtype)
    for kind, (_, sizes) in SHAPES.items():
        for rows in (1, 32, 128):
            yield RecurrentCase(f"{kind}, {rows} decodes", dtype, kind, sizes, (1,) * rows)
        yield RecurrentCase(f"{kind}, 2048 tokens", dtype, kind, sizes, (2048,))
    big = "8B gate-up"
    for name in FORMATS:
        few = (1, 8, 16, 32, 64) if name == "int4 g128" else (1, 64)
        yield from (matmul(name, big, WEIGHTS[big], tokens, dtype) for tokens in (*few, 256, 4096))
    for name, tokens in (("int4 g128", 16), ("int4 g128", 1024), ("int8 channel", 16)):
        rest = (weight for weight in WEIGHTS if weight != big)
        yield from (matmul(name, weight, WEIGHTS[weight], tokens, dtype) for weight in rest)


def decodes(dtype: str, page_size: int) -> Iterator[AttentionCase]:
    for rows, cached, group, head_dim, kv_dtype in (
        *((64, 4096, 8, 128, None), (64, 4096, 4, 128, None), (64, 4096, 8, 128, "int8"), (64, 4096, 8, 128, "fp8")),
        *((1, 4096, 4, 128, None), (8, 4096, 4, 128, None), (64, 1024, 4, 128, None), (256, 1024, 4, 128, None)),
        *((256, 4096, 4, 128, None), (16, 32768, 4, 128, None), (1, 100_000, 4, 128, None)),
        *((64, 4096, 8, 64, None), (64, 1024, 4, 256, None)),
    ):
        name = f"{rows} x {cached}, {8 * group}:8 heads of {head_dim}" + (f", {kv_dtype} cache" if kv_dtype else "")
        yield AttentionCase(name, dtype, ((1, cached),) * rows, 8, group, head_dim, page_size, kv_dtype)
    yield AttentionCase("63 x 1024 and 1 x 100000", dtype, ((1, 100_000), *((1, 1024),) * 63), page_size=page_size)


def prompts(dtype: str, page_size: int) -> Iterator[AttentionCase]:
    for rows, tokens, group in ((1, 8192, 4), (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 8192, 8), (4, 2048, 4)):
        name = f"{rows} x {tokens}, {8 * group}:8 heads"
        yield AttentionCase(name, dtype, ((tokens, tokens),) * rows, group=group, page_size=page_size)
    yield AttentionCase("2048 after 14336", dtype, ((2048, 16384),), page_size=page_size)
    mixed = (*((1, 4096),) * 48, (1536, 8192), (512, 512))
    yield AttentionCase("48 x 4096, 1536 after 6656, 512", dtype, mixed, page_size=page_size)
