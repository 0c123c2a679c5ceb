"""A bundle's folder: its files, their digests, and whether it may be trusted. Imports no JAX.

    bundle.json      the manifest: what the bundle was made for, and the size and SHA-256 of every other file
    bundle.sha256    the SHA-256 of bundle.json, as `sha256sum -c` reads it; it names the bundle
    bundle.mac       HMAC-SHA256 of bundle.json under a key of the operator, if there was one
    model/           config.json, tokenizer, chat template and other settings of the model
    weights.json     the form of the weights: trees, shapes, shardings, and where each shard lies
    weights/         the bytes of shards, each aligned to 64 bytes, so that they are mapped and not read
    encoder.json     the form of the image encoder's weights, for a model that sees; their shards are in encoder/
    programs.json    the arguments and results of compiled programs
    programs/        XLA's serialized executables
    checks.json      stamps of the checks that the kernels have passed, if it was made on the devices that it is for
    libraries/       the built C++ kernels, for a CPU

Executables and libraries are code. They are loaded only if nobody but this user or root can write to the bundle, or if
its MAC is right; and only from the very bytes whose digest was checked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import contents_of, open_regular, read_bytes, shown
from jaxserve.checkpoints.hub import BUNDLE, BUNDLE_MODEL

FORMAT = 1
DIGEST = "bundle.sha256"
MAC = "bundle.mac"
WEIGHTS = "weights.json"
ENCODER = "encoder.json"
PROGRAMS = "programs.json"
STAMPS = "checks.json"
MODEL = BUNDLE_MODEL
KERNELS = "kernels"  # entry of the environment: the kernels that were chosen by measurement, `tuning.choices`
MAX_MANIFEST = 2**24  # bytes
KEY_BYTES = 16  # the shortest key of a MAC
_PIECE = 2**22  # bytes that are hashed at a time


class BundleError(CheckpointError):
    """A bundle that is damaged, or cannot be used here."""


class File(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of bundle.json.

    model: the model as it was named when the bundle was made. revision: its commit on the hub, if it has one.
    target: the devices that it is for, such as "cpu" or "h200x1".
    environment: see `environment.describe`. settings: fields of EngineConfig, without `model`.
    pages: KV pages, a part of the programs' shapes. longest: tokens of the longest request.
    flags: the flags of `jaxserve serve` that the bundle starts with.
    source: what the weights were made from: the SHA-256 of each of its files.
    """

    format: int
    model: str
    target: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    pages: int
    longest: int
    files: dict[str, File]
    source: dict[str, str]
    flags: dict[str, Any] = {}
    revision: str | None = None


class Bundle:
    """A bundle whose manifest has been read and whose digest is right. Files are checked when they are asked for.

    Attributes:
      digest: SHA-256 of the manifest, which names the bundle with all its files.
      signed: whether the MAC was checked against the operator's key.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, signed: bool):
        self.path = path
        self.manifest = manifest
        self.digest = digest
        self.signed = signed

    @classmethod
    def open(cls, path: Path, key: bytes | None = None) -> Bundle:
        """Raises BundleError for a manifest that is damaged, of another format, or, with a key, without the right
        MAC."""
        data = _read(path / BUNDLE)
        digest = hashlib.sha256(data).hexdigest()
        if _read(path / DIGEST) != _digest_line(digest):
            raise BundleError(f"{path / BUNDLE} is damaged: its SHA-256 is not the one in {DIGEST}")
        if key is not None:
            found = _read(path / MAC) if (path / MAC).exists() else b""
            if not hmac.compare_digest(found, _mac(key, data)):
                what = "has another key" if found else "has no MAC"
                raise BundleError(f"{path} {what}: it was not signed with this key")
        with contents_of(path / BUNDLE, BundleError):
            manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.format != FORMAT:
            raise BundleError(f"{path} has format {manifest.format}, but this version reads {FORMAT}")
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise BundleError(f"{path / BUNDLE} names {shown(name)}, which is no file of the bundle")
        return cls(path, manifest, digest, key is not None)

    def names(self, *folders: str) -> list[str]:
        """The files of the bundle in these folders, or with these names."""
        return [
            name for name in self.manifest.files if name in folders or name.startswith(tuple(f"{f}/" for f in folders))
        ]

    def read(self, name: str) -> bytes:
        """A file's bytes, after their digest was checked. Raises BundleError."""
        known = self.manifest.files.get(name)
        data = _read(self.path / name, known.bytes if known is not None else 0)
        self._compare(name, len(data), hashlib.sha256(data).hexdigest())
        return data

    def json(self, name: str, kind: Any = Any) -> Any:
        with contents_of(self.path / name, BundleError):
            return msgspec.json.decode(self.read(name), type=kind)

    def check(self, names: Iterable[str]) -> None:
        """Reads these files and compares their sizes and digests, several at a time. Raises BundleError for the first
        one that is missing or damaged."""
        names = list(names)
        with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1, len(names)))) as pool:
            list(pool.map(self._check, names))

    def _check(self, name: str) -> None:
        self._compare(name, *hashed(self.path / name))

    def _compare(self, name: str, size: int, digest: str) -> None:
        known = self.manifest.files.get(name)
        if known is None:
            raise BundleError(f"{self.path} does not list the file {name}")
        if size != known.bytes:
            raise BundleError(f"{self.path / name} is damaged: it has {size} bytes, not {known.bytes}")
        if digest != known.sha256:
            raise BundleError(f"{self.path / name} is damaged: its SHA-256 is not the one in {BUNDLE}")

    def distrust(self) -> str | None:
        """Why code from this bundle must not run here; None: it may."""
        if self.signed:
            return None
        folders = {self.path} | {(self.path / name).parent for name in self.manifest.files}
        for path in (*sorted(folders), *(self.path / name for name in self.manifest.files)):
            try:
                found = path.lstat()
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}"
            if stat.S_ISLNK(found.st_mode):
                return f"{path} is a link"
            if found.st_uid not in (os.geteuid(), 0):
                return f"{path} belongs to another user; copy it, or sign the bundle (--bundle-key-file)"
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"others may write to {path} (chmod go-w), and the bundle is not signed (--bundle-key-file)"
        return None


def is_bundle(model: str | Path) -> bool:
    return os.path.isfile(os.path.join(os.path.expanduser(model), BUNDLE))


def hashed(path: Path) -> tuple[int, str]:
    """(size, SHA-256) of a file. Raises BundleError if it cannot be read."""
    digest = hashlib.sha256()
    size = 0
    buffer = bytearray(_PIECE)
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
    return size, digest.hexdigest()


def seal(path: Path, manifest: Manifest, key: bytes | None) -> str:
    """Writes the manifest, its digest and its MAC. Returns the digest. The manifest comes last, so that an unfinished
    folder is no bundle."""
    data = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"
    digest = hashlib.sha256(data).hexdigest()
    (path / DIGEST).write_bytes(_digest_line(digest))
    if key is not None:
        (path / MAC).write_bytes(_mac(key, data))
    (path / BUNDLE).write_bytes(data)
    return digest


def read_key(path: str | Path | None) -> bytes | None:
    """The key of a MAC from a file; None for None. Raises BundleError for a short one."""
    if path is None:
        return None
    key = _read(Path(path)).strip()
    if len(key) < KEY_BYTES:
        raise BundleError(f"{path} must hold at least {KEY_BYTES} bytes, got {len(key)}")
    return key


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode() + b"\n"


def _digest_line(digest: str) -> bytes:
    return f"{digest}  {BUNDLE}\n".encode()


def _read(path: Path, most: int = MAX_MANIFEST) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
