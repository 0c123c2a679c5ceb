"""A local stand-in for the hub: the routes that huggingface_hub's client uses, with commits of files in memory."""

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """commits: repository -> commit hash -> files. refs: repository -> branch or tag -> commit hash."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    downloaded: list[str] = field(default_factory=list)
    port: int = 0

    def commit(self, repo: str, files: dict[str, bytes], *refs: str) -> str:
        made = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repo, {})[made] = files
        self.refs.setdefault(repo, {}).update(dict.fromkeys(refs, made))
        return made

    def environment(self, cache) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if repo not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}, b"{}"
        name = rest[1] if len(rest) > 1 else "main"
        commit = name if name in self.commits[repo] else self.refs[repo].get(name)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"no revision {name}"}, b"{}"
        files = self.commits[repo][commit]
        if not api:
            data = files["/".join(rest[2:])]
            etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            return 200, etag, data
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": [{"rfilename": f} for f in files]}).encode()


@contextlib.contextmanager
def running_hub():
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if self.command == "GET" and "/resolve/" in self.path:
                hub.downloaded.append(self.path.split("/", 5)[-1])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
