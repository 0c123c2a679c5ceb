"""The hosts of a replica as processes of this machine, each with devices of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from serving import free_port, wait_until

SECRET = "a secret of the tests' hosts"
# So small that few programs are compiled.
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "kv_pages": 40, "page_size": 8}
MAIN = "import sys; from jaxserve.commands.cli import main; sys.exit(main())"
PROMPTS = [list(range(5, 9 + 7 * i)) for i in range(4)]
WISHES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}]


def flags_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]


def bodies(max_tokens: int = 12) -> list[dict[str, Any]]:
    """Requests, greedy and sampled."""
    common = {"model": "m", "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    wishes = [WISHES[i % len(WISHES)] for i in range(len(PROMPTS))]
    return [common | {"prompt": prompt, "seed": i} | wishes[i] for i, prompt in enumerate(PROMPTS)]


def expected(folder: Path, devices: int, **settings: Any) -> list[list[int]]:
    """The answers of one process with as many devices."""
    from jaxserve.llm import LLM
    from jaxserve.types import SamplingParams

    llm = LLM(str(folder), tensor_parallel_size=devices, **SIZES | settings)
    params = [
        SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"], ignore_eos=True, **WISHES[i % len(WISHES)])
        for i, body in enumerate(bodies())
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Host:
    """A process that runs `arguments` as a host of a replica, and its log."""

    def __init__(self, arguments: list[str], log: Path, devices: int, secret: str, folder: Path | None = None):
        self.log = log
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAXSERVE_HOST_SECRET": secret}
        options: Any = {"env": os.environ | own, "cwd": folder, "start_new_session": True}
        with log.open("w") as output:
            self.process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, **options)

    def wait(self, seconds: float = 30) -> int:
        """The process's exit code."""
        return self.process.wait(seconds)

    def said(self) -> str:
        return self.log.read_text()

    def signal_all(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        os.killpg(self.process.pid, number)

    def engine(self) -> int:
        """The engine's process, of the first host of a server."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)


class Replica:
    """Hosts that together run one command, by default `jaxserve serve`."""

    def __init__(self, folder: Path, logs: Path, count: int = 2, devices: int = 1, **settings: Any):
        self._folder, self._logs, self._devices, self.hosts = folder, logs, devices, list[Host]()
        self._port, self.http = free_port(), free_port()
        ports = {"coordinator": f"127.0.0.1:{self._port}", "command_port": free_port()}
        self._settings = SIZES | ports | {"num_hosts": count} | settings
        self.url = f"http://127.0.0.1:{self.http}"

    def start(
        self, host_id: int, command: tuple[str, ...] = (), *, secret: str = SECRET, folder: Path | None = None,
        **changes: Any,
    ) -> Host:  # fmt: skip
        """Starts one host. `command` replaces `serve`."""
        settings = flags_of(self._settings | {"host_id": host_id} | changes)
        serve = ("serve", str(folder or self._folder), f"--port={self.http}", "--served-model-name=m")
        return self.run([sys.executable, "-c", MAIN, *(command or serve), *settings], secret)

    def run(self, arguments: list[str], secret: str = SECRET, folder: Path | None = None) -> Host:
        """Starts a host that runs another program, in a folder."""
        host = Host(arguments, self._logs / f"host{len(self.hosts)}.log", self._devices, secret, folder)
        self.hosts.append(host)
        return host

    def wait_ready(self, seconds: float = 120) -> None:
        def ready() -> bool:
            assert self.hosts[0].process.poll() is None, self.said()
            try:
                return httpx.get(self.url + "/ready", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, seconds, self.said())

    def said(self) -> str:
        return "\n".join(f"--- host process {i}:\n{host.said()}" for i, host in enumerate(self.hosts))

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60)

    def answers(self) -> list[list[int]]:
        """The tokens for `bodies`, which are asked for at the same time."""
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(self.ask, bodies()))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    def error_when(self, happens: Any) -> tuple[str, float]:
        """The error of a request during which something happens, and the seconds until it came."""
        with ThreadPoolExecutor() as pool:
            # So many completions that they are not all there before it happens, two at a time.
            answer = pool.submit(self.ask, bodies(100)[0] | {"prompt": [7] * 20, "n": 64})
            time.sleep(0.3)
            happens()
            began = time.monotonic()
            found = answer.result()
        assert found.status_code == 503, found.text
        return found.json()["error"]["message"], time.monotonic() - began

    def stop(self) -> None:
        for host in self.hosts:
            if host.process.poll() is None:
                host.signal_all(signal.SIGKILL)
                host.process.wait()
