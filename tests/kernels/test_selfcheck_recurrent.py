"""The checks that an operation of recurrent layers passes before a device may use its kernel: right ones do, and each
kind of error is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.registry import Device, RecurrentProblem, load
from jaxserve.pallas_kernels.selfcheck_recurrent import ALLOWED, check_recurrent

BF16 = np.dtype(jnp.bfloat16)
PROBLEMS = {
    "delta_net": RecurrentProblem(BF16, 2, 3, 16, 24, 104, 4),
    "mamba2": RecurrentProblem(BF16, 4, 2, 8, 16, 32, 4),
    "short_conv": RecurrentProblem(BF16, 1, 0, 0, 0, 48, 3),
}


@pytest.mark.parametrize("operation", PROBLEMS)
@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_right_ones_pass(operation, backend):
    problem = PROBLEMS[operation]
    module = load(operation, backend)
    if (reason := module.why_not(Device("cpu", "cpu"), problem)) is not None:
        pytest.skip(reason)
    found = list(check_recurrent(operation, getattr(module, operation), problem, repeats=1))
    assert [str(finding) for finding in found if not finding.right] == []
    assert max(finding.error for finding in found) < ALLOWED / 4


def fresh_is_forgotten(run, inputs, state, rows, first, **options):
    return run(inputs, state, rows._replace(fresh=jnp.zeros_like(rows.fresh)), first, **options)


def always_written(run, inputs, state, rows, first, **options):
    return run(inputs, state, rows._replace(target=rows.source), first, **options)


def another_layer(run, inputs, state, rows, first, **options):
    return run(inputs, state, rows, first - 1, **options)


def never_written(run, inputs, state, rows, first, **options):
    return run(inputs, state, rows, first, **options)[0], state


def last_token_is_lost(run, inputs, state, rows, first, **options):
    """Of each row's results."""
    out, after = run(inputs, state, rows, first, **options)
    return out.at[rows.q_start[1:] - 1].multiply(0.99), after


def rounded_states(run, inputs, state, rows, first, **options):
    out, after = run(inputs, state, rows, first, **options)
    changed = first + rows.target
    return out, jax.tree.map(lambda x: x.at[changed].set(x[changed].astype(jnp.bfloat16).astype(x.dtype)), after)


@pytest.mark.parametrize("operation", PROBLEMS)
@pytest.mark.parametrize(
    "wrong",
    [fresh_is_forgotten, always_written, another_layer, never_written, last_token_is_lost, rounded_states],
)
def test_wrong_ones_do_not(operation, wrong):
    plain = getattr(load(operation, "xla"), operation)

    def run(*arguments, **options):
        return wrong(plain, *arguments, **options)

    assert not all(finding.right for finding in check_recurrent(operation, run, PROBLEMS[operation], repeats=1))
