"""What a server's processes hold in memory beside the weights and the KV cache."""

import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
from serving import DEMO, ROOT, SMALL, running_server

from jaxserve import heap

pytestmark = pytest.mark.slow

sys.path.append(str(ROOT / "benchmarks"))
memory = importlib.import_module("peers.memory")
gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)

# The target is 400. The demo model takes 250 to 292, the most where its programs are compiled anew; a vocabulary of
# 150,000 tokens and programs of 28 layers take 70 more.
MOST_MIB = 330


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    path = gguf_files.write_gguf(DEMO, folder / "model.gguf", lambda name: gguf_files.Kind.Q8_0)
    with running_server(path, folder / "server.log", engine=None, config=SMALL | {"tokenizer": str(DEMO)}) as found:
        found.weights = path
        yield found


def mapped(process: int) -> set[str]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if len(line.split(maxsplit=5)) > 5}


def test_memory_beside_weights_and_cache(server):
    """All processes together, pages that they share counted once (Pss), after requests of several kinds."""
    with server.http() as client:
        for i in range(12):
            body = {"model": server.model, "prompt": f"Once {i} upon a time", "max_tokens": 24, "temperature": i % 2}
            answer = client.post("/v1/completions", json=body | {"logprobs": 3 if i % 3 == 0 else None})
            assert answer.status_code == 200, answer.text
    held = memory.resident(server.process.pid)
    if held is None:
        pytest.skip("the system does not tell")
    found = re.search(r"KV cache: (\d+) pages of (\d+) tokens .* (\d+) bytes a token", server.log.read_text())
    pages, page_size, token_bytes = map(int, found.groups())
    known = server.weights.stat().st_size + pages * page_size * token_bytes
    beside = held["pss_mib"] - known / memory.MIB
    assert 0 < beside <= MOST_MIB, held


def test_who_imports_what(server):
    """JAX's library is in the engine's process alone, and nobody has what serving does not need."""
    api_server = server.process.pid
    everybody = {process: mapped(process) for process in memory.family(api_server)}
    assert len(everybody) == 2
    assert not any("jax" in name for name in everybody[api_server])
    assert any(name.startswith("libjax") for name in everybody.pop(api_server) | set().union(*everybody.values()))
    for process in memory.family(api_server):
        assert not [name for name in mapped(process) if re.search(r"torch|tensorstore|tensorflow", name)]


def test_a_grammar_comes_late(server):
    """On CPU its vocabulary is read with the first one."""
    body = {"model": server.model, "prompt": "x", "max_tokens": 8, "structured_outputs": {"regex": "(yes|no)"}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["choices"][0]["text"] in ("yes", "no"), answer.text


def test_pages_of_libraries_leave_and_come_back():
    """What the libraries do is the same afterwards, and most of what importing touched is gone."""
    code = """
        import ctypes, json
        import jax, jax.numpy as jnp
        from pathlib import Path
        from jaxserve import heap

        def held():
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
            fields = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
            return fields["Rss"] - fields["Anonymous"], fields["Anonymous"]

        def work():
            return float(jax.jit(lambda x: jnp.sin(x).sum())(jnp.arange(1000.0)))

        first = work()
        before = held()
        heap.leave_libraries()
        after = held()
        print(json.dumps([before, after, first == work()]))
    """
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the system does not tell")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    (file, anonymous), (file_after, anonymous_after), same = json.loads(done.stdout)
    assert same
    assert file_after < file / 3
    assert abs(anonymous_after - anonymous) < 4


def smaps(head: str, **fields: int) -> str:
    values = {"Rss": 100, "Anonymous": 0, "Swap": 0} | fields
    lines = [f"{name}: {value:15} kB" for name, value in values.items()]
    return "\n".join([head, *lines, "VmFlags: rd ex mr mw me"]) + "\n"


def test_pages_that_somebody_wrote_stay():
    library = "/usr/lib/libx.so.6.1"
    at = "7f00-7f10 {} 00001000 fe:00 123   {}"
    text = smaps(at.format("r-xp", library)) + smaps("1000-2000 r--p 00000000 fe:00 5    /a/_b.cpython-311.so")
    assert list(heap._unwritten_libraries(text)) == [(0x7F00, 0x7F10), (0x1000, 0x2000)]
    for head, fields in [
        (at.format("rw-p", library), {}),
        (at.format("r--s", library), {}),
        (at.format("r--p", library), {"Anonymous": 4}),  # addresses that the linker has put there
        (at.format("r--p", library), {"Swap": 4}),
        (at.format("r--p", "/models/model.safetensors"), {}),
        ("7f00-7f10 r--p 00000000 00:00 0", {}),
        ("7f00-7f10 r-xp 00000000 00:00 0   [vdso]", {}),
    ]:
        assert not list(heap._unwritten_libraries(smaps(head, **fields))), head
