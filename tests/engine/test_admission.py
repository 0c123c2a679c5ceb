"""Which requests an engine takes into its queue."""

import pytest
from engines import make_engine, request

from jaxserve.types import QueueFullError


def test_aborted_requests_count_for_nothing(model_folders):
    """Behind one that waits, thousands come and go; then both limits hold as if they had never been there."""
    engine = make_engine(model_folders("tp_gqa"), max_waiting=4, max_waiting_tokens=100)
    engine.add_request(request("waits", range(5, 65)))
    for i in range(10_000):
        engine.add_request(request(f"goes-{i}", [5] * 30))
        engine.abort(f"goes-{i}")
    assert engine.num_waiting == len(list(engine.scheduler.waiting)) == 1
    engine.add_request(request("second", [5] * 30))
    with pytest.raises(QueueFullError, match="90 tokens"):
        engine.add_request(request("third", [5] * 30))
    engine.abort("second")
    for i in range(3):
        engine.add_request(request(f"short-{i}", [5] * 3))
    with pytest.raises(QueueFullError, match="4 requests"):
        engine.add_request(request("fifth", [5] * 3))
