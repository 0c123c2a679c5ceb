"""How hosts prove that they belong together, and how they notice that one of them is gone or differs."""

from __future__ import annotations

import base64
import importlib.metadata
import os
import re
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import msgspec
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.hosts import channel, messages, start_jax
from jaxserve.hosts.channel import WrongSecretError
from jaxserve.hosts.host_environment import SECRET, command_address, found_hosts, read_secret
from jaxserve.hosts.identity import difference, identity_of
from jaxserve.hosts.messages import EVERY, HostError, TokenDigests
from jaxserve.hosts.peer import Peer
from jaxserve.hosts.start_jax import check_place, with_all_devices

GOOD = b"a secret of sixteen or more bytes"
NO_LINES = "TRITON_DISABLE_LINE_INFO"


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return listener.accept()[0], one


def accept(connection: socket.socket, secret: bytes) -> channel.Channel:
    greeting = channel.Greeting(connection, secret)
    while (link := greeting.advance()) is None:
        select.select([connection], [], [])
    link.set_timeout(10)
    return link


def connect(connection: socket.socket, secret: bytes) -> channel.Channel:
    link = channel.connect(connection, secret, 10.0)
    link.set_timeout(10)
    return link


def channels(first: bytes = GOOD, other: bytes = GOOD):
    a, b = sockets()
    with ThreadPoolExecutor() as pool:

        def make(function, connection, secret):
            try:
                return function(connection, secret)
            except OSError as error:
                connection.close()
                return error

        made = pool.submit(make, accept, a, first), pool.submit(make, connect, b, other)
        return tuple(future.result() for future in made)


def test_a_frame_of_more_parts_than_the_system_takes_at_once():
    first, other = channels()
    parts = [bytes([i % 256]) * (i % 700) for i in range(3000)]
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(first.send, *parts)
        assert other.receive() == b"".join(parts)
        sent.result()


def test_frames_arrive_both_ways():
    first, other = channels()
    sender = threading.Thread(target=lambda: [first.send(b"a", b"x" * 3_000_000, memoryview(b"yz")), first.send(b"")])
    sender.start()
    assert other.receive() == b"a" + b"x" * 3_000_000 + b"yz"
    assert other.receive() == b""
    sender.join()
    other.send(b"back")
    assert first.receive() == b"back"
    other.close()
    with pytest.raises(EOFError):
        first.receive()


def test_another_secret():
    first, other = channels(other=GOOD + b"!")
    assert isinstance(first, WrongSecretError)
    assert isinstance(other, WrongSecretError)


def test_a_first_host_without_the_secret_is_not_trusted():
    """It could repeat what it is told, but has nothing to show that it knows the secret."""
    a, b = sockets()

    def pretend() -> None:
        hello = a.recv(1024)
        a.sendall(hello[-32:] * 2)

    threading.Thread(target=pretend).start()
    with pytest.raises(WrongSecretError):
        connect(b, GOOD)


@pytest.mark.parametrize("what", ["changed", "repeated", "left out"])
def test_frames_that_were_tampered_with(what):
    """By somebody on the way, who sees all bytes and passes on others."""
    first, other = channels()
    recorder, source = sockets()
    real = first._socket
    first._socket = source
    first.send(b"one")
    first.send(b"two")
    size = 4 + 16 + 3
    frames = [recorder.recv(size), recorder.recv(size)]
    passed = {
        "changed": [frames[0][:-1] + b"E"],
        "repeated": [frames[0], frames[0]],
        "left out": [frames[1]],
    }[what]
    real.sendall(b"".join(passed))
    for frame in passed[:-1]:
        assert other.receive() == frame[-3:]
    with pytest.raises(HostError, match="code is wrong"):
        other.receive()


def peers(timeout: float, **options):
    """A peer and the bare channel of its other end, what the peer received, and why it was lost."""
    first, other = channels()
    received = []
    lost = []
    peer = Peer(first, timeout, messages.Beat, options.get("receive", received.append), lost.append)
    return peer, other, received, lost


def wait_for(found: list, seconds: float = 5) -> str:
    deadline = time.monotonic() + seconds
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def test_a_peer_that_ends():
    _, other, received, lost = peers(5)
    other.send(messages.encode(messages.Beat(3, False)))
    other.close()
    assert wait_for(lost) == "its process has ended"
    assert received == [messages.Beat(3, False)]


def test_a_peer_that_is_silent():
    _, other, _, lost = peers(0.3)
    assert "silent for 0.3 s" in wait_for(lost)
    assert messages.decode(other.receive()) == messages.Beat()


def test_nobody_waits_for_a_peer_that_reads_nothing(monkeypatch):
    monkeypatch.setattr("jaxserve.hosts.peer.MAX_QUEUED", 2**24)
    peer, other, _, lost = peers(30)
    began = time.monotonic()
    while not lost:
        peer.send(bytes(2**20))
    assert time.monotonic() - began < 5
    assert "it lags" in lost[0]
    other.close()


def test_a_peer_that_sends_what_is_no_message():
    _, other, _, lost = peers(5)
    other.send(b"\xc1")
    wait_for(lost)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa3Nap",
        msgspec.msgpack.encode({"type": "Beat", "done": -1}),
        msgspec.msgpack.encode({"type": "Call", "runner": -1, "command": b""}),
        msgspec.msgpack.encode({"type": "Tokens", "count": 2**64 - 1, "digest": b""}),
        msgspec.msgpack.encode({"type": "Tokens", "count": 64, "digest": bytes(1000)}),
        b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 100_000 + b"\xc0",  # nested deeper than Python's stack
        b"\x82\xa4type\xa6Failed\xa6reason\xa2\xff\xfe",  # no text
    ],
)
def test_what_is_no_message(body):
    with pytest.raises(HostError, match="it sends what is no message"):
        messages.decode(body)


def test_digests_of_tokens():
    found = []
    failed = []
    one, other = (TokenDigests(lambda *given: found.append(given), failed.append) for _ in range(2))
    steps = [np.arange(i, i + 4, dtype=np.int32) for i in range(EVERY)]
    for step in steps:
        one.add(step)
    wait_for(found)
    for step in [*steps[:-1], steps[-1] + 1]:
        other.add(step)
    while len(found) < 2:
        time.sleep(0.01)
    assert [count for count, _ in found] == [EVERY, EVERY]
    assert found[0][1] != found[1][1]

    class Broken:
        def __array__(self, *args, **options):
            raise RuntimeError("the device is gone")

    one.add(Broken())
    assert "the device is gone" in wait_for(failed)


# What hosts must have in common


def test_identity(model_folders, tmp_path):
    folder = model_folders("tp_gqa")
    mine = identity_of(EngineConfig(model=str(folder), max_num_seqs=4))
    assert difference(mine, identity_of(EngineConfig(model=str(folder), max_num_seqs=4, max_waiting=9))) is None
    other = identity_of(EngineConfig(model=str(folder), max_num_seqs=5))
    assert difference(mine, other) == "its max_num_seqs is 5, and that of the first host is 4"
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 * 2**20))
    before = identity_of(EngineConfig(model=str(path)))
    path.write_bytes(bytes(3 * 2**20 - 1) + b"x")
    assert "checkpoint (GGUF) is" in difference(before, identity_of(EngineConfig(model=str(path))))


def test_hosts_with_other_kernels(model_folders, tmp_path, monkeypatch):
    """They would compile other programs, and GPUs wait a day for hosts that compile the same."""
    config = EngineConfig(model=str(model_folders("tp_gqa")))
    monkeypatch.setenv("JAXSERVE_TUNING", str(tmp_path))
    version = importlib.metadata.version

    def found(**changed: str) -> dict[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name: changed.get(name) or version(name))
            return identity_of(config)

    mine = found(triton="9.9")
    assert difference(mine, found(triton="9.8")) == "its version of triton is 9.8, and that of the first host is 9.9"
    without = {name: value for name, value in mine.items() if name != "version of triton"}
    assert difference(mine, without) == "its version of triton is none, and that of the first host is 9.9"
    (tmp_path / "nvidia-h200.json").write_text("{}")
    assert difference(found(triton="9.9"), mine).startswith("its table of block sizes nvidia-h200.json")
    monkeypatch.setenv("JAXSERVE_TUNING", "")
    assert difference(found(triton="9.9"), mine) is None


# Where hosts come from

LWS = {"LWS_LEADER_ADDRESS": "lead-0.svc", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0, t1,t2", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_STEP_NODELIST": "rack1-n[003-004,9]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (LWS, ("lead-0.svc:8476", 4, 2)),
        (TPU, ("t0:8476", 3, 1)),
        (SLURM, ("rack1-n003:61594", 3, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "n7"}, ("n7:61594", 3, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "n7,n8"}, ("n7:61594", 3, 2)),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, (None, 1, 0)),
    ],
)
def test_hosts_of_the_environment(environment, found):
    config = found_hosts(EngineConfig(model="m", coordinator="auto"), environment)
    assert (config.coordinator, config.num_hosts, config.host_id) == found
    plain = EngineConfig(model="m")
    assert found_hosts(plain, environment) is plain


def test_flags_win_over_the_environment():
    config = found_hosts(EngineConfig(model="m", coordinator="auto", num_hosts=3, host_id=1), LWS)
    assert (config.num_hosts, config.host_id) == (3, 1)


@pytest.mark.parametrize("environment", [{}, LWS | {"LWS_GROUP_SIZE": "x"}, {"TPU_WORKER_HOSTNAMES": "a"}])
def test_an_environment_without_hosts(environment):
    with pytest.raises(ConfigError):
        found_hosts(EngineConfig(model="m", coordinator="auto"), environment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hosts": 2}, "num_hosts 2 needs its coordinator"),
        ({"coordinator": "h:1"}, "a coordinator needs several hosts"),
        ({"coordinator": "h", "num_hosts": 2}, "coordinator must be host:port"),
        ({"coordinator": "h:1", "num_hosts": 2, "host_id": 2}, "host_id must be between 0 and num_hosts - 1 = 1"),
        ({"host_timeout": 0}, "host_timeout must be in"),
    ],
)
def test_settings_that_name_no_group(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, 16),
        ({"tensor_parallel_size": 16}, 16),
        ({"data_parallel_size": 16}, 1),
        ({"data_parallel_size": 2}, 8),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 8}, 8),
        ({"tensor_parallel_size": 8}, None),
        ({"data_parallel_size": 3}, None),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, None),
    ],
)
def test_all_devices_are_used(settings, found):
    config = EngineConfig(model="m", coordinator="h:1", num_hosts=2, **settings)
    if found is not None:
        assert with_all_devices(config, 16).tensor_parallel_size == found
    else:
        with pytest.raises(ConfigError, match="must be 16, the number of all hosts' devices"):
            with_all_devices(config, 16)


@pytest.mark.parametrize(("index", "count"), [(0, 2), (1, 4), (0, 1)])
def test_hosts_are_those_of_the_devices(index, count):
    """Numbered in another order; a part of a slice; TPU VMs without a common slice."""
    config = EngineConfig(model="m", coordinator="h:1", num_hosts=2, host_id=1)
    check_place(config, 1, 2)
    with pytest.raises(ConfigError, match=f"host_id 1 of num_hosts 2 .* this is host {index} of {count}"):
        check_place(config, index, count)


@pytest.mark.parametrize(("platform", "cached"), [("cpu", True), ("gpu", False), ("tpu", True)])
def test_hosts_of_gpus_compile_at_each_start(platform, cached, monkeypatch):
    place = {"process_index": 1, "process_count": 2, "device_count": 2, "default_backend": platform}
    for name, value in place.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: None)
    monkeypatch.setattr(start_jax, "write_compile_cache_here", lambda: None)
    changed = "jax_enable_compilation_cache", "jax_enable_preemption_service", "jax_traceback_in_locations_limit"
    before = {name: jax.config.values[name] for name in changed}
    monkeypatch.setenv(NO_LINES, "0")
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        start_jax.start_jax(EngineConfig(model="m", coordinator="h:1", num_hosts=2, host_id=1))
        assert jax.config.values["jax_enable_compilation_cache"] is cached
        assert source_files(platform) == set(), "hosts with other folders would have other programs"
        assert os.environ[NO_LINES] == "1"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert bool(source_files(platform)) is (platform != "cpu"), "what is left out would be found"


def source_files(platform: str) -> set[bytes]:
    """The files that a program with a kernel for this platform names."""

    def add_one(x, y):
        y[...] = x[...] + 1

    jax.clear_caches()  # what was traced before knows its source
    x = jax.ShapeDtypeStruct((8, 128), np.float32)
    kernels = {
        "cpu": lambda x: x + 1,
        "gpu": lambda x: plgpu.kernel(add_one, x, grid=(1,), grid_names=("i",))(x),
        "tpu": lambda x: pl.pallas_call(add_one, out_shape=x)(x),
    }
    name = {"gpu": "cuda"}.get(platform, platform)
    lowered = jax.jit(kernels[platform]).trace(x).lower(lowering_platforms=(name,))
    text = lowered.as_text().replace("\\22", '"').encode()
    bodies = [base64.b64decode(body) for body in re.findall(rb'"body": *"([^"]*)"', text)]
    return {name for part in (text, *bodies) for name in re.findall(rb"[\w/.]+\.py\b", part)}


def test_addresses_and_secrets(tmp_path):
    config = EngineConfig(model="m", coordinator="[::1]:900", num_hosts=2)
    assert command_address(config) == ("::1", 901)
    assert command_address(EngineConfig(model="m", coordinator="h:9", num_hosts=2, command_port=70)) == ("h", 70)
    assert read_secret(config, {SECRET: GOOD.decode()}) == GOOD
    for environment in ({}, {SECRET: "short"}):
        with pytest.raises(ConfigError, match="at least 16 bytes"):
            read_secret(config, environment)
    path = tmp_path / "secret"
    path.write_bytes(GOOD + b"\n")
    config = EngineConfig(model="m", coordinator="h:9", num_hosts=2, host_secret_file=str(path))
    assert read_secret(config, {}) == GOOD
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(config, {})
