"""docs/models.md says what the code does."""

import model_table
import pytest

from jaxserve.models.families import families
from jaxserve.pallas_kernels import cpu, cpu_build

UNTESTED = ["kimi k2.5 with images"]  # whose text is a DeepSeek V3


@pytest.mark.skipif(not cpu.available(cpu_build.ATTENTION), reason="without the C++ kernels nothing is deterministic")
def test_the_page_is_current():
    assert model_table.PAGE.read_text(encoding="utf-8") == model_table.page(), "run `make models`"


def test_every_family_is_in_the_table():
    missing = [family.name for family in families() if model_table.case_of(family) is None]
    assert missing == UNTESTED
