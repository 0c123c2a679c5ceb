"""A headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import wait_until
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


class Page:
    """One tab. `errors` gathers what it says on its console and what its Content-Security-Policy refuses."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                self.errors.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def goto(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until an expression holds."""
        wait_until(lambda: self.run(f"!!({condition})"), seconds, f"never: {condition}")

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes[key], **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Moves the mouse to a place in an element, as fractions of its size."""
        element = f"document.querySelector({selector!r})"
        self.run(f"{element}.scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        box = self.run(f"(r => [r.x, r.y, r.width, r.height])({element}.getClientRects()[0])")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + x * box[2], y=box[1] + y * box[3])

    def choose(self, selector: str, *files: Path) -> None:
        """Chooses files in an input for them, as the browser's dialog does."""
        document = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop(self, selector: str, *files: Path) -> None:
        """Drags files to the middle of an element, and drops them there."""
        middle = "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        x, y = self.run(f"{middle}(document.querySelector({selector!r}).getBoundingClientRect())")
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def paste_png(self, data: bytes) -> None:
        """Copies a picture to the browser's clipboard, and pastes it where the focus is."""
        self.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        self.send("Page.bringToFront")
        text = base64.b64encode(data).decode()
        blob = f"new Blob([Uint8Array.from(atob('{text}'), (c) => c.charCodeAt(0))], {{type: 'image/png'}})"
        self.run(f"navigator.clipboard.write([new ClipboardItem({{'image/png': {blob}}})])")
        key = {"key": "v", "code": "KeyV", "modifiers": 2, "windowsVirtualKeyCode": 86}
        self.send("Input.dispatchKeyEvent", type="keyDown", commands=["paste"], **key)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """The window's size in CSS pixels, and what the reader likes better."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, **options: Any) -> None:
        data = self.send("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    """A tab in a browser of its own, whose profile lies in `folder`."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--disable-background-networking",
        "about:blank",
    ]
    process = subprocess.Popen([CHROMIUM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        announced = folder / "DevToolsActivePort"
        wait_until(lambda: announced.is_file() and len(announced.read_text().split()) == 2, 30, "no browser")
        port = announced.read_text().split()[0]
        (tab, *_) = [t for t in httpx.get(f"http://127.0.0.1:{port}/json").json() if t["type"] == "page"]
        with connect(tab["webSocketDebuggerUrl"], max_size=2**26) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)
        time.sleep(0.1)
