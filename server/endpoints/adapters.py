"""LoRA adapters are loaded and unloaded while the server runs: /v1/load_lora_adapter, /v1/unload_lora_adapter.

Both need the admin key. Requests that ask for an adapter already keep it when it is unloaded or replaced.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.adapters.registry import AdapterError
from jaxserve.config import ConfigError, LoRAModule
from jaxserve.server.endpoints.models import require_admin
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.middleware import ADAPTER_PATHS
from jaxserve.server.http.state import ServerState, read_body, state_of
from jaxserve.server.ipc.messages import LoadAdapter, UnloadAdapter
from jaxserve.server.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest

_load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


async def load_adapter(http: Request) -> Response:
    """POST /v1/load_lora_adapter. Answers when the adapter may be used."""
    state, root = _state(http)
    body = await read_body(http, _load_decoder)
    try:
        LoRAModule.of((body.lora_name, body.lora_path, body.base_model_name))
    except ConfigError as error:
        raise APIError(400, str(error), param="lora_name") from None
    if body.lora_name in state.settings.model_names:
        raise APIError(400, f"{body.lora_name!r} is the name of the model itself", param="lora_name")
    path = await state.off_loop(lambda: below(root, body.lora_path, "--lora-root", "lora_path"))
    if body.lora_name in state.client.adapters and not body.load_inplace:
        text = f"there is an adapter {body.lora_name!r} already; unload it first, or set load_inplace"
        raise APIError(400, text, param="lora_name")
    fields = body.lora_name, str(path), body.base_model_name, body.load_inplace
    try:
        await state.client.change_adapter(LoadAdapter, *fields)
        await state.all_api_servers_know()
    except AdapterError as error:
        raise APIError(400, str(error), param="lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(http: Request) -> Response:
    """POST /v1/unload_lora_adapter. New requests for the adapter are refused from now on."""
    state, _ = _state(http)
    body = await read_body(http, _unload_decoder)
    try:
        await state.client.change_adapter(UnloadAdapter, body.lora_name)
        await state.all_api_servers_know()
    except AdapterError as error:
        raise APIError(404, str(error), param="lora_name", code="model_not_found") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


HANDLERS = dict(zip(ADAPTER_PATHS, (load_adapter, unload_adapter), strict=True))


def _state(http: Request) -> tuple[ServerState, Path]:
    """The server's state and the folder of adapters. Raises APIError for a request that may not change adapters."""
    state = state_of(http)
    require_admin(http)
    _, info = state.require_ready()
    if not info.max_loras:
        raise APIError(404, "adapters are off; start the server with --enable-lora")
    if state.settings.lora_root is None:
        raise APIError(404, "adapters cannot be changed here; start the server with --lora-root DIR")
    return state, Path(state.settings.lora_root)


def below(root: Path, given: str, flag: str, param: str) -> Path:
    """The folder or file that `given` names, with symbolic links resolved. Raises APIError unless it and all files in
    it lie below `root`. Errors name the flag of the root and the parameter. Slow: call it off the event loop."""
    try:
        root = root.resolve(strict=True)
        path = (root / given).resolve()
        inside = path != root and path.is_relative_to(root)
        if inside and not path.exists():
            raise APIError(404, f"there is no {given[:256]!r} below {flag}", param=param)
        files = path.iterdir() if inside and path.is_dir() else ()
        inside = inside and all(file.resolve().is_relative_to(root) for file in files)
    except (OSError, ValueError, RuntimeError) as error:
        raise APIError(400, f"{param} cannot be used: {error}", param=param) from None
    if not inside:
        raise APIError(400, f"{param} must name a folder or a file below {flag}", param=param)
    return path
