"""Models with experts: over several devices, beside other requests, and what is refused."""

import pytest
from engines import generate, make_engine, request

from jaxserve.config import ConfigError

CASE = "mixtral_experts"  # 5 experts, 2 for each token


def answers(engine, count):
    prompts = [list(range(5 + i, 25 + 3 * i)) for i in range(count)]
    results = generate(engine, *(request(str(i), p, max_tokens=16) for i, p in enumerate(prompts)))
    return [results[i].token_ids for i in range(count)]


def test_devices_and_neighbours_change_no_token(model_folders):
    folder = model_folders(CASE)
    alone = [answers(make_engine(folder), 1), answers(make_engine(folder), 4)]
    assert alone[0][0] == alone[1][0]
    for devices in (2, 8):
        assert answers(make_engine(folder, tensor_parallel_size=devices), 4) == alone[1]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_are_not_quantized(load_format, model_folders):
    with pytest.raises(ConfigError, match="experts are served in floats"):
        make_engine(model_folders(CASE), quantization="int8", load_format=load_format)
