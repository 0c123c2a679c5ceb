"""Documents: links lead somewhere, files that are named exist, and docs/index.md lists every page."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
DOCUMENTS = sorted(name for name in TRACKED if name.endswith(".md")) or [
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
]
FOLDERS = ("jaxserve", "server", "checkpoints", "pallas_kernels", "benchmarks", "tests", "docs")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "mailto:", "#")):
            assert (ROOT / name).parent.joinpath(target.partition("#")[0]).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in ("CHANGELOG.md", "benchmarks/LOG.md")])
def test_named_files_exist(name):
    """`jaxserve/engine/engine.py` and the like; of the two logs the older lines name what there was."""
    pattern = rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|cc|h|md|json|png|toml))`"
    missing = [path for path in re.findall(pattern, (ROOT / name).read_text()) if not (ROOT / path).exists()]
    assert not missing


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == {page for page in pages if f"]({page})" in index}
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()
