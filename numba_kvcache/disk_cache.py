"""Compiled kernels on disk: one file per key, written by temporary file and rename, verified when read.

A file is a SHA-256 digest of key and content, then the content; a truncated, swapped or foreign file has the wrong
digest and counts as absent. What is read is run as machine code, so the folder must belong to the user and be writable
by no one else. Any failure costs a compile, never a call.

(`cuda.core.utils.FileStreamProgramCache` was looked at: it leaves folder permissions and content unverified.)
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["load", "save"]

DIGEST_BYTES = hashlib.sha256().digest_size


def load(folder: Path | None, key: str) -> bytes | None:
    """The content saved under `key`, or None."""
    if folder is None or not _is_private(folder):
        return None
    path = _path(folder, key)
    try:
        if not path.is_file():
            return None
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return content if digest == _digest(key, content) else None


def save(folder: Path | None, key: str, content: bytes) -> bool:
    """Keep `content` under `key`; False where the folder is missing, unsafe, full or read-only."""
    if folder is None:
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return False
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(temporary, _path(folder, key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        return False
    return True


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.cubin"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _is_private(folder: Path) -> bool:
    """Owned by this user and writable by no one else. (Windows has no such bits; its profile folders are private.)"""
    if os.name == "nt":
        return True
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
