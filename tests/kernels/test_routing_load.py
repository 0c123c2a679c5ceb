"""How tokens spread over experts, against counting them one by one."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.expert_routing import load


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_load(count):
    layers = 3
    tokens = 9
    top_k = 2
    experts = 7
    rng = np.random.default_rng(count)
    chosen = np.stack([[rng.permutation(experts)[:top_k] for _ in range(tokens)] for _ in range(layers)])
    each = [Counter(layer[:count].ravel().tolist()) for layer in chosen]
    expected = [
        layers * count * top_k,
        sum(max(counter.values(), default=0) for counter in each),
        sum(len(counter) for counter in each),
    ]
    found = load(jnp.asarray(chosen, jnp.int32), experts, jnp.int32(count))
    assert found.dtype == jnp.int32
    assert found.tolist() == expected
