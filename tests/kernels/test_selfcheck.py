"""The checks that a kernel passes before a device may use it: right ones do, and each kind of error is seen."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels import kv_write
from jaxserve.pallas_kernels.checked_ops import on_trial, passing
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import cpu, reference
from jaxserve.pallas_kernels.registry import AttentionProblem, BackendError, Device
from jaxserve.pallas_kernels.selfcheck import REPEATS, check_attention, check_write, tolerance
from jaxserve.pallas_kernels.selfcheck_cases import LAYER, STARTUP, Rows, make_batch
from jaxserve.pallas_kernels.selfcheck_fused import check_write_and_attend

F32, BF16, F16 = (np.dtype(name) for name in (np.float32, ml_dtypes.bfloat16, np.float16))
INT8, INT4, FP8 = (np.dtype(name) for name in (np.int8, ml_dtypes.int4, ml_dtypes.float8_e4m3fn))
LLAMA = AttentionProblem(BF16, BF16, 2, 4, 64, 16)
CODES = replace(LLAMA, kv_dtype=INT8, has_scale=True)
# As STARTUP, for a quick look at many problems.
FEW = Rows((300, 1, 16, 65), ((41, 90), (9, 0), (1, 200)))


def findings(check, *args, **options):
    """Right ones and wrong ones."""
    found = check(*args, **options)
    return [f for f in found if f.right], [f for f in found if not f.right]


def is_right(check, *args, **options):
    right, wrong = findings(check, *args, **options)
    assert not wrong, "\n".join(map(str, wrong))
    return max(f.error for f in right)


# --- right kernels ---


def test_the_batch_has_what_breaks_kernels():
    batch = make_batch(LLAMA, STARTUP)
    q_start = np.cumsum([0, *(new for new, _ in STARTUP.lengths)])
    assert set(q_start[len(STARTUP.decodes) : -1] % 8) == set(range(8)), "prompts begin at every offset"
    assert max(STARTUP.decodes) > 2 * 6 * 128, "the ring of the Hopper kernel wraps, and the row is split"
    assert any(new >= 700 and before for new, before in STARTUP.prompts)
    assert np.isnan(batch.pages[: LAYER + 1].astype(np.float32)).all(), "other layers, and the page that nobody owns"
    assert batch.q.shape[0] % 8 == 0
    assert sum(x.nbytes for x in (batch.pages, batch.q)) < 20 << 20


@pytest.fixture
def rounding(monkeypatch):
    """Attention that rounds what a kernel with 16-bit operands rounds: probabilities, scaled keys and values."""
    dtype = None
    gather = reference._gather
    softmax = reference.Softmax

    class Rounded(softmax):
        def update(self, scores, weigh, axis):
            return Rounded(*softmax.update(self, scores, lambda p: weigh(rounded(p)), axis))

        @staticmethod
        def empty(*shape):
            return Rounded(*softmax.empty(*shape))

    def rounded(x):
        return x.astype(dtype).astype(jnp.float32)

    def attend(q, *args, **options):
        nonlocal dtype
        dtype = q.dtype
        return reference.paged_attention.__wrapped__(q, *args, **options)

    def rounding_gather(*inputs):
        k, v, position = gather(*inputs)
        return rounded(k), rounded(v), position

    monkeypatch.setattr(reference, "_gather", rounding_gather)
    monkeypatch.setattr(reference, "Softmax", Rounded)
    return attend


@pytest.mark.parametrize("problem", [LLAMA, replace(CODES, q_dtype=F16), replace(CODES, kv_dtype=FP8, group=1)])
def test_a_kernel_that_rounds_as_it_may_passes(rounding, problem):
    """And uses at most two thirds of what is allowed, at the sizes of a start."""
    worst = is_right(check_attention, rounding, problem, variants=("mixed", "all"), repeats=1)
    eps = float(jnp.finfo(problem.q_dtype).eps)
    assert 0.4 * eps < worst < 1.35 * eps
    assert tolerance(problem.q_dtype) == 2 * eps


@pytest.mark.parametrize(
    ("q", "kv", "head_dim", "page_size"),
    [
        (q, kv, head_dim, page_size)
        for i, (q, kv, head_dim) in enumerate(product((BF16, F16), (None, INT8, FP8), (32, 80, 96, 256)))
        for page_size in [(8, 16, 64, 256)[i % 4]]
    ],
)
def test_no_false_alarm(rounding, q, kv, head_dim, page_size):
    problem = AttentionProblem(q, kv or q, 2, 1 + head_dim % 5, head_dim, page_size, has_scale=kv is not None)
    is_right(check_attention, rounding, problem, rows=FEW, variants=("all",), repeats=0)
    is_right(check_write, kv_write.write_kv, problem, repeats=1)


def test_another_implementation_passes():
    problem = AttentionProblem(F32, F32, 2, 4, 64, 16)
    if cpu.why_not(Device("cpu", "cpu"), problem):
        pytest.skip("no C++ compiler")
    assert 0 < is_right(check_attention, cpu.paged_attention, problem) < tolerance(F32) / 5


# --- writes within attention ---


def both(q, k, v, pages, slots, *rows, first_page, late=False, shift=0, extra=0, **options):
    """`write_and_attend` in plain XLA; `late`: written after it was needed; `shift`: to other slots; `extra`: one more
    place is written."""
    moved = jnp.where(slots < 0, -1, slots + shift)
    after = kv_write.write_kv(pages, k, v, moved, first_page)
    if extra:
        after = after._replace(data=after.data.at[LAYER + 1, 0, 0, 0, 0].set(extra))
    return reference.paged_attention(q, pages if late else after, *rows, first_page=first_page, **options), after


@pytest.mark.parametrize("problem", [LLAMA, CODES, replace(CODES, kv_dtype=FP8)])
def test_writes_within_attention_are_checked(problem):
    # Rounding k and v to 16 bits before they become codes again costs up to one code.
    check = partial(check_write_and_attend, attend=reference.paged_attention, problem=problem, repeats=0)
    few = Rows((300, 16, 65, 129))
    is_right(check, both, rows=few)
    for wrong in ({"late": True}, {"shift": 1}, {"extra": 7}):
        assert findings(check, partial(both, **wrong), rows=few)[1], wrong


# --- attention that is wrong ---


def attend_with(change, q, pages, tables, q_start, kv_len, num_decodes, **options):
    """Plain attention of arguments that `change`, a function from their names to new ones, has changed."""
    names = ("q", "pages", "tables", "q_start", "kv_len", "num_decodes")
    arguments = dict(zip(names, (q, pages, tables, q_start, kv_len, num_decodes), strict=True)) | options
    arguments |= change(arguments)
    positional = [arguments.pop(name) for name in names]
    return reference.paged_attention(*positional, **arguments)


def without_page(row, page, a):
    table = a["tables"][row]
    shorter = jnp.concatenate([table[:page], table[page + 1 :], table[:1]])
    return {
        "tables": a["tables"].at[row].set(shorter),
        "kv_len": a["kv_len"].at[row].add(-a["pages"].page_size),
    }


def without_newest(row, a):
    return {"kv_len": a["kv_len"].at[row].add(-1)}


def zeroed_queries(a):
    """As copies of tiles of 8 rows that begin at an offset deliver them: its rows stay behind, zeros come instead."""
    row = jnp.searchsorted(a["q_start"], jnp.arange(len(a["q"])), side="right") - 1
    begin = a["q_start"][jnp.minimum(row, len(a["q_start"]) - 1)]
    lost = (jnp.arange(len(a["q"])) - begin) % 8 >= 8 - begin % 8
    return {"q": jnp.where(lost[:, None, None, None], jnp.zeros((), a["q"].dtype), a["q"])}


def stale_scale(a):
    """The newest token of the longest row has the scale of the token before."""
    size = a["pages"].page_size
    last = a["kv_len"][0] - 1
    here, there = ((a["first_page"] + a["tables"][0, at // size], at % size) for at in (last, last - 1))
    scale = a["pages"].scale
    return {"pages": a["pages"]._replace(scale=scale.at[here[0], :, :, here[1]].set(scale[there[0], :, :, there[1]]))}


CHANGES = {
    "a page of a decode row": (LLAMA, partial(without_page, 0, 40)),
    "the last page but one of a decode row": (LLAMA, partial(without_page, 0, 143)),
    "a page of a prompt's cached tokens": (LLAMA, partial(without_page, 10, 3)),
    "the newest token of the longest row": (LLAMA, partial(without_newest, 0)),
    "the newest token of a row with one head": (replace(LLAMA, kv_heads=1, group=1), partial(without_newest, 0)),
    "a scale off by 2%": (LLAMA, lambda a: {"scale": 1.02 * a["scale"]}),
    "a scale off by 0.3% in float16": (
        replace(LLAMA, q_dtype=F16, kv_dtype=F16),
        lambda a: {"scale": 1.003 * a["scale"]},
    ),
    "queries behind an offset": (LLAMA, zeroed_queries),
    "a wider window": (LLAMA, lambda a: {"window": a["window"] + 1} if "window" in a else {}),
    "a narrower window": (LLAMA, lambda a: {"window": a["window"] - 1} if "window" in a else {}),
    "no sinks": (replace(LLAMA, sinks=True), lambda a: {"sinks": None}),
    "no softcap": (replace(LLAMA, softcap=True), lambda a: {"softcap": None}),
    "the scale of another token": (CODES, stale_scale),
    "another layer": (LLAMA, lambda a: {"first_page": a["first_page"] - 1}),
    "a key beyond the row": (LLAMA, lambda a: {"kv_len": jnp.where(a["kv_len"] == 17, 18, a["kv_len"])}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_attention_is_seen(name):
    problem, change = CHANGES[name]
    _, wrong = findings(check_attention, partial(attend_with, change), problem, repeats=0)
    assert wrong
    allowed = tolerance(problem.q_dtype)
    assert all(f.allowed == allowed and f.error > 1.1 * allowed for f in wrong)


def test_parts_merged_without_their_weights_are_seen():
    def halves(q, pages, tables, q_start, kv_len, num_decodes, **options):
        """The longest row's first 256 tokens count as much as all the others."""
        out = reference.paged_attention(q, pages, tables, q_start, kv_len, num_decodes, **options)
        if options.get("window"):
            return out
        skipped = jnp.roll(tables, -(256 // pages.page_size), 1)
        parts = [(tables, kv_len.at[0].set(256)), (skipped, kv_len.at[0].add(-256))]
        two = [reference.paged_attention(q, pages, t, q_start, n, num_decodes, **options)[0] for t, n in parts]
        return out.at[0].set((two[0] + two[1]) / 2)

    _, wrong = findings(check_attention, halves, LLAMA, repeats=0)
    assert [f.what for f in wrong] == ["mixed rows", "decode rows"]
    assert "row 0 of 2311 cached tokens" in wrong[0].where


def nan_in_one(*args, **options):
    return reference.paged_attention(*args, **options).at[3].set(jnp.nan)


def test_nan_is_seen():
    _, wrong = findings(check_attention, nan_in_one, LLAMA, rows=FEW, repeats=0)
    assert {f.error for f in wrong} == {float("inf")}
    assert "token 3 is not finite" in wrong[0].where


def now_and_then(period):
    """A function of an array that changes one bit of it in one of `period` calls, as a race would."""
    calls = [0]

    def host(x):
        calls[0] += 1
        changed = np.array(x)
        if calls[0] % period == 0:
            changed.reshape(-1).view(np.uint8)[0] ^= 1
        return changed

    return lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_nan_from_before_the_window_is_seen():
    """The page may be another row's by now. Masked keys have a probability of 0, and 0 times NaN is NaN."""

    def attend(q, pages, tables, *args, first_page, **options):
        first = pages.data[first_page + tables[:, 0], 1].astype(jnp.float32)  # of each row's values
        out = reference.paged_attention(q, pages, tables, *args, first_page=first_page, **options)
        return out + (0 * first[0].sum()).astype(out.dtype)

    right, wrong = findings(check_attention, attend, LLAMA, rows=FEW, repeats=0)
    assert [f.what for f in right] == ["mixed rows", "decode rows"]
    assert [(f.what, f.error) for f in wrong] == [("window rows", float("inf"))]


def test_races_are_seen():
    def attend(*args, **options):
        return flicker(reference.paged_attention(*args, **options))

    flicker = now_and_then(REPEATS)
    _, wrong = findings(check_attention, attend, LLAMA, rows=FEW, variants=("mixed",))
    assert [f.where for f in wrong] == [f"1 of {REPEATS} equal calls gave another result"]
    flicker = now_and_then(10 * REPEATS)
    is_right(check_attention, attend, LLAMA, rows=FEW, variants=("mixed",))


# --- writes ---


def write_with(change, pages, k, v, slots, first_page):
    return kv_write.write_kv(pages, *change(k, v, slots), first_page)


def with_stale_scale(pages, k, v, slots, first_page):
    new = kv_write.write_kv(pages, k, v, slots, first_page)
    place = LAYER + slots[9] // pages.page_size, slots[9] % pages.page_size
    return new._replace(scale=new.scale.at[place[0], :, :, place[1]].set(pages.scale[place[0], :, :, place[1]]))


def touching(pages, *args):
    """Changes the sign of one number elsewhere."""
    new = kv_write.write_kv(pages, *args)
    return new._replace(data=new.data.at[LAYER + 20, 1, 0, 3, 5].multiply(jnp.asarray(-1, new.data.dtype)))


WRITES = {
    "a token at its neighbour's place": partial(write_with, lambda k, v, slots: (k, v, slots.at[9].add(1))),
    "all one further": partial(write_with, lambda k, v, slots: (k, v, jnp.where(slots < 0, -1, slots + 1))),
    "padding": partial(write_with, lambda k, v, slots: (k, v, jnp.where(slots < 0, 300, slots))),
    "keys for values": partial(write_with, lambda k, v, slots: (v, k, slots)),
    "another layer": lambda pages, k, v, slots, first: kv_write.write_kv(pages, k, v, slots, first - 1),
    "a place that is not written": touching,
}


@pytest.mark.parametrize("problem", [LLAMA, CODES, replace(CODES, kv_dtype=FP8)], ids=["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", WRITES)
def test_wrong_writes_are_seen(name, problem):
    assert findings(check_write, WRITES[name], problem, repeats=0)[1]


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_stale_scales_are_seen(dtype):
    _, wrong = findings(check_write, with_stale_scale, replace(CODES, kv_dtype=dtype), repeats=0)
    assert [f.what for f in wrong] == ["written tokens"]


def test_races_of_writes_are_seen():
    flicker = now_and_then(REPEATS)

    def write(pages, *args):
        new = kv_write.write_kv(pages, *args)
        return new._replace(data=flicker(new.data))

    _, wrong = findings(check_write, write, CODES)
    assert [f.what for f in wrong] == ["write"]


# --- what becomes of kernels ---


def late(q, pages, tables, q_start, kv_len, num_decodes, **options):
    """Sees one token too few."""
    return reference.paged_attention(q, pages, tables, q_start, kv_len - 1, num_decodes, **options)


def right(*args, **options):
    return reference.paged_attention(*args, **options)


@pytest.fixture
def quick(monkeypatch):
    """The checks with few rows, and once."""
    from jaxserve.pallas_kernels import selfcheck

    few = partial(check_attention, rows=FEW, repeats=1)
    monkeypatch.setattr(selfcheck, "check_attention", few)
    monkeypatch.setattr(selfcheck, "check_write", partial(check_write, repeats=1))


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_is_not_used(caplog):
    plain = Ops(paged_attention=reference.paged_attention)
    assert checked(plain, LLAMA, "xla") == plain
    good = Ops(paged_attention=right, write_kv=write_with_nothing)
    assert checked(good, LLAMA, "auto") == good
    assert not caplog.text
    found = checked(replace(good, paged_attention=late), LLAMA, "auto")
    assert found.paged_attention is reference.paged_attention
    assert found.write_kv is write_with_nothing, "which is right"
    assert "the attention kernel is wrong on this device: mixed rows: off by" in caplog.text
    found = checked(replace(good, write_kv=WRITES["padding"]), LLAMA, "auto")
    assert (found.paged_attention, found.write_kv) == (right, kv_write.write_kv)
    assert "the write_kv kernel is wrong on this device: places that no token was written to" in caplog.text
    with pytest.raises(BackendError, match="the attention backend mosaic_gpu is wrong on this device"):
        checked(replace(good, paged_attention=late), LLAMA, "mosaic_gpu")


def checked(ops, problem, backend, **options):
    return passing(on_trial(ops, problem, backend, **options))


write_with_nothing = partial(write_with, lambda k, v, slots: (k, v, slots))


@pytest.mark.usefixtures("quick")
def test_windows_are_tried_where_a_model_has_some(caplog):
    wrong = partial(attend_with, CHANGES["a wider window"][1])
    ops = Ops(paged_attention=wrong)
    assert checked(ops, LLAMA, "auto", windows=False) == ops, caplog.text
    assert checked(ops, LLAMA, "auto").paged_attention is reference.paged_attention


def test_a_kernel_that_does_not_run_is_not_used(caplog):
    def failing(*args, **options):
        raise RuntimeError("no such instruction")

    assert checked(Ops(paged_attention=failing), LLAMA, "auto").paged_attention is reference.paged_attention
    assert "does not run: no such instruction" in caplog.text
