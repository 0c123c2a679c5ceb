"""The CPU's kernels in a build that checks indices (-DJAXSERVE_CHECKED), with GCC's sanitizers: it finds every wrong
index that the host could give, and finds nothing where the engine plans steps at random."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.pallas_kernels import cpu_build

ROOT = Path(__file__).parents[2]
FLAGS = "-O0 -DJAXSERVE_CHECKED -fsanitize=address,undefined"
BUILD = """
from jaxserve.pallas_kernels import cpu_build
for name in cpu_build.NAMES:
    cpu_build._build(name, cpu_build._cache_folder())
"""
# Random prompts, batches, preemption, windows, adapters, speculation, and pages that come back from the host's memory.
ENGINE_TESTS = (
    "test_same_answer.py", "test_speculation_at_random.py", "test_windows.py", "test_adapters_in_batches.py",
    "test_kv_offload.py", "test_latent_prompts.py", "test_hybrid_models.py",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def file_of_compiler(name: str) -> str | None:
    """The path of a library that the compiler would link, if it has it."""
    compiler = cpu_build._compiler()
    if compiler is None:
        return None
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The environment of a process with this build, and the folder for what the sanitizers find."""
    if "JAXSERVE_CXXFLAGS" in os.environ:
        pytest.skip("is itself a process with other kernels")
    # Without the second, what a library throws is not known to the sanitizer.
    libraries = file_of_compiler("libasan.so"), file_of_compiler("libstdc++.so.6")
    if None in libraries:
        pytest.skip("the compiler has no address sanitizer")
    env = os.environ | {"JAXSERVE_CXXFLAGS": FLAGS}
    subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, env=env, check=True)
    findings = tmp_path_factory.mktemp("findings")
    options = f"log_path={findings / 'found'}"
    return env | {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "ASAN_OPTIONS": f"detect_leaks=0:{options}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{options}",
    }, findings  # fmt: skip


def run(checked, *command: str) -> subprocess.CompletedProcess:
    """Runs Python with this build. The sanitizers must find nothing."""
    env, findings = checked
    made = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert not [path.read_text()[:5000] for path in findings.iterdir()]
    return made


WRONG = """
import json
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from jaxserve.pallas_kernels import cpu, cpu_panels
from jaxserve.pallas_kernels.delta_net import cpu as delta
from jaxserve.pallas_kernels.latent_attention import cpu as latent
from jaxserve.pallas_kernels.lora import cpu as lora
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.mamba2 import cpu as mamba
from jaxserve.pallas_kernels.paged_attention import cpu as attention
from jaxserve.pallas_kernels.short_conv import cpu as short_conv
from jaxserve.pallas_kernels.operands import ConvInputs, DeltaHeads, Heads, MambaInputs, Partials
from jaxserve.pallas_kernels.quant_matmul import cpu as quant
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState, DeltaState, KVPages, LatentPages, MambaState, QuantArray

def ints(x):
    return jnp.asarray(x, jnp.int32)

def rows(tables=((1, 2), (3, 4)), starts=(0, 3, 4), lengths=(7, 1), first=1):
    return (ints(tables), ints(starts), ints(lengths), jnp.int32(0)), {"first_page": jnp.int32(first)}

def attend(**given):
    arguments, first = rows(**given)
    return attention.paged_attention(
        jnp.ones((4, 1, 2, 8)), KVPages(jnp.ones((6, 2, 1, 4, 8))), *arguments, scale=1.0, **first)

def attend_latents(**given):
    arguments, first = rows(**given)
    return latent.latent_attention(
        jnp.ones((4, 2, 12)), LatentPages(jnp.ones((6, 4, 12))), *arguments, scale=1.0, rank=8, **first)

def write(slots=(4, -1, 19), first=1):
    kv = jnp.ones((3, 1, 8))
    return attention.write_kv(KVPages(jnp.ones((6, 2, 1, 4, 8))), kv, kv, ints(slots), jnp.int32(first))

def write_latents(slots=(4, -1, 19), first=1):
    pages = LatentPages(jnp.ones((6, 4, 12)))
    return latent.write_latent(pages, jnp.ones((3, 12)), ints(slots), jnp.int32(first), rank=8)

def rotate(slots=(4, -1, 19), first=1, count=3):
    heads = Heads(Partials(jnp.ones((1, 3, 1, 4, 8)), None), jnp.ones((3, 4)), jnp.ones((3, 4)), None, None)
    ops = cpu.CpuOps(matmul=cpu.matmul, write_kv=attention.write_kv).counting(jnp.int32(count))
    pages = KVPages(jnp.ones((6, 2, 1, 4, 8)))
    return ops.rotate_and_write(heads, 1e-5, jnp.float32, pages, ints(slots), jnp.int32(first))

def adapt(places=(1, -1, 0), ranks=((2,), (4,))):
    stack = AdapterStack(jnp.ones((2, 4, 16)), jnp.ones((2, 4, 24)), ints(ranks), (24,))
    return lora.add_adapters(jnp.ones((3, 24)), jnp.ones((3, 16)), stack, ints(places))

QUANT = QuantArray(jnp.ones((2, 16, 32), jnp.int8), jnp.ones((2, 16, 1)), block=(1, 32))
PANEL = cpu_panels.pack_floats(np.ones((16, 32), np.float32), "float32")
PANELS = cpu_panels.stack([PANEL, PANEL], 2)

def by_expert(sizes=(2, 1)):
    return quant.grouped_quant_matmul(jnp.ones((4, 32)), QUANT, ints(sizes))

def panels_by_expert(sizes=(2, 1), table=None):
    w = PANELS if table is None else replace(PANELS, table=np.asarray(table, np.int32))
    return cpu_panels.grouped_matmul(jnp.ones((4, 32)), w, ints(sizes))

def multiply(count=2):
    return cpu.matmul(jnp.ones((3, 8)), jnp.ones((4, 8)), jnp.int32(count))

def states(source=(0, 4), target=(4, 0), starts=(0, 3, 4), first=1):
    begun = jnp.zeros(2, bool)
    rows = StateRows(ints(source), ints(target), begun, ints(starts), jnp.int32(0), ints([0, 0, 0, 1]))
    return rows, jnp.int32(first)

def convolve(**given):
    inputs = ConvInputs(jnp.ones((4, 9)), jnp.ones((9, 3)), None)
    return short_conv.short_conv(inputs, ConvState(jnp.ones((6, 2, 9))), *states(**given))

def delta_net(**given):
    heads = DeltaHeads(jnp.ones((4, 2, 30)), -jnp.ones((4, 2, 2)), jnp.ones((4, 2, 2)), jnp.ones((2, 30, 4)))
    state = DeltaState(jnp.ones((6, 2, 2, 8, 7)), jnp.ones((6, 2, 90)))
    return delta.delta_net(heads, state, *states(**given), key_dim=8, activation=jax.nn.silu)

def mamba2(group=(0, 0, 1), **given):
    of_heads = jnp.ones((4, 3)), -jnp.ones(3), jnp.ones(3), ints(group)
    conv = jnp.ones((21, 4)), jnp.ones(21), jnp.ones((20, 4)), None
    state = MambaState(jnp.ones((6, 3, 7, 5)), jnp.ones((6, 3, 21)), jnp.ones((6, 3, 20)))
    inputs = MambaInputs(jnp.ones((4, 21)), jnp.ones((4, 20)), *of_heads, *conv)
    return mamba.mamba2(inputs, state, *states(**given), groups=2, per_group=2, activation=jax.nn.silu)

ROWS = {
    "tokens": {"starts": (0, 3, 5)},
    "order": {"starts": (0, 3, 2)},
    "length": {"lengths": (2, 1)},
    "more than the table": {"lengths": (9, 1)},
    "page": {"tables": ((1, 5), (3, 4))},
    "page below 0": {"tables": ((1, 2), (-1, 4))},
    "first page": {"first": 6},
}
SLOTS = {"slot": {"slots": (4, -1, 20)}, "slot below -1": {"slots": (-2, 4, 5)}, "first page": {"first": -1}}
PLACES = {"place": {"places": (1, 2, 0)}, "rank": {"ranks": ((2,), (5,))}, "rank below 0": {"ranks": ((-1,), (4,))}}
SIZES = {"sizes": {"sizes": (2, 3)}, "size below 0": {"sizes": (-1, 3)}}
TABLES = {"begin": {"table": ((0, 0, 0), (33, 0, 0))}, "type": {"table": ((0, 0, 0), (32, 19, 0))}}
COUNTS = {"count": {"count": -1}}
STATES = {
    "tokens": {"starts": (0, 3, 5)}, "order": {"starts": (0, 3, 2)}, "source": {"source": (0, 5)},
    "target": {"target": (-1, 0)}, "first": {"first": 6},
}
KERNELS = {
    attend: ROWS, attend_latents: ROWS, write: SLOTS, write_latents: SLOTS, rotate: SLOTS | COUNTS, adapt: PLACES,
    by_expert: SIZES, panels_by_expert: SIZES | TABLES, multiply: COUNTS, convolve: STATES, delta_net: STATES,
    mamba2: STATES | {"group": {"group": (0, 1, 2)}},
}
found = {}
for kernel, wrongs in KERNELS.items():
    for name, given in {"right": {}, **wrongs}.items():
        try:
            jax.block_until_ready(kernel(**given))
            found[f"{kernel.__name__}, {name}"] = None
        except Exception as error:
            found[f"{kernel.__name__}, {name}"] = str(error)
print(json.dumps(found))
"""

ROWS = {
    "right": None,
    "tokens": "q_start[2] is 5, not in [3, 5)",
    "order": "q_start[2] is 2, not in [3, 5)",
    "length": "kv_len[0] is 2, not in [3, 9)",
    "more than the table": "kv_len[0] is 9, not in [3, 9)",
    "page": "block_tables[0, 1] is 5, not in [0, 5)",
    "page below 0": "block_tables[1, 0] is -1, not in [0, 5)",
    "first page": "first_page is 6, not in [0, 6)",
}
SLOTS = {
    "right": None,
    "slot": "slots[2] is 20, not in [-1, 20)",
    "slot below -1": "slots[0] is -2, not in [-1, 20)",
    "first page": "first_page is -1, not in [0, 6)",
}
PLACES = {
    "right": None,
    "place": "places[1] is 2, not in [-1, 2)",
    "rank": "ranks[1, 0] is 5, not in [0, 5)",
    "rank below 0": "ranks[0, 0] is -1, not in [0, 5)",
}
SIZES = {
    "right": None,
    "sizes": "group_sizes[1] is 3, not in [0, 3)",
    "size below 0": "group_sizes[0] is -1, not in [0, 5)",
}
TABLES = {
    "begin": "the begin of panel[1] is 2112, not in [0, 2049)",
    "type": "the type of panel[1] is 19, not in [0, 19)",
}
COUNTS = {"count": "the number of rows that matter is -1, not in [0, "}
STATES = {
    "right": None,
    "tokens": "q_start[2] is 5, not in [3, 5)",
    "order": "q_start[2] is 2, not in [3, 5)",
    "source": "source[1] is 5, not in [0, 5)",
    "target": "target[0] is -1, not in [0, 5)",
    "first": "first is 6, not in [0, 6)",
}
EXPECTED = {
    "attend": ("PagedAttention", ROWS),
    "attend_latents": ("LatentAttention", ROWS),
    "write": ("WriteKv", SLOTS),
    "write_latents": ("WriteLatent", SLOTS),
    "rotate": ("RotateAndWrite", SLOTS | COUNTS),
    "adapt": ("AddAdapters", PLACES),
    "by_expert": ("GroupedQuantMatmul", SIZES),
    "panels_by_expert": ("PanelGroupedMatmul", SIZES | TABLES),
    "multiply": ("Matmul", {"right": None} | COUNTS),
    "convolve": ("ShortConv", STATES),
    "delta_net": ("DeltaNet", STATES),
    "mamba2": ("Mamba2", STATES | {"group": "group[2] is 2, not in [0, 2)"}),
}


def test_wrong_indices_are_errors_that_name_them(checked):
    made = run(checked, "-c", WRONG)
    assert made.returncode == 0, made.stderr[-3000:]
    found = json.loads(made.stdout)
    for function, (kernel, wrongs) in EXPECTED.items():
        for name, error in wrongs.items():
            message = found.pop(f"{function}, {name}")
            if error is None:
                assert message is None
            else:
                assert f"{kernel}: {error}" in message
    assert not found


@pytest.mark.parametrize("name", ENGINE_TESTS)
def test_the_engine_gives_no_wrong_index(name, checked):
    """Each file in a process of its own: what is compiled stays mapped, and a process may have 65,530 mappings."""
    options = "-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", "--timeout", "3500", "--most-cases", "1"
    made = run(checked, "-m", "pytest", *options, f"tests/engine/{name}")
    assert made.returncode == 0, made.stdout[-3000:]
