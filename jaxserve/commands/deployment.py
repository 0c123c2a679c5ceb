"""`jaxserve bundle | lock | diff`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.commands.arguments import add_command, engine_config
from jaxserve.commands.config_file import read_config
from jaxserve.config import ConfigError
from jaxserve.text.chat_template import read_chat_template

SECONDS = 10  # longest time to wait for a server


def add_commands(commands: Any, add_serve_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    """add_serve_flags adds the model and the flags of `serve` to a command."""
    bundle = add_command(commands, "bundle", run_bundle, "compile a model and write a folder that starts at once")
    bundle.add_argument("--target", default="here", metavar="NAME",
                        help="devices that the bundle is for, such as h200x1, which need not be here; here: those of "
                        "this machine")  # fmt: skip
    bundle.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    add_serve_flags(bundle)
    lock = add_command(commands, "lock", run_lock, "write a record of a deployment, without starting it")
    lock.add_argument("--out", type=Path, default=Path("jaxserve.lock"), metavar="FILE", help="file to write")
    add_serve_flags(lock)
    diff = add_command(commands, "diff", run_diff, "show in what two deployments differ")
    diff.add_argument("one", help="a record, or the address of a server")
    diff.add_argument("other", help="another one")
    diff.add_argument("--api-key", metavar="KEY", help="bearer key for servers: the admin key if there is one; also "
                      "read from JAXSERVE_API_KEY")  # fmt: skip


def template_of(args: argparse.Namespace) -> str | None:
    return None if args.chat_template is None else read_chat_template(args.chat_template)


def run_bundle(args: argparse.Namespace) -> int:
    from jaxserve.bundles.container import read_key
    from jaxserve.commands.bundling import make_bundle

    flags = {name: value for name, value in args.flags.items() if name != "bundle-key-file"}
    if (template := template_of(args)) is not None:
        flags["chat-template"] = template
    key = read_key(args.bundle_key_file)
    digest = make_bundle(engine_config(args), args.out, target=args.target, flags=flags, key=key)
    print(f"{args.out}: bundle {digest[:16]} of {args.model}; start it with: jaxserve serve {args.out}")
    return 0


def run_lock(args: argparse.Namespace) -> int:
    from jaxserve.deployment import record

    record.write(args.out, record.full(engine_config(args), args.flags, template_of(args)))
    print(f"{args.out}: start it with: jaxserve serve --config {args.out}")
    return 0


def locked(args: argparse.Namespace) -> dict[str, Any]:
    """The record of what `serve` was told. Writes it if asked to. Raises ConfigError if it is not that of --config."""
    from jaxserve.deployment import record

    config = engine_config(args)
    template = template_of(args)
    if args.lock is None and args.write_lock is None:
        return record.describe(config, args.flags, template)
    found = record.full(config, args.flags, template)
    if args.lock is not None:
        record.verify(args.lock, found, args.config)
    if args.write_lock is not None:
        record.write(args.write_lock, found)
    return found


def run_diff(args: argparse.Namespace) -> int:
    """Returns 1 if the two differ, as diff does."""
    from jaxserve.deployment.record import differences

    key = args.api_key or os.environ.get("JAXSERVE_API_KEY")
    one, other = (_record(name, key) for name in (args.one, args.other))
    if "files" not in one["model"] or "files" not in other["model"]:  # a server that was started without a record
        for side in (one, other):
            for part, name in (("model", "files"), ("model", "format"), ("tokenizer", "sha256")):
                side[part].pop(name, None)
        print("one of them has no hashes of the model's files; these are not compared", file=sys.stderr)
    found = list(differences(one, other))
    for name, before, now in found:
        print(f"{name}\n  - {before}\n  + {now}")
    return 1 if found else 0


def _record(name: str, key: str | None) -> dict[str, Any]:
    """The record in a file, or that of a running server."""
    from jaxserve.deployment.record import is_record

    if "://" not in name:
        values = read_config(Path(name))
        if not is_record(values):
            raise ConfigError(f"{name} is no record of a deployment; `jaxserve lock` writes one")
        return values
    request = urllib.request.Request(f"{name.rstrip('/')}/server_info")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            info = json.load(answer)
    except (urllib.error.URLError, ValueError, OSError) as error:
        raise ConfigError(f"{name} does not answer with its record: {error}") from None
    if info.get("record") is None:
        raise ConfigError(f"{name} shows its record only to the admin key (--api-key)")
    return info["record"]
