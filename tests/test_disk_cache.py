"""disk_cache.py: a damaged, foreign or unsafe cache is a miss and never an exception."""

import os
import shutil
import threading
from pathlib import Path

import numba
import pytest
from support import needs_compiler, run_python

from numba_kvcache import disk_cache, fast_road, settings

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owner and mode bits are POSIX")

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "made" / "on demand"


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_round_trip(folder):
    assert disk_cache.load(folder, "a") is None
    assert disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") == CONTENT
    assert disk_cache.load(folder, "b") is None


def test_folder_is_made_private_and_leaves_no_temporary_file(folder):
    disk_cache.save(folder, "a", CONTENT)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).suffix == ".cubin"


def test_later_content_replaces_earlier(folder):
    disk_cache.save(folder, "a", b"first")
    disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") == CONTENT


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, len(CONTENT) + 31])
def test_truncated_file(folder, kept):
    disk_cache.save(folder, "a", CONTENT)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:kept])
    assert disk_cache.load(folder, "a") is None
    assert disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") == CONTENT


@pytest.mark.parametrize("at", [0, 31, 32, 5000])
def test_flipped_bit(folder, at):
    disk_cache.save(folder, "a", CONTENT)
    path = only_file(folder)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert disk_cache.load(folder, "a") is None


def test_swapped_files(folder):
    """Whole, sound content under another key's name is another kernel."""
    disk_cache.save(folder, "a", b"kernel of a")
    path_a = only_file(folder)
    disk_cache.save(folder, "b", b"kernel of b")
    (path_b,) = set(folder.iterdir()) - {path_a}
    path_b.write_bytes(path_a.read_bytes())
    assert disk_cache.load(folder, "b") is None
    assert disk_cache.load(folder, "a") == b"kernel of a"


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + CONTENT])
def test_foreign_file(folder, content):
    disk_cache.save(folder, "a", CONTENT)
    only_file(folder).write_bytes(content)
    assert disk_cache.load(folder, "a") is None


def test_folder_in_the_files_place(folder):
    disk_cache.save(folder, "a", CONTENT)
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    assert disk_cache.load(folder, "a") is None
    assert not disk_cache.save(folder, "a", CONTENT)
    assert only_file(folder) == path  # no temporary file stays behind


def test_file_in_the_folders_place(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"in the way")
    for folder in (blocked, blocked / "below"):
        assert not disk_cache.save(folder, "a", CONTENT)
        assert disk_cache.load(folder, "a") is None
    assert blocked.read_bytes() == b"in the way"


def no_space(*args, **options):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", ["mkdir", "open", "replace"])
def test_unwritable_or_full(folder, monkeypatch, broken):
    """(Run as root, no permission bit stops a write; so each step fails on its own.)"""
    owner = {"mkdir": type(folder), "open": disk_cache.os, "replace": disk_cache.os}[broken]
    monkeypatch.setattr(owner, broken, no_space)
    assert not disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") is None
    assert not folder.exists() or list(folder.iterdir()) == []


def test_full_while_writing(folder):
    """The kernel refuses to let a file grow past 4,000 bytes."""
    code = f"""
import resource
from pathlib import Path
from numba_kvcache import disk_cache
folder = Path({str(folder)!r})
assert disk_cache.save(folder, "small", bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
assert not disk_cache.save(folder, "a", bytes(10_000))
assert disk_cache.load(folder, "a") is None
assert disk_cache.load(folder, "small") == bytes(1000)
assert len(list(folder.iterdir())) == 1
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr


def test_folder_deleted_in_between(folder):
    assert disk_cache.save(folder, "a", CONTENT)
    shutil.rmtree(folder.parent)
    assert disk_cache.load(folder, "a") is None
    assert disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") == CONTENT


def test_folder_deleted_while_it_is_written(folder, monkeypatch):
    replace = disk_cache.os.replace
    monkeypatch.setattr(disk_cache.os, "replace", lambda *a, **o: (shutil.rmtree(folder), replace(*a, **o)))
    assert not disk_cache.save(folder, "a", CONTENT)
    assert disk_cache.load(folder, "a") is None


# What another user of the machine might do.


def forged(key, content):
    """A file that passes the digest, which anyone can make."""
    return disk_cache._digest(key, content) + content


def test_folder_exchanged_after_the_check(folder, monkeypatch):
    """Who controls a folder above puts another in place between the check and the reading: ours is read."""
    disk_cache.save(folder, "a", CONTENT)
    name, real, opened = only_file(folder).name, disk_cache.os.open, []

    def open_and_exchange(path, *args, **options):
        handle = real(path, *args, **options)
        if not opened:
            folder.rename(folder.with_name("away"))
            folder.mkdir()
            (folder / name).write_bytes(forged("a", b"foreign"))
        opened.append(path)
        return handle

    monkeypatch.setattr(disk_cache.os, "open", open_and_exchange)
    assert disk_cache.load(folder, "a") == CONTENT
    assert len(opened) == 2
    assert disk_cache.load(folder, "a") == b"foreign"  # (it was well forged: this folder is private too)


def test_link_in_the_files_place(folder, tmp_path):
    disk_cache.save(folder, "a", CONTENT)
    path = only_file(folder)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert disk_cache.load(folder, "a") is None
    assert disk_cache.save(folder, "a", CONTENT)
    assert not path.is_symlink()
    assert disk_cache.load(folder, "a") == CONTENT


@pytest.mark.timeout(20)
def test_pipe_in_the_files_place(folder):
    """Reading one waits until somebody writes."""
    disk_cache.save(folder, "a", CONTENT)
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path)
    assert disk_cache.load(folder, "a") is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_may_write(folder, mode):
    disk_cache.save(folder, "a", CONTENT)
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    only_file(folder).chmod(mode)
    assert disk_cache.load(folder, "a") is None


@pytest.mark.parametrize(
    ("modes", "ours"),
    [
        ((0o755, 0o755, 0o755), True),
        ((0o755, 0o755, 0o775), False),  # the group may write to the folder itself
        ((0o755, 0o755, 0o757), False),
        ((0o755, 0o777, 0o700), False),  # or exchange it, from above
        ((0o755, 0o770, 0o700), False),
        ((0o755, 0o1777, 0o700), True),  # not where the sticky bit keeps others' folders in place
        ((0o755, 0o755, 0o1777), False),
        ((0o700, 0o777, 0o777), True),  # nobody else gets that far
        ((0o750, 0o757, 0o707), True),
        ((0o750, 0o757, 0o775), False),
    ],
)
def test_only_ours(modes, ours):
    user = 1000
    assert disk_cache._only_ours([(0, 0o755), *((user, mode) for mode in modes)], user) is ours


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_only_ours_asks_for_the_owner(stranger):
    user, path = 1000, [(0, 0o755), (0, 0o755), (1000, 0o700)]
    assert disk_cache._only_ours(path, user)
    path[stranger] = (1001, 0o755)
    assert not disk_cache._only_ours(path, user)


def test_only_ours_of_a_real_folder(tmp_path):
    """pytest's are private, and lie in one where everybody may add folders; a link counts as what it leads to."""
    assert disk_cache.only_ours(tmp_path)
    (tmp_path / "link").symlink_to("/tmp")
    assert Path("/tmp").stat().st_mode & 0o002
    assert not disk_cache.only_ours(tmp_path / "link")


def test_only_ours_of_what_is_not_there(tmp_path):
    assert not disk_cache.only_ours(tmp_path / "not there")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
def test_folder_that_others_may_write(folder, mode):
    disk_cache.save(folder, "a", CONTENT)
    folder.chmod(mode)
    assert disk_cache.load(folder, "a") is None
    assert not disk_cache.save(folder, "b", CONTENT)
    folder.chmod(0o755)  # readable by others is fine
    assert disk_cache.load(folder, "a") == CONTENT
    assert len(list(folder.iterdir())) == 1


def test_folder_of_another_user(folder, monkeypatch):
    disk_cache.save(folder, "a", CONTENT)
    monkeypatch.setattr(disk_cache.os, "getuid", lambda: folder.stat().st_uid + 1)
    assert disk_cache.load(folder, "a") is None
    assert not disk_cache.save(folder, "b", CONTENT)


def test_no_folder():
    assert disk_cache.load(None, "a") is None
    assert not disk_cache.save(None, "a", CONTENT)


def test_concurrent_writers_and_readers(folder):
    """A reader sees nothing or one writer's whole content."""
    contents = [bytes([i]) * 100_000 for i in range(4)]
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(disk_cache.load(folder, "a"))

    def write(content):
        for _ in range(25):
            assert disk_cache.save(folder, "a", content)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen <= {None, *contents}
    assert disk_cache.load(folder, "a") in contents
    assert only_file(folder).suffix == ".cubin"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NUMBA_KVCACHE_CACHE_DIR": "/there"}, "/there"),
        ({"NUMBA_KVCACHE_CACHE_DIR": ""}, "None"),
        ({"NUMBA_KVCACHE_CACHE_DIR": "~no_such_user_/there"}, "None"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/numba_kvcache"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/numba_kvcache"),
    ],
)
def test_where_the_folder_is(variables, expected, monkeypatch):
    for name in ("NUMBA_KVCACHE_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(settings.cache_folder.__wrapped__()) == expected


# Numba's own cache, of the fast road: a pickle and machine code, which it loads as they are.


@needs_compiler
@pytest.mark.parametrize(("mode", "ours"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False)])
def test_numbas_cache_in_a_folder_that_others_may_write(tmp_path, monkeypatch, mode, ours):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(disk_cache, "only_ours", lambda f: disk_cache._only_ours([(0, f.stat().st_mode)], 0))
    fast_road._numbas_cache_is_ours()  # makes the folder
    (folder,) = (tmp_path / "numba").iterdir()
    folder.chmod(mode)
    assert fast_road._numbas_cache_is_ours() is ours


@needs_compiler
def test_numbas_cache_beside_the_source_is_as_safe_as_the_source(monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", "")
    monkeypatch.setattr(disk_cache, "only_ours", lambda folder: False)
    assert fast_road._numbas_cache_is_ours()


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX")
def test_a_forked_child_has_no_plans_of_the_fast_road():
    code = """
import os
from numba_kvcache import fast_road, native
fast_road._state[native.PLANS // 8 + 5] = 7
fast_road._state[native.PLANS // 8 - 1] = 7
child = os.fork()
if child == 0:
    os._exit(int(fast_road._state[native.PLANS // 8 :].any()) + 2 * int(fast_road._state[native.PLANS // 8 - 1] != 7))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert fast_road._state[native.PLANS // 8 + 5] == 7
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")
