"""Compiled kernels on disk: one file per key, written by temporary file and rename, verified when read.

A file is a SHA-256 digest of key and content, then the content; a truncated, swapped or foreign file has the wrong
digest and counts as absent. What is read is run as machine code, so the folder must belong to the user and be writable
by no one else. It is opened once, and checked, read and written through that handle, so that nobody who controls a
folder above can put another in its place in between. Any failure costs a compile, never a call.

(`cuda.core.utils.FileStreamProgramCache` was looked at: it leaves folder permissions and content unverified.)
"""

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["load", "only_ours", "save"]

DIGEST_BYTES = hashlib.sha256().digest_size

POSIX = os.name == "posix"


def load(folder: Path | None, key: str) -> bytes | None:
    """The content saved under `key`, or None."""
    if folder is None:
        return None
    try:
        with _opened(folder) as within:
            data = within.read(_name(key))
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
        with _opened(folder) as within:
            within.write(_name(key), _digest(key, content) + content)
    except OSError:
        return False
    return True


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.cubin"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


class _Within:
    """Files of one open folder, by name. `descriptor` is None on Windows, which opens no folders."""

    def __init__(self, folder: Path, descriptor: int | None):
        self.descriptor = descriptor
        self.base = folder if descriptor is None else Path()

    def read(self, name: str) -> bytes:
        """The content of a plain file; OSError for anything else, also for a file that others may write to."""
        # Without O_NONBLOCK, a pipe in the file's place would wait for a writer.
        with open(self.base / name, "rb", opener=self._opener("O_NOFOLLOW", "O_NONBLOCK")) as file:
            _check_private(os.fstat(file.fileno()), stat.S_ISREG)
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Put `data` in place at once: a reader sees the old file or the new one."""
        temporary = self.base / f"{secrets.token_hex(8)}.tmp"
        try:
            with open(temporary, "xb", opener=self._opener()) as file:
                file.write(data)
            os.replace(temporary, self.base / name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise

    def _opener(self, *names: str) -> Callable[[str, int], int]:
        more = sum(getattr(os, name, 0) for name in names)
        return lambda path, flags: os.open(path, flags | more, 0o600, dir_fd=self.descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[_Within]:
    """The folder, open; OSError unless it is this user's and writable by no one else."""
    if not POSIX:  # no such bits; Windows' profile folders are private
        yield _Within(folder, None)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(os.fstat(descriptor), stat.S_ISDIR)
        yield _Within(folder, descriptor)
    finally:
        os.close(descriptor)


def _check_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode):
        raise OSError("of another kind")
    if POSIX and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError("belongs to another user, or others may write to it")


def only_ours(folder: Path) -> bool:
    """Whether no other user than root can change what is in `folder`, by its own bits or those of a folder above.

    For folders that another library opens by name, again and again. (On Windows this is not looked at.)
    """
    if not POSIX:
        return True
    try:
        folder = folder.resolve()
        path = [(status.st_uid, status.st_mode) for status in map(Path.stat, reversed((folder, *folder.parents)))]
    except OSError:
        return False
    return _only_ours(path, os.getuid())


def _only_ours(path: list[tuple[int, int]], user: int) -> bool:
    """The rule of only_ours; `path` is (owner, mode) of each folder, from the root down."""
    writers = 0o022  # of group and others, those that all folders above let through
    for depth, (owner, mode) in enumerate(path):
        # With the sticky bit, others may add to a folder, but not exchange what is in it.
        kept = mode & stat.S_ISVTX and depth < len(path) - 1
        if owner not in (0, user) or (mode & writers and not kept):
            return False
        writers &= mode << 1  # who may not search a folder (x) can write (w) nothing below it
    return True
