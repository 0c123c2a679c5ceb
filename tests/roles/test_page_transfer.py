"""Engines with the roles prefill and decode over real connections: answers are those of one engine alone, also when
transfers fail."""

import contextlib
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from adapter_folders import save_adapter
from engines import make_engine, request
from role_engines import SECRET, Proxy, answers, as_it_is, decode_engine, prefill_engine
from serving import free_port, wait_until
from strangers import Strangers

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.role import page_identity
from jaxserve.hosts import channel
from jaxserve.hosts.greetings import Greetings, bind
from jaxserve.hosts.identity import difference
from jaxserve.roles import messages
from jaxserve.roles.prefill_server import CONNECTIONS, SILENT_SECONDS, PrefillServer, Transfer
from jaxserve.scheduling.block_manager import hash_pages

PAGE = 8
FEW = {"rows": 4, "tokens": 32, "page_size": PAGE, "kv_pages": 80, "max_model_len": 160, "kv_offload_gib": 0.05}
KINDS = {  # a test model, and settings
    "8 bits": ("tp_gqa", {"kv_cache_dtype": "int8"}),
    "8-bit latents": ("deepseek_v2_lite", {"kv_cache_dtype": "int8"}),
    "windows": ("gemma3_layer_types", {"kv_pages": 160}),
    "chunks": ("llama4_chunks", {"kv_pages": 160}),
}


@pytest.fixture(scope="module", autouse=True)
def secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_HOST_SECRET", SECRET)
        yield


def requests(tag="", count=6):
    """Long and short prompts, greedy and sampled, with one and several completions."""
    rng = np.random.default_rng(5)
    made = []
    for i in range(count):
        prompt = rng.integers(5, 300, (100, 131, 9, 64, 65, 40)[i % 6]).tolist()
        wish = {"temperature": 0.8, "seed": i} if i % 2 else {}
        made.append(request(f"{tag}{i}", prompt, max_tokens=8, n=1 + (i == 3), **wish))
    return made


def forget(*engines):
    for engine in engines:
        engine.reset_prefix_cache()


# One prefill and one decode engine, with a proxy between them


class Pair:
    def __init__(self, prefill, decode, proxy):
        self.prefill = prefill
        self.decode = decode
        self.proxy = proxy
        decode.scheduler.fetches, fetches = None, decode.scheduler.fetches
        self.expected = answers(decode, requests())  # nobody is asked
        decode.scheduler.fetches = fetches

    def ask(self):
        """The answers to `requests`, which must be right, and how the decode engine's statistics change."""
        forget(self.decode)
        before = self.decode.stats()
        assert answers(self.decode, requests()) == self.expected
        wait_until(lambda: not self._moves())
        self.decode.blocks.tiers.check_integrity()
        after = self.decode.stats()
        return {
            name: getattr(after, name) - getattr(before, name) for name in after.__struct_fields__ if "fetch" in name
        }

    def _moves(self):
        self.decode.step()
        return self.decode.has_work


@pytest.fixture(scope="module")
def engines(model_folders):
    with prefill_engine(model_folders("tp_gqa"), **FEW) as (prefill, address):
        proxy = Proxy(address)
        nobody = f"127.0.0.1:{free_port()}"
        decode = decode_engine(model_folders("tp_gqa"), nobody, proxy.address, up=1, prefill_timeout=20.0, **FEW)
        yield Pair(prefill, decode, proxy)
        proxy.close()


@pytest.fixture
def pair(engines):
    engines.proxy.change = as_it_is
    wait_until(lambda: engines.decode.stats().prefill_servers_up == 1, 20)
    yield engines
    engines.proxy.change = as_it_is


@pytest.mark.slow
def test_answers_are_the_same(pair):
    for _ in range(2):
        counts = pair.ask()
        assert (counts["fetch_requests"], counts["fetch_failed"], counts["fetch_fallbacks"]) == (5, 0, 0)
        assert counts["fetch_pages"] == 12 + 16 + 7 + 8 + 4
        assert counts["fetch_bytes"] == counts["fetch_pages"] * pair.decode.runner.layout.page_bytes
    stats = pair.prefill.stats()
    assert stats.export_pages == 2 * counts["fetch_pages"]
    assert stats.prompt_tokens < 2 * 600 * 0.6  # the second time they were in its prefix cache
    assert pair.decode.stats().offload_hits >= 2 * PAGE * counts["fetch_pages"]


@pytest.mark.slow
def test_bits_that_change_on_the_way(pair):
    def flip(data, before):
        changed = bytearray(data)
        if before > 4000:
            changed[len(data) // 2] ^= 4
        return bytes(changed)

    pair.proxy.change = flip
    counts = pair.ask()
    assert counts["fetch_failed"] == counts["fetch_fallbacks"] > 0
    assert counts["fetch_pages"] < 47


def test_connections_that_break(pair):
    def cut(data, before):
        if before > 30_000:
            raise OSError
        return data

    pair.proxy.change = cut
    counts = pair.ask()
    assert 0 < counts["fetch_failed"] <= 5


@pytest.mark.slow
def test_a_server_that_falls_silent(pair):
    """As one that is stopped in the middle of a transfer: its pings are not answered."""

    stopped = threading.Event()

    def stand_still(data, before):
        if before > 4000:
            stopped.set()
        while stopped.is_set() and pair.proxy.change is stand_still:
            time.sleep(0.05)
        return data

    pair.proxy.change = stand_still
    start = time.monotonic()
    counts = pair.ask()
    assert stopped.is_set()
    assert counts["fetch_fallbacks"] >= 3
    assert time.monotonic() - start < SILENT_SECONDS + 2.0


def test_requests_that_are_aborted_while_they_are_held(pair):
    forget(pair.decode, pair.prefill)
    for one in requests("aborted"):
        pair.decode.add_request(one)
        pair.decode.abort(one.request_id)
        pair.decode.scheduler.check_integrity()
    wait_until(lambda: not pair._moves())
    assert pair.decode.blocks.num_used == 0
    wait_until(lambda: not pair.prefill.has_work)
    assert pair.ask()["fetch_failed"] == 0


def test_replaced_weights_ask_nobody(pair):
    pair.decode.weights.version += 1
    try:
        assert pair.ask()["fetch_requests"] == 0
    finally:
        pair.decode.weights.version -= 1
    pair.prefill.weights.version += 1
    try:
        counts = pair.ask()
        assert counts["fetch_failed"] == counts["fetch_requests"] == 5
        assert counts["fetch_pages"] == 0
    finally:
        pair.prefill.weights.version -= 1


def test_salts_and_scores(pair):
    """Pages of one salt are not those of another, and prompts whose tokens are scored are computed here."""
    forget(pair.decode, pair.prefill)
    (one,) = [one for one in requests() if one.request_id == "0"]
    counts = []
    for salt in ("a", "a", "b"):
        before = pair.decode.stats().fetch_pages
        one.cache_salt = salt
        one.page_hashes = b""
        assert answers(pair.decode, [one]) == {("0", 0): pair.expected["0", 0]}
        counts.append(pair.decode.stats().fetch_pages - before)
    assert counts == [12, 0, 12]
    before = pair.decode.stats().fetch_requests
    scored = request("s", one.prompt_token_ids, max_tokens=8, prompt_logprobs=0)
    assert answers(pair.decode, [scored])["s", 0] == pair.expected["0", 0]
    assert pair.decode.stats().fetch_requests == before


def test_the_secret_and_pages_of_another_kind(pair, caplog):
    (address,) = {one.address for one in pair.decode.copies.role.pages._servers if one.up}
    identity = page_identity(pair.decode.config, pair.decode._parts.plan, pair.decode.runner)
    changed = identity | {"checkpoint": "another"}
    servers = [
        PrefillServer(address, b"another secret, long", identity, lambda: None),
        PrefillServer(address, SECRET.encode(), changed, lambda: None),
    ]
    wait_until(lambda: "it has another secret" in caplog.text and "its checkpoint is another" in caplog.text)
    assert not any(server.up for server in servers)
    for server in servers:
        server.close()


# Peers that attack


class Peer:
    """A decode server's connection, which may say anything."""

    def __init__(self, pair):
        self.port = int(pair.prefill.config.prefill_listen.rpartition(":")[2])
        identity = page_identity(pair.decode.config, pair.decode._parts.plan, pair.decode.runner)
        self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.link = channel.connect(self.connection, SECRET.encode(), 5.0)
        self.link.send(messages.encode(messages.Hello(identity)))
        assert messages.decode(self.link.receive()) == messages.Welcome()
        self.link.set_timeout(10.0)

    def answer(self, body: bytes) -> messages.Done | None:
        """None: the connection was closed."""
        try:
            self.link.send(body)
            while isinstance(answer := messages.decode(self.link.receive()), messages.Pages):
                self.link.receive()
            return answer
        except (EOFError, ConnectionError):
            return None
        finally:
            self.connection.close()


def asked(prompt, pages=(0,), **fields):
    """A message of the kind Ask, as a dictionary."""
    array = np.asarray(prompt, np.int64).astype(np.int32)
    hashes = hash_pages(array[: (len(array) - 1) // PAGE * PAGE], None, PAGE) if len(array) else b""
    return {"type": "Ask", "tokens": array.tobytes(), "wanted": np.asarray(pages, np.int32).tobytes(),
            "page_hashes": hashes, **fields}  # fmt: skip


PROMPT = list(range(5, 5 + 3 * PAGE + 1))
CLOSED = {  # messages of no meaning
    "tokens of three bytes": asked(PROMPT, tokens=b"abc"),
    "wanted of three bytes": asked(PROMPT, wanted=b"abc"),
    "tokens as text": asked(PROMPT, tokens="abc"),
    "a priority of 65 bits": b"\x82\xa4type\xa3Ask\xa8priority\xcf" + b"\xff" * 9,
    "no fields": {"type": "Ask"},
    "another end's message": {"type": "Pages", "places": [0], "keys": bytes(33)},
    "keys of too few bytes": {"type": "Pages", "places": [0, 1], "keys": bytes(33)},
    "no kind": {"type": "Asks"},
    "nested": b"\x82\xa4type\xa3Ask\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "no text": b"\x82\xa4type\xa3Ask\xaacache_salt\xa2\xff\xfe",
    "nothing": b"",
    "bytes": bytes(range(256)),
    "a prompt beyond all bounds": asked([7] * 2**20),
}
REFUSED = {  # messages whose meaning is wrong, and the reason
    "no tokens": (asked([]), "pages that the prompt does not have"),
    "no pages": (asked(PROMPT, ()), "pages that the prompt does not have"),
    "a page before the first": (asked(PROMPT, (-1,)), "pages that the prompt does not have"),
    "a page behind the last": (asked(PROMPT, (0, 3)), "pages that the prompt does not have"),
    "pages twice": (asked(PROMPT, (0, 0)), "pages that the prompt does not have"),
    "hashes of another prompt": (asked(PROMPT, page_hashes=bytes(96)), "hashes of the prompt's pages"),
    "half a hash": (asked(PROMPT, page_hashes=b"abc"), "hashes of the prompt's pages"),
    "an id below 0": (asked([*PROMPT[:-1], -1]), "token id -1 is outside the vocabulary"),
    "an id above all": (asked([*PROMPT[:-1], 2**31 - 1]), "token id 2147483647 is outside the vocabulary"),
    "a prompt that is too long": (asked([7] * 161), "maximum context length is 160"),
    "an adapter that is not there": (asked(PROMPT, adapter="x" * 1000), "is not loaded"),
}


def encoded(body):
    return body if isinstance(body, bytes) else msgspec.msgpack.encode(body)


def test_no_message_of_a_peer_stops_the_engine(pair, caplog):
    for name, body in CLOSED.items():
        before = caplog.text.count("the connection from 127.0.0.1 is closed: ")
        assert Peer(pair).answer(encoded(body)) is None, name
        wait_until(lambda before=before: caplog.text.count("from 127.0.0.1 is closed: ") == before + 1, message=name)
    for name, (body, reason) in REFUSED.items():
        assert reason in Peer(pair).answer(encoded(body)).reason, name
        assert "127.0.0.1 asks for pages that it does not get" in caplog.records[-1].getMessage()
        assert reason in caplog.records[-1].getMessage(), name
    for body in ({"cache_salt": None}, {"priority": -(2**63)}, {"tenant": "x" * 10_000}):
        assert Peer(pair).answer(encoded(asked(PROMPT, **body))) == messages.Done(), "right, if odd"
    counts = pair.ask()
    assert (counts["fetch_requests"], counts["fetch_failed"], counts["fetch_fallbacks"]) == (5, 0, 0)


def test_random_messages(pair):
    """Right ones with some bytes changed or cut."""
    rng = np.random.default_rng(3)
    right = encoded(asked(PROMPT, tenant="tenant", adapter="a", adapter_digest="b"))
    for i in range(60):
        body = bytearray(right)
        for at in rng.integers(0, len(body), int(rng.integers(1, 6))):
            body[at] = rng.integers(256)
        Peer(pair).answer(bytes(body[: rng.integers(len(body))] if i % 4 == 0 else body))
    assert pair.ask()["fetch_failed"] == 0


@contextlib.contextmanager
def hostile_server(*answers):
    """A prefill server that answers each question with these bodies. Yields its address."""

    def serve(link):
        link.set_timeout(10.0)
        link.receive()
        link.send(messages.encode(messages.Welcome()))
        while True:
            link.receive()
            for body in answers:
                link.send(encoded(body))

    with bind("127.0.0.1", 0) as listener:
        Greetings(listener, SECRET.encode(), 5.0, serve, "hostile")
        yield f"127.0.0.1:{listener.getsockname()[1]}"


HOSTILE = {
    "no message": (b"abc",),
    "nested": (b"\x82\xa4type\xa4Done\xa1x" + b"\x91" * 100_000 + b"\xc0",),
    "places below 0": ({"type": "Pages", "places": [-1], "keys": bytes(33)}, bytes(8)),
    "places beyond all": ({"type": "Pages", "places": [2**62], "keys": bytes(33)}, bytes(8)),
    "too few keys": ({"type": "Pages", "places": [0, 1], "keys": bytes(33)}, bytes(16)),
    "another prompt's keys": ({"type": "Pages", "places": [0], "keys": bytes(range(33))}, bytes(8)),
    "pages of another size": ({"type": "Pages", "places": [0], "keys": bytes(33)}, bytes(9)),
    "a page twice": ({"type": "Pages", "places": [0, 0], "keys": bytes(66)}, bytes(16)),
    "a negative load": ({"type": "Pong", "load": -1},),
    "a large message": (bytes(channel.MAX_MESSAGE + 1),),
    "a question": ({"type": "Ping"},),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_answer_of_a_prefill_server_stops_a_transfer_from_ending(kind):
    """Whatever comes, its places are free again, and the threads go on to the next prompt."""
    stored = []
    ask = messages.Ask(tokens=bytes(36), wanted=bytes(4), page_hashes=bytes(32))
    with hostile_server(*HOSTILE[kind]) as address:
        server = PrefillServer(address, SECRET.encode(), {}, lambda: None)
        for _ in range(2 * CONNECTIONS):  # each thread has its turn
            transfer = Transfer(ask, [bytes(33)], [7], lambda place, data: stored.append(place), 8, 5.0)
            server.submit(transfer)
            wait_until(lambda transfer=transfer: transfer.over, 5)
            assert transfer.error or transfer.cancelled
            assert len(transfer.left()) + transfer.received == 1
        server.close()
    assert set(stored) <= {7}


def test_a_prefill_server_that_sends_a_byte_now_and_then():
    """Its answer has one limit, however it is cut."""

    def drip(link):
        while True:
            link._socket.sendall(b"\0")
            time.sleep(0.1)

    with bind("127.0.0.1", 0) as listener:
        Greetings(listener, SECRET.encode(), 5.0, drip, "hostile")
        start = time.monotonic()
        connection = socket.create_connection(listener.getsockname())
        link = channel.connect(connection, SECRET.encode(), 0.5)
        with pytest.raises(TimeoutError):
            link.receive()
        assert 0.4 < time.monotonic() - start < 2
        connection.close()


def test_a_thousand_strangers(pair):
    """A decode server gets in while they drip, and they hold no threads."""
    port = Peer(pair).port
    threads = threading.active_count()
    with Strangers(port, 1024) as strangers:
        start = time.monotonic()
        peer = Peer(pair)
        seconds = time.monotonic() - start
        more = threading.active_count() - threads
        assert pair.ask()["fetch_failed"] == 0
        wait_until(lambda: strangers.came > 1024, message="none was closed and came again")
    print(f"in after {seconds * 1000:.0f} ms, {more} more threads")
    assert seconds < 3
    assert more <= 4
    peer.connection.close()


# What is slow: other models and settings


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_pages(kind, model_folders):
    case, settings = KINDS[kind]
    folder = model_folders(case)
    settings = {**FEW, **settings}
    expected = answers(make_engine(folder, **{**settings, "kv_offload_gib": 0}), requests())
    with prefill_engine(folder, **settings) as (prefill, address):
        decode = decode_engine(folder, address, **settings)
        assert answers(decode, requests()) == expected
    stats = decode.stats()
    assert (stats.fetch_requests, stats.fetch_failed, stats.fetch_fallbacks) == (5, 0, 0)
    assert stats.fetch_pages == prefill.stats().export_pages >= 40
    assert stats.offload_hits >= 300


@pytest.mark.slow
def test_sizes_of_meshes(model_folders):
    """Two devices compute prompts for one, and pages with other shapes are refused."""
    folder = model_folders("tp_gqa")
    expected = answers(make_engine(folder, **FEW), requests())
    with prefill_engine(folder, **FEW, tensor_parallel_size=2) as (prefill, address):
        decode = decode_engine(folder, address, **FEW)
        assert answers(decode, requests()) == expected
        assert decode.stats().fetch_pages == 47
        theirs = page_identity(prefill.config, prefill._parts.plan, prefill.runner)
    other = make_engine(folder, **{**FEW, "page_size": 16})
    mine = page_identity(other.config, other._parts.plan, other.runner)
    assert "its page is 16 tokens" in str(difference(theirs, mine))


@pytest.mark.slow
def test_adapters(model_folders, tmp_path):
    """Pages of an adapter are its own; an adapter that the prefill server does not have is computed here."""
    folder = model_folders("llama3_gqa")
    paths = [str(save_adapter(tmp_path / f"a{i}", i, rank=2, model=folder)) for i in range(2)]
    lora = {**FEW, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    both = [("a0", paths[0]), ("a1", paths[1])]

    def made(engine):
        served = {one.name: one.digest for one in engine.adapters.registry.served}
        names = ("", "a0", "a1") * 2
        return [
            msgspec.structs.replace(one, prompt_token_ids=[7] * 90, adapter=name, adapter_digest=served.get(name, ""))
            for one, name in zip(requests(), names, strict=True)
        ]

    alone = make_engine(folder, **lora, lora_modules=both)
    expected = answers(alone, made(alone))
    with prefill_engine(folder, **lora, lora_modules=both[:1]) as (_, address):
        decode = decode_engine(folder, address, **lora, lora_modules=both)
        assert answers(decode, made(decode)) == expected
    assert len({tuple(expected[name, 0]) for name in "024"}) == 3
    stats = decode.stats()
    assert (stats.fetch_requests, stats.fetch_failed) == (6, 2)
    assert stats.fetch_pages == 4 * 11


@pytest.mark.slow
def test_more_than_fits(model_folders):
    """Many prompts and little memory for pages: transfers take turns, and what does not fit is computed here."""
    folder = model_folders("tp_gqa")
    many = [one for tag in "abcd" for one in requests(tag)]
    expected = answers(make_engine(folder, **FEW), many)
    with prefill_engine(folder, **FEW) as (_, address):
        decode = decode_engine(folder, address, **{**FEW, "kv_offload_gib": 20 * 2**13 / 2**30})
        bytes_each = decode.runner.layout.page_bytes
        places = decode.blocks.tiers.num_places
        assert answers(decode, many) == expected
    assert decode.stats().offload_host_bytes <= places * bytes_each


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"role": "decode"}, "role decode goes with prefill_servers"),
        ({"prefill_servers": ("a:1",)}, "role decode goes with prefill_servers"),
        ({"role": "decode", "prefill_servers": ("a",)}, "must be a list of host:port"),
        ({"role": "decode", "prefill_servers": ("a:1",)}, "needs kv_offload_gib"),
        ({"role": "prefill"}, "role prefill goes with prefill_listen"),
        ({"role": "prefill", "prefill_listen": "8000"}, "prefill_listen must be host:port"),
        ({"role": "both", "prefill_listen": "a:1"}, "role prefill goes with prefill_listen"),
        ({"role": "prefill", "prefill_listen": "a:1", "kv_offload_gib": 1, "prefix_caching": False}, "prefix cache"),
        ({"prefill_timeout": 0}, "prefill_timeout must be in"),
        ({"role": "other"}, "role must be one of both, prefill, decode"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_nothing_loads_without_a_secret_or_a_port(monkeypatch, tmp_path):
    roles = {"role": "prefill", "prefill_listen": f"127.0.0.1:{free_port()}", "kv_offload_gib": 0.1}
    monkeypatch.setenv("JAXSERVE_HOST_SECRET", "short")
    with pytest.raises(ConfigError, match="must share a secret of at least 16 bytes"):
        make_engine(tmp_path / "no model", **roles)
    monkeypatch.setenv("JAXSERVE_HOST_SECRET", SECRET)
    with pytest.raises(ConfigError, match=r"prefill_listen: cannot listen on 192\.0\.2\.1:9"):
        make_engine(tmp_path / "no model", **{**roles, "prefill_listen": "192.0.2.1:9"})
