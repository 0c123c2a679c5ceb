"""A real server that has most of the model's layers in host memory: the same answers as with all on the devices."""

import pytest
from serving import DEMO, SMALL, running_server
from test_groups_server import answers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")]


def test_answers(tmp_path, demo_server):
    expected = answers(demo_server)
    with running_server(DEMO, tmp_path / "log", engine=None, config=SMALL | {"cpu_offload_gib": 1e-9}) as server:
        assert answers(server) == expected
        assert server.metric("failed_steps_total") == 0
        assert "3 of 5 layers are in host memory" in server.log.read_text()
