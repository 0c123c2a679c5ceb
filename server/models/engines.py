"""The models of a server in processes: started when a request asks for one, stopped as `residency` says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request

from jaxserve import heap
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.server.http.counts import STREAMS
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.listing import Listed, ModelState
from jaxserve.server.http.models_settings import ModelsSettings
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.sse import run_until_disconnect
from jaxserve.server.http.state import ServerState, key_of
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.models import sizing
from jaxserve.server.models.catalog import Model
from jaxserve.server.models.metrics import Device, Row, render
from jaxserve.server.models.residency import Place, Residency
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.server.process.served_model import OwnEngine, ServedModel
from jaxserve.text.chat_template import read_chat_template
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

FAILED_SECONDS = 5.0  # from a failed start to the next attempt
TOO_LARGE_SECONDS = 60.0  # the same for a model that does not fit, whose size is computed again
_LOOK_SECONDS = 0.02  # between two looks whether an engine has been started again
_HOST = "host"  # the device whose memory counts on CPU
_MOST_LISTED = 16  # names of models in an error
# Makes the settings of a model of its flags: of its engine, and those of the server that are the model's own.
Configure = Callable[[Model], tuple[EngineConfig, dict[str, Any]]]


@dataclass(eq=False)
class _Waiter:
    """A request that waits for its model to start. `state` says whether the residency counts it as running."""

    done: asyncio.Future[None]
    state: Literal["waiting", "running", "failed"] = "waiting"


@dataclass(eq=False)
class _Served:
    """One of the models, with what exists of it while it is in memory.

    Attributes:
      metrics: of all its engines, one after the other.
      place: None before its size is known for the first time.
      config, settings, share: what it starts with; None before they are known.
      state, serving, process: None while it is not in memory.
      measuring: set when its size is known, or known not to be; None: nobody computes it.
      path: its files, if the source is a path; None: they are in the hub's cache or bundled.
      gone: set when its process has ended.
      reason: why it failed, and `retry_at` when it may be tried again.
      info: what its latest engine said when it was ready.
    """

    model: Model
    metrics: Metrics
    path: Path | None = None
    place: Place | None = None
    config: EngineConfig | None = None
    settings: ServerSettings | None = None
    share: sizing.Answer | None = None
    state: ServerState | None = None
    serving: ServedModel | None = None
    process: EngineProcess | None = None
    keeping: asyncio.Task[None] | None = None
    measuring: asyncio.Event | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: list[_Waiter] = field(default_factory=list)
    reason: str = ""
    too_large: bool = False
    retry_at: float = -math.inf
    info: Ready | None = None
    starts: int = 0
    failures: int = 0
    start_seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.model.name


class SeveralState(ServerState):
    """The state of the server itself, which belongs to no model. Handlers get it for requests that name none."""

    @property
    def status(self) -> str:
        assert isinstance(self.models, Models)
        if self.draining or self.leaving:
            return "draining"
        return "ready" if self.models.is_ready else "loading"

    def require_loaded(self) -> Any:
        """Raises APIError (400): the request names no model."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        raise self.unnamed()

    def check_model(self, name: str | None) -> Any:
        """Raises APIError (400): the request names no model."""
        raise self.unnamed()

    def unnamed(self) -> APIError:
        return APIError(
            400,
            "this server has several models: name one as `model` in the body, or in the query of an endpoint without a "
            "body; GET /v1/models lists them",
            param="model",
        )


class Models:
    """The models of a server; see `listing.ServerModels` for what handlers ask, and `api_server.Served` for the server.

    configure: makes a model's settings of its flags. Raises ConfigError, ValueError or OSError.
    """

    def __init__(
        self,
        catalog: Sequence[Model],
        server: ServerState,
        settings: ModelsSettings,
        configure: Configure,
        engine_class: str,
    ):
        self._server = server
        self._settings = settings
        self._configure = configure
        self._engine_class = engine_class
        prefix = server.settings.metrics_prefix
        self._models = {model.name: _Served(model, Metrics(model.name, prefix)) for model in catalog}
        self._names = {name: self._models[model.name] for model in catalog for name in model.names}
        self._residency = Residency({})
        self.shown: dict[str, bytes] = {}
        self._memory: sizing.Memory | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._frozen = False
        self._lost = 0  # engines that have died, of models that were stopped since

    # What handlers ask

    def listed(self, key: ApiKey | None = None) -> list[Listed]:
        return [self._listed(served) for served in self._models.values() if _may_use(key, served.model)]

    def find(self, name: str, key: ApiKey | None = None) -> Listed:
        return self._listed(self._find(name, key))

    @contextlib.asynccontextmanager
    async def hold(self, http: Request, name: str) -> AsyncIterator[ServerState]:
        served = self._find(name, key_of(http))
        if not self._enters(served):
            await run_until_disconnect(http.receive, self._enter(served))
        try:
            if served.state is not None and served.state.client.status == "restarting":
                await run_until_disconnect(http.receive, self._revived(served, served.state.client))
            if served.state is None:  # it has died since
                raise unavailable(f"the model {name!r} is gone; try again", "engine_unavailable")
            yield served.state
        finally:
            self._leave(served)

    def keep(self, name: str, seconds: float) -> None:
        if (place := self._find(name, None).place) is not None:
            place.keep_alive = seconds
            self._changed.set()

    def resident(self, name: str, key: ApiKey | None) -> ServerState:
        """The state of a model that is in memory. Raises APIError: 404 for an unknown one, 503 for one that is not in
        memory."""
        served = self._find(name, key)
        if served.state is None:
            raise APIError(503, f"the model {name!r} is not loaded", param="model", code="model_not_loaded")
        return served.state

    async def load(self, name: str) -> None:
        served = self._find(name, None)
        served.retry_at = -math.inf
        if not self._enters(served):
            await self._enter(served)
        self._leave(served)

    async def unload(self, name: str) -> None:
        served = self._find(name, None)
        if served.place is None:
            return
        gone = served.gone
        self._residency.unload(served.name)
        self._changed.set()
        if served.process is None:
            return
        try:
            await asyncio.wait_for(gone.wait(), self._settings.model_wait)
        except TimeoutError:
            text = f"requests of {name!r} still run; it is unloaded when they have ended, and takes no new ones"
            raise unavailable(text, "model_busy") from None

    def adapters_of(self, name: str) -> list[str]:
        served = self._models[name]
        if served.state is not None and served.state.client.is_ready:
            return list(served.state.client.adapters)
        return [] if served.config is None else [module.name for module in served.config.lora_modules]

    def render_metrics(self) -> bytes:
        """The exposition text of /metrics: those of all models."""
        rows = [
            Row(
                self._listed(served),
                served.metrics,
                waiting=0 if served.place is None else served.place.waiting,
                starts=served.starts,
                failures=served.failures,
                start_seconds=served.start_seconds,
            )
            for served in self._models.values()
        ]
        taken = {name: Device(most, self._residency.used(name)) for name, most in self._residency.budget.items()}
        return render(self._server.metrics, rows, taken)

    @property
    def is_ready(self) -> bool:
        """Whether each pinned model is ready, or has failed."""
        pinned = [served for served in self._models.values() if served.model.pinned]
        return all(served.starts or served.failures or served.reason for served in pinned)

    # What the API server asks

    @property
    def states(self) -> list[ServerState]:
        return [served.state for served in self._models.values() if served.state is not None]

    @property
    def losses(self) -> int:
        return self._lost + sum(state.client.losses for state in self.states)

    async def run(self) -> None:
        """Never returns."""
        self._measure(list(self._models.values()))
        now = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            for kind, name in self._residency.plan(now()):
                served = self._models[name]
                match kind:
                    case "start":
                        self._spawn(self._start(served))
                    case "stop":
                        self._spawn(self._stop(served))
                    case "refuse":
                        text = f"it needs {_text(served)}, and pinned models leave {self._room(served)}"
                        self._fail(served, text, too_large=True)
            wait = self._residency.due(now()) - now()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait == math.inf else max(wait, 0.001))

    def refuse_new(self) -> None:
        for state in (self._server, *self.states):
            state.draining = True
        for served in self._models.values():
            for waiter in served.waiters:
                if not waiter.done.done():
                    waiter.done.set_exception(unavailable("the server is shutting down", "shutting_down"))

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(served) for served in self._models.values() if served.process is not None))

    def kill(self) -> None:
        for served in self._models.values():
            if served.process is not None:
                served.process.__exit__(SystemExit)

    # Names

    def _find(self, name: str, key: ApiKey | None) -> _Served:
        served = self._names.get(name) or self._with_adapter(name)
        if served is not None and _may_use(key, served.model):
            return served
        allowed = [other for other, one in self._names.items() if _may_use(key, one.model)]
        listed = ", ".join(map(repr, allowed[:_MOST_LISTED])) or "none"
        more = ", …" if len(allowed) > _MOST_LISTED else ""
        whose = "this server has" if key is None or key.models is None else "this key may use"
        raise APIError(
            404,
            f"the model {name[:256]!r} does not exist; {whose} {listed}{more}",
            param="model",
            code="model_not_found",
        )

    def _with_adapter(self, name: str) -> _Served | None:
        """The model whose LoRA adapter has this name."""
        for served in self._models.values():
            modules = () if served.config is None else served.config.lora_modules
            if any(module.name == name for module in modules):
                return served
            if served.state is not None and name in served.state.client.adapters:
                return served
        return None

    def _listed(self, served: _Served) -> Listed:
        place = served.place
        kind: ModelState = "failed" if served.reason else "unloaded"
        expires = None
        if place is not None:
            if place.state in ("leaving", "stopping"):
                kind = "unloading"
            elif place.state in ("starting", "ready"):
                kind = place.state
            elif place.asked is not None:
                kind = "waiting"
            if place.state == "ready":
                now = asyncio.get_running_loop().time()
                expires = max(place.idle_until() - now, 0.0) if not place.running else place.keep_alive
                expires = math.inf if place.pinned else expires
        model = served.model
        size = served.share.total if served.share is not None and served.share.error is None else None
        reason = served.reason if kind == "failed" else ""
        return Listed(model.name, model.aliases, model.source, model.pinned, kind, reason, size, expires, served.info)

    # Requests

    def _enters(self, served: _Served) -> bool:
        """Counts a request of a model that is ready; False: it must wait."""
        place = served.place
        if place is None or place.state != "ready":
            return False
        return self._residency.ask(served.name, self._now())

    async def _enter(self, served: _Served) -> None:
        """Counts a request once its model is ready. Raises APIError (503) if that does not come about."""
        waiter: _Waiter | None = None
        limit = self._settings.model_wait
        try:
            async with asyncio.timeout(limit):
                await self._known(served)
                if self._server.draining:
                    raise unavailable("the server is shutting down", "shutting_down")
                assert served.config is not None
                if len(served.waiters) >= served.config.queue_limit:
                    text = f"{len(served.waiters)} requests wait for {served.name!r} to start already"
                    raise unavailable(text, "queue_full")
                if self._residency.ask(served.name, self._now()):
                    return
                waiter = _Waiter(asyncio.get_running_loop().create_future())
                served.waiters.append(waiter)
                self._changed.set()
                await waiter.done
        except BaseException as error:
            if waiter is not None:
                self._withdraw(served, waiter)
            if isinstance(error, TimeoutError):
                raise self._late(served, limit) from None
            raise

    async def _revived(self, served: _Served, client: EngineClient) -> None:
        """Waits while a model's engine is being started again. Raises APIError (503) if that takes too long."""
        limit = self._settings.model_wait
        try:
            async with asyncio.timeout(limit):
                while client.status == "restarting":
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise self._late(served, limit) from None

    def _late(self, served: _Served, limit: float) -> APIError:
        kind = self._listed(served).state
        why = {
            "waiting": "waits for memory that other models use: they have requests",
            "unloading": "is being unloaded",
            "starting": "is still starting",
            "ready": "is being started again",
        }.get(kind, "is not known yet")
        text = f"the model {served.name!r} {why}, after {limit:g} s; try again"
        return APIError(503, text, param="model", code="model_starting", headers={"Retry-After": "5"})

    def _withdraw(self, served: _Served, waiter: _Waiter) -> None:
        """A request that waited, or was just let in, has ended."""
        if waiter.state == "running":
            self._leave(served)
        elif waiter.state == "waiting":
            served.waiters.remove(waiter)
            self._residency.give_up(served.name)
            self._changed.set()

    def _leave(self, served: _Served) -> None:
        self._residency.ended(served.name, self._now())
        if not self._residency.places[served.name].running:
            self._changed.set()

    async def _known(self, served: _Served) -> None:
        """Waits until the model's size is known. Raises APIError (503) if it cannot be served."""
        if served.reason and self._now() >= served.retry_at and served.measuring is None:
            served.reason = ""
            served.too_large = False
            if served.share is None or served.share.error is not None:
                served.share = None
                self._measure([served])
        if served.measuring is not None:
            await served.measuring.wait()
        if served.reason:
            raise self._refusal(served)

    def _refusal(self, served: _Served) -> APIError:
        text = f"the model {served.name!r} cannot be served: {served.reason}"
        if served.too_large:
            return APIError(503, text, param="model", code="model_too_large")
        wait = max(math.ceil(served.retry_at - self._now()), 1)
        return APIError(503, text, param="model", code="model_failed", headers={"Retry-After": str(wait)})

    def _fail(self, served: _Served, reason: str, *, too_large: bool = False) -> None:
        """Notes that a model cannot be served, and tells the requests that the residency does not count any more."""
        self._note_failure(served, reason, too_large)
        for waiter in served.waiters:
            waiter.state = "failed"
            if not waiter.done.done():
                waiter.done.set_exception(self._refusal(served))
        served.waiters.clear()

    def _note_failure(self, served: _Served, reason: str, too_large: bool = False) -> None:
        log.error("the model %s cannot be served: %s", served.name, reason)
        served.reason = reason
        served.too_large = too_large
        served.retry_at = self._now() + (TOO_LARGE_SECONDS if too_large else FAILED_SECONDS)

    # Sizes

    def _measure(self, several: list[_Served]) -> None:
        """Has the sizes of models computed."""
        for served in several:
            served.measuring = asyncio.Event()
        self._spawn(self._compute_sizes(several))

    async def _compute_sizes(self, several: list[_Served]) -> None:
        try:
            known: list[tuple[_Served, EngineConfig]] = []
            for served in several:
                try:
                    configured = partial(self._configured, served.model)
                    config, served.settings = await self._server.off_loop(configured)
                    served.config = config
                    path = Path(config.model).expanduser()
                    served.path = path if path.exists() else None
                    known.append((served, config))
                except (ValueError, OSError) as error:
                    self._fail(served, str(error))
            try:
                await self._ask_sizes(known)
            except OSError as error:
                log.error("%s; asking again", error)
                await self._ask_sizes([one for one in known if one[0].share is None])
        except OSError as error:
            for served in several:
                if served.share is None and not served.reason:
                    self._fail(served, str(error))
        finally:
            for served in several:
                self._measured(served)

    def _measured(self, served: _Served) -> None:
        if served.measuring is not None:
            served.measuring.set()
            served.measuring = None
        self._changed.set()

    def _configured(self, model: Model) -> tuple[EngineConfig, ServerSettings]:
        config, own = self._configure(model)
        if (template := own.get("chat_template")) is not None:
            own = own | {"chat_template": read_chat_template(template)}
        return config, dataclasses.replace(self._server.settings, model_names=model.names, **own)

    async def _ask_sizes(self, known: list[tuple[_Served, EngineConfig]]) -> None:
        if not known:
            return
        questions = [(config, served.model.memory) for served, config in known]
        most = self._settings.models_memory
        given = int(most * 2**30) if most is not None else None
        if self._memory is not None:  # what is free now is less: models are in memory
            given = self._memory.most
        models = iter(known)
        async with contextlib.aclosing(sizing.ask(questions, given)) as answers:
            async for answer in answers:
                if isinstance(answer, sizing.Memory):
                    self._memory = self._memory or answer
                else:
                    served, config = next(models)
                    self._take_size(served, config, answer)
                    self._measured(served)

    def _take_size(self, served: _Served, config: EngineConfig, answer: sizing.Answer) -> None:
        served.share = answer
        if answer.error is not None:
            self._fail(served, answer.error, too_large=answer.too_large)
            return
        assert self._memory is not None
        if served.place is None:
            devices: Iterable[str] = (_HOST,)
            if self._memory.platform != "cpu":
                count = config.tensor_parallel_size * config.data_parallel_size
                devices = served.model.devices or map(str, range(count))
            keep = self._usual_keep_alive(served)
            served.place = self._residency.add(served.name, devices, pinned=served.model.pinned, keep_alive=keep)
            for device in served.place.devices:
                self._residency.budget.setdefault(device, self._memory.most)
        served.place.size = answer.total
        log.info("the model %s takes %s", served.name, answer.text)
        if served.model.pinned and not served.starts:
            self._residency.want(served.name, self._now())

    def _usual_keep_alive(self, served: _Served) -> float:
        """For how long a model stays without a request, unless a request says otherwise."""
        if (keep := served.model.keep_alive) is not None:
            return keep
        return math.inf if self._settings.keep_alive < 0 else self._settings.keep_alive

    def _room(self, served: _Served) -> str:
        return sizing.size(self._residency.room(served.name))

    # Processes

    async def _start(self, served: _Served) -> None:
        began = self._now()
        log.info("starting the model %s", served.name)
        assert served.settings is not None
        assert served.place is not None
        served.place.keep_alive = self._usual_keep_alive(served)  # what requests have asked for ended with its process
        for left in reversed(range(1 + served.settings.engine_restarts)):
            if not (reason := await self._try(served)):
                break
            served.failures += 1
            killed = served.process is not None and await asyncio.to_thread(served.process.was_killed)
            await self._end(served)
            if not killed or not left:
                break
            log.error("the process of the model %s was killed as it started; starting another", served.name)
        if reason:
            self._residency.failed(served.name)
            self._fail(served, reason)
            self._changed.set()
            return
        assert served.state is not None
        served.starts += 1
        if not self._frozen:  # once: what belongs to a model must go with it
            heap.freeze()
            self._frozen = True
        served.reason = ""
        served.start_seconds = self._now() - began
        served.info = served.state.client.info
        served.state.client.on_stream = partial(self._on_stream, served)
        served.keeping = self._spawn(self._keep(served))
        self._residency.started(served.name, self._now())
        for waiter in served.waiters:
            waiter.state = "running"
            if not waiter.done.done():
                waiter.done.set_result(None)
        served.waiters.clear()
        self._changed.set()
        log.info("the model %s is ready after %.1f s", served.name, served.start_seconds)

    async def _try(self, served: _Served) -> str:
        """Starts a model's process, and waits until it is ready. Returns why it is not; "" if it is."""
        limit = self._settings.model_start_limit
        try:
            async with asyncio.timeout(limit):
                await self._launch(served)
        except TimeoutError:
            return f"it was not ready within {limit:g} s (--model-start-limit)"
        except (EngineDeadError, CheckpointError, ValueError, OSError) as error:
            return str(error) or type(error).__name__
        except Exception as error:
            log.exception("a model could not be started")
            return f"{type(error).__name__}: {error}"
        return ""

    async def _launch(self, served: _Served) -> None:
        """Starts a model's process, and waits until it is ready."""
        assert served.settings is not None
        if served.path is not None and not served.path.exists():
            raise ConfigError(f"no such model: {served.path} was there when the server started, and is gone")
        config = self._config(served)
        state = self._state(served, served.settings)
        environment = self._environment(served)
        served.gone = asyncio.Event()
        served.process = EngineProcess(config, self._engine_class, name=served.name, environment=environment)
        served.state = state
        served.serving = ServedModel(state, OwnEngine(served.process), config)
        await served.serving.load()

    def _config(self, served: _Served) -> EngineConfig:
        """A model's settings, with its share of the memory. On a GPU the engine itself fits the cache into the share,
        by what its programs turn out to need."""
        share = served.share
        assert served.config is not None
        assert share is not None
        limit = served.config.max_waiting or served.config.queue_limit
        config = dataclasses.replace(served.config, max_waiting=limit)
        if share.utilization:
            return dataclasses.replace(config, memory_utilization=share.utilization)
        return dataclasses.replace(config, kv_pages=share.pages)

    def _state(self, served: _Served, settings: ServerSettings) -> ServerState:
        server = self._server
        state = ServerState(
            settings,
            EngineClient(),
            served.metrics,
            created=server.created,
            counts=server.counts,
            text_threads=server.text_threads,
        )
        state.responses = server.responses
        state.connections = server.connections
        state.bodies = server.bodies
        state.accounts = server.accounts
        state.models = self
        state.draining = server.draining
        state.leaving = server.leaving
        return state

    def _environment(self, served: _Served) -> dict[str, str]:
        """The variables that give a model's process its GPUs."""
        assert served.place is not None
        if served.place.devices == (_HOST,):
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        all_devices = visible.split(",") if visible else []
        chosen = [all_devices[int(one)] if int(one) < len(all_devices) else one for one in served.place.devices]
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}

    async def _keep(self, served: _Served) -> None:
        """Supervises a model's engine until the model is stopped or its engine has died too often."""
        assert served.serving is not None
        assert served.place is not None
        try:
            await served.serving.keep()
        except EngineDeadError as error:
            if served.place.state == "stopping":
                return
            self._residency.died(served.name)
            served.failures += 1
            self._note_failure(served, str(error))  # requests that wait already get another engine
            served.keeping = None
            await self._end(served)
            self._residency.stopped(served.name)
            self._changed.set()

    async def _stop(self, served: _Served) -> None:
        log.info("stopping the model %s", served.name)
        await self._end(served)
        self._residency.stopped(served.name)
        self._changed.set()

    async def _end(self, served: _Served) -> None:
        """Ends a model's process, and waits until its memory is free."""
        if served.keeping is not None:
            served.keeping.cancel()
            await asyncio.gather(served.keeping, return_exceptions=True)
            served.keeping = None
        process = served.process
        if process is None:
            return
        if served.serving is not None and served.state is not None:
            if not served.state.client.is_ready:
                await asyncio.to_thread(process.kill)
            await served.serving.leave()
            served.state.client.fail_streams("the model is not in memory any more")
        await asyncio.to_thread(process.__exit__, None, None, None)
        served.metrics.totals.on_end()
        if served.state is not None:
            self._lost += served.state.client.losses
        served.state = None
        served.serving = None
        served.process = None
        served.gone.set()

    def _on_stream(self, served: _Served, change: int) -> None:
        """Counts work of an engine, which goes on after its request if it was asked for in the background."""
        self._server.counts.add(STREAMS, change)
        if change > 0:
            self._residency.began(served.name)
        else:
            self._leave(served)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("a task of the server's models failed")


def _may_use(key: ApiKey | None, model: Model) -> bool:
    return key is None or key.may_use(model.names)


def _text(served: _Served) -> str:
    return served.share.text if served.share is not None else "more memory"
