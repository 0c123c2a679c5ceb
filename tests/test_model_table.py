"""docs/models.md says what the code does."""

import model_table
import pytest

from jaxserve.models.families import families
from jaxserve.pallas_kernels import cpu, cpu_build

# Families without small models of their own: their language models are those of other families, and MiniCPM's is
# Llama's with scales.
UNTESTED = ["minicpm", "granite4 vision with images", "gemma3n with images", "aria with images"]


@pytest.mark.skipif(not cpu.available(cpu_build.ATTENTION), reason="without the C++ kernels nothing is deterministic")
def test_the_page_is_current():
    assert model_table.PAGE.read_text(encoding="utf-8") == model_table.page(), "run `make models`"


def test_every_family_is_in_the_table():
    missing = [family.name for family in families() if not model_table.cases_of(family)]
    assert missing == UNTESTED
