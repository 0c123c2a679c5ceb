"""Plans and reports of a model that sees count its image encoder."""

import math

from jaxserve.checkpoints.hub import resolve_model
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.commands.cli import main
from jaxserve.config import EngineConfig
from jaxserve.execution.memory import size
from jaxserve.plan.report import make_plan
from jaxserve.plan.text import text_of

FEATURES = 2 * 25  # tokens of two of the largest pictures
WIDTH = 2 * 128  # the embedding, and what is added behind the first layer
FLOAT = 4  # bytes, on a CPU


def numbers_of_encoder() -> int:
    tensors = read_folder(resolve_model("demo-vision"))
    return sum(math.prod(one.shape) for name, one in tensors.items() if ".visual." in name)


def test_a_plan_counts_the_encoder():
    seeing, blind = (
        make_plan(EngineConfig(model="demo-vision", language_model_only=blind), "cpu", estimate=True)
        for blind in (False, True)
    )
    counted = seeing["memory"]
    assert counted["encoder"] == FLOAT * numbers_of_encoder()
    assert counted["features"] == FLOAT * FEATURES * WIDTH
    assert counted["weights"] - blind["memory"]["weights"] == counted["encoder"]
    assert counted["slots"] - blind["memory"]["slots"] == counted["features"]
    assert "encoder" not in blind["memory"]
    lines = "\n".join(text_of(seeing))
    assert f"    of it the encoder {size(counted['encoder']):>12}  (of pictures with up to 256 patches)" in lines
    assert f"    of it features    {size(counted['features']):>12}  (of pictures)" in lines


def test_a_report_says_that_a_model_sees(capsys):
    assert main(["models", "inspect", "demo-vision"]) == 0
    out = capsys.readouterr().out
    assert f"pictures: an encoder of 3 layers, hidden 64, {numbers_of_encoder():,} parameters; 8 x 8 pixels" in out
    assert f"room for {FEATURES} tokens of pictures" in out
    assert main(["models", "inspect", "demo-vision", "--language-model-only"]) == 0
    assert "pictures" not in capsys.readouterr().out
