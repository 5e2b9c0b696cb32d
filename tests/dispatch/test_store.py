"""The decision store keeps what it acknowledged, and never stands in the way of a product."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from dispatch.remembering import _file as _store_file
from dispatch.remembering import store as _store
from dispatch.remembering.store import DecisionStore, StoreWarning, key_of

PRELUDE = """
import json, os, sys, threading, time, warnings
from pathlib import Path
from dispatch.remembering.store import DecisionStore
said = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *rest: said.append(f"{category.__name__}: {message}")
"""
EXERCISE = """
store = DecisionStore(*map(Path, sys.argv[1:]))
old = store.get("old")
for i in range(3):
    store.put("new", {"i": i})
print(json.dumps({"old": old, "new": store.get("new"), "state": store.state, "said": said, "path": str(store.path)}))
"""


def run(script, *arguments, prefix=(), env=None):
    """Return what `script` printed, as JSON, in a process of its own."""
    command = [*prefix, sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_mounts(mounts, script, *arguments):
    """Return what `script` printed where the shell commands `mounts` have been run, in a mount namespace of its own."""
    for namespace in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        try:
            probe = subprocess.run([*namespace, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, check=False)
        except FileNotFoundError:
            break
        if probe.returncode == 0:
            return run(script, *arguments, prefix=[*namespace, "sh", "-ec", f'{mounts}\nexec "$@"', "sh"])
    pytest.skip("needs unshare and mount in a mount namespace: root, or unprivileged user namespaces")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "decisions.sqlite"


@pytest.fixture(scope="session")
def store_file(tmp_path_factory):
    store = DecisionStore(tmp_path_factory.mktemp("store") / "decisions.sqlite")
    for i in range(50):
        store.put(f"key{i}", {"i": i, "text": "x" * 500})
    store.put("old", {"kept": True})
    store.close()
    return store.path


@pytest.fixture
def filled(path, store_file):
    path.parent.mkdir()
    shutil.copy(store_file, path)
    return path


def serves_from_memory(store, reason):
    """Check that `store` warns once, saying `reason`, its file and a way out, and then serves from memory."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert store.get("old") is None
        store.put("new", {"i": 1})
        store.put("new", {"i": 2})
        assert store.get("new") == {"i": 2}
        assert store.entries() == [("new", {"i": 2})]
        assert reason in store.state
    assert [w.category for w in said] == [StoreWarning]
    text = str(said[0].message)
    assert text.startswith(f"{store.path}: ")
    assert reason in text
    assert "DISPATCH_CACHE_DIR" in text


# What it keeps


def test_returns_what_was_put_last(path):
    store = DecisionStore(path)
    assert store.get("a") is None
    store.put("a", {"x": [1, None, "é"]})
    store.put("b", {})
    store.put("a", {"x": 2})
    assert store.get("a") == {"x": 2}
    assert store.entries() == [("b", {}), ("a", {"x": 2})]
    assert store.state == "ok"
    assert DecisionStore(path).get("a") == {"x": 2}


def test_clear_says_how_many_it_removed(filled):
    store = DecisionStore(filled)
    assert store.clear() == 51
    assert store.clear() == 0
    assert DecisionStore(filled).entries() == []


def test_a_record_is_a_copy(path):
    store = DecisionStore(path)
    record = {"list": [1]}
    store.put("a", record)
    record["list"].append(2)
    store.get("a")["list"].append(3)
    assert store.get("a") == {"list": [1]}


def test_refuses_what_json_cannot_hold(path):
    store = DecisionStore(path)
    with pytest.raises(TypeError):
        store.put("a", {"x": object()})
    assert store.entries() == []


@pytest.mark.parametrize("text", ["{", "[1]", "3", b"\xff\xfe", b"\x80\x04N.", pickle.dumps({"a": 1}), "[" * 100_000])
def test_an_unreadable_record_is_a_miss(filled, text):
    with sqlite3.connect(filled) as connection:
        connection.execute("UPDATE records SET record = CAST(? AS TEXT) WHERE key = 'old'", (text,))
    connection.close()
    store = DecisionStore(filled)
    assert store.get("old") is None
    assert len(store.entries()) == 50
    store.put("old", {"again": 1})
    assert store.get("old") == {"again": 1}


def test_drops_the_oldest_rows(path, monkeypatch):
    monkeypatch.setattr(_store, "MAX_ROWS", 20)
    monkeypatch.setattr(_store, "SWEEP_EVERY", 10)
    store = DecisionStore(path)
    for i in range(75):
        store.put(f"key{i}", {"i": i})
    kept = [record["i"] for _, record in store.entries()]
    assert kept == list(range(75 - len(kept), 75))
    assert 20 <= len(kept) < 30


def test_keys_do_not_depend_on_order():
    assert key_of({"a": 1, "b": [1, {"c": 2}]}) == key_of({"b": [1, {"c": 2}], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": "1"}) != key_of({"a": 1.5})
    assert len(key_of({})) == 64


def test_a_name_with_signs_of_an_uri_is_only_a_name(tmp_path):
    path = tmp_path / "a?mode=memory#%20 é" / "decisions.sqlite"
    DecisionStore(path).put("a", {"x": 1})
    assert path.stat().st_size > 0
    assert DecisionStore(path).get("a") == {"x": 1}


def test_nothing_is_touched_before_the_first_use(path):
    store = DecisionStore(path)
    assert store.path == path
    assert not path.parent.exists()
    store.get("a")
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_file_is_as_the_design_says(filled):
    connection = sqlite3.connect(filled)
    pragmas = ("application_id", "user_version", "journal_mode")
    assert [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas] == [
        _store_file.APPLICATION_ID,
        _store_file.SCHEMA_VERSION,
        "delete",
    ]
    created = connection.execute("SELECT DISTINCT substr(created, 1, 2) FROM records").fetchall()
    connection.close()
    assert created == [("20",)]


# Many at once


def test_32_processes_starting_at_once_lose_nothing(path):
    script = """
    path, children = Path(sys.argv[1]), []
    reader, writer = os.pipe()
    for child in range(32):
        if pid := os.fork():
            children.append(pid)
            continue
        os.close(writer)
        os.read(reader, 1)  # all start when the parent closes its end
        store = DecisionStore(path)
        for i in range(10):
            store.put(f"{child}.{i}", {"i": i})
        os._exit(len(said) or store.state != "ok")
    os.close(writer)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    print(json.dumps([codes, sorted(key for key, _ in DecisionStore(path).entries())]))
    """
    codes, keys = run("if True:" + script, path)
    assert codes == [0] * 32
    assert keys == sorted(f"{child}.{i}" for child in range(32) for i in range(10))


def test_a_killed_writer_loses_nothing_that_it_acknowledged(path):
    script = (
        PRELUDE
        + """
store, name = DecisionStore(Path(sys.argv[1])), sys.argv[2]
for i in range(100_000):
    store.put(f"{name}.{i}", {"i": i, "text": "x" * 3000})
    print(i, flush=True)
"""
    )
    draw = random.Random(0)
    expected = {}
    for name in range(8):
        command = [sys.executable, "-c", script, str(path), str(name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(draw.randrange(1, 40)):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            last = writer.stdout.read().split("\n")[-2:-1]
        assert writer.returncode == -signal.SIGKILL
        store = DecisionStore(path)
        done = max([*map(int, last), *(int(k.split(".")[1]) for k, _ in store.entries() if k.startswith(f"{name}."))])
        expected |= {f"{name}.{i}": i for i in range(done + 1)}
        assert {key: record["i"] for key, record in store.entries()} == expected
        store.put("alive", {"i": name})
        expected["alive"] = name
        assert store.state == "ok"
        store.close()


def test_a_forked_child_has_a_connection_of_its_own(path):
    script = """
    store = DecisionStore(Path(sys.argv[1]))
    store.put("parent", {})
    (own,) = [connection for _, connection in store._held]
    if not (pid := os.fork()):
        store.get("parent")
        (held,) = [connection for _, connection in store._held]
        os._exit(held is own)
    print(json.dumps(os.waitpid(pid, 0)[1]))
    """
    assert run("if True:" + script, path) == 0


def test_what_kept_a_parent_from_the_file_does_not_keep_its_child(path):
    script = """
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True)
    path.write_text("no database, however long it is read" * 100)
    store = DecisionStore(path)
    store.put("lost", {})
    path.unlink()
    if not (pid := os.fork()):
        os._exit(store.state != "ok")
    print(json.dumps([os.waitpid(pid, 0)[1], store.state]))
    """
    assert run("if True:" + script, path) == [0, "it is not an SQLite database"]


def test_a_file_that_another_process_makes_meanwhile_is_shared(path, monkeypatch):
    is_ours = _store_file._is_ours

    def late(connection):
        found = is_ours(connection)
        monkeypatch.setattr(_store_file, "_is_ours", is_ours)
        DecisionStore(path).put("theirs", {"x": 1})
        return found

    monkeypatch.setattr(_store_file, "_is_ours", late)
    store = DecisionStore(path)
    store.put("own", {"x": 2})
    assert store.state == "ok"
    assert [key for key, _ in DecisionStore(path).entries()] == ["theirs", "own"]


def test_how_the_file_is_written(path):
    store = DecisionStore(path)
    store.put("a", {})
    ((_, connection),) = store._held
    asked = ("journal_mode", "synchronous", "busy_timeout")
    found = [connection.execute(f"PRAGMA {what}").fetchone()[0] for what in asked]
    assert found == [b"delete", 1, 5000]  # 1: NORMAL


def test_a_file_that_keeps_a_log_is_brought_back_to_a_journal(filled):
    """A write-ahead log breaks where homes are on a network."""
    connection = sqlite3.connect(filled)
    connection.execute("PRAGMA journal_mode = wal")
    connection.close()
    store = DecisionStore(filled)
    assert store.get("old") == {"kept": True}
    store.close()
    connection = sqlite3.connect(filled)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()


def test_threads_share_a_store(path):
    store = DecisionStore(path)
    failures = []

    def write(thread):
        try:
            for i in range(8):
                store.put(f"{thread}.{i}", {"i": i})
                assert store.get(f"{thread}.{i}") == {"i": i}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.entries()) == 64


def test_forked_children_open_the_file_again_while_a_thread_writes(path):
    script = """
    store = DecisionStore(Path(sys.argv[1]))
    store.put("parent", {"x": 1})
    going, written = threading.Event(), []
    def write():
        while not going.is_set():
            store.put(f"thread.{len(written)}", {})
            written.append(1)
            time.sleep(0.003)  # as measuring does: SQLite's lock is not fair
    thread = threading.Thread(target=write)
    thread.start()
    codes = []
    for child in range(20):
        pid = os.fork()
        if not pid:
            right = store.get("parent") == {"x": 1}
            store.put(f"child.{child}", {"x": child})
            os._exit(0 if right and store.state == "ok" and store.get(f"child.{child}") == {"x": child} else 1)
        codes.append(os.waitpid(pid, 0)[1])
    going.set()
    thread.join()
    keys = [key for key, _ in store.entries()]
    children = sum(key.startswith("child.") for key in keys)
    writes = sum(key.startswith("thread.") for key in keys)
    said = [text for text in said if "DeprecationWarning" not in text]
    print(json.dumps([codes, children, writes - len(written), store.state, said]))
    """
    assert run("if True:" + script, path) == [[0] * 20, 20, 0, "ok", []]


def test_a_file_kept_locked_is_given_up(filled, monkeypatch):
    monkeypatch.setattr(_store_file, "BUSY_S", 0.05)
    other = sqlite3.connect(filled, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    serves_from_memory(DecisionStore(filled), "another process kept it locked")
    other.close()


# Files that cannot serve


def test_garbage_is_left_until_cleared(path):
    path.parent.mkdir()
    path.write_bytes(b"no database\n" * 1000)
    store = DecisionStore(path)
    serves_from_memory(store, "not an SQLite database")
    assert path.read_bytes() == b"no database\n" * 1000
    assert store.clear() == 1
    store.put("a", {"x": 1})
    assert store.state == "ok"
    assert DecisionStore(path).get("a") == {"x": 1}


def test_an_empty_file_is_a_new_store(path):
    path.parent.mkdir()
    path.touch()
    store = DecisionStore(path)
    store.put("a", {"x": 1})
    assert store.state == "ok"
    assert DecisionStore(path).get("a") == {"x": 1}


@pytest.mark.parametrize("size", [2, 15, 16, 20, 50, 99, 100, 511, 512, 4095, 4096, 4097, 8192, 20_000])
def test_a_truncated_file_is_left_until_cleared(filled, size):
    whole = filled.read_bytes()
    assert len(whole) > size
    filled.write_bytes(whole[:size])
    store = DecisionStore(filled)
    serves_from_memory(store, "it is ")
    assert filled.read_bytes() == whole[:size]
    store.clear()
    assert store.state == "ok"


def test_damage_that_shows_late_is_survived(filled):
    whole = bytearray(filled.read_bytes())
    whole[4096:] = b"\xa5" * (len(whole) - 4096)
    filled.write_bytes(whole)
    serves_from_memory(DecisionStore(filled), "damaged")


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_programs_database_is_never_written(path, journal):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("CREATE TABLE records (key TEXT, record TEXT, created TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    store = DecisionStore(path)
    serves_from_memory(store, "another program's")
    assert store.clear() == 1
    store.close()
    assert path.read_bytes() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("version", [_store_file.SCHEMA_VERSION - 1, _store_file.SCHEMA_VERSION + 1])
def test_another_schema_is_left_alone(filled, version):
    connection = sqlite3.connect(filled)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = filled.read_bytes()
    store = DecisionStore(filled)
    serves_from_memory(store, f"schema version {version}")
    store.clear()
    assert filled.read_bytes() == before


def test_a_folder_in_the_files_place(path):
    path.mkdir(parents=True)
    serves_from_memory(DecisionStore(path), "not a regular file")


def test_a_file_in_the_folders_place(path):
    path.parent.touch()
    serves_from_memory(DecisionStore(path), "cannot be used")


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_another_user_is_not_trusted(filled, what, monkeypatch):
    other = os.geteuid() + 12345
    if os.geteuid() == 0:
        os.chown(filled.parent if what == "folder" else filled, other, -1)
    else:  # only root can give files away; anybody can be somebody else to the check
        monkeypatch.setattr(os, "geteuid", lambda: other)
    serves_from_memory(DecisionStore(filled), "belongs to another user")


def test_a_folder_removed_meanwhile(filled):
    store = DecisionStore(filled)
    assert store.get("old") == {"kept": True}
    filled.unlink()
    filled.parent.rmdir()
    with pytest.warns(StoreWarning, match="Make it writable|cannot be used"):
        store.put("new", {"x": 1})
    assert store.get("new") == {"x": 1}


def test_memory_is_bounded(path, monkeypatch):
    monkeypatch.setattr(_store, "MAX_IN_MEMORY", 5)
    path.mkdir(parents=True)
    store = DecisionStore(path)
    with pytest.warns(StoreWarning):
        store.put("key0", {})
    for i in range(1, 20):
        store.put(f"key{i}", {})
    assert [key for key, _ in store.entries()] == [f"key{i}" for i in range(15, 20)]
    assert store.clear() == 5


# Read-only and full disks, with real permissions, mounts and file systems


def bound_by_permissions(script, *arguments):
    """Return what `script` printed in a process that file permissions hold for: root's loses its exemption."""
    drop = [] if os.geteuid() else ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if drop and shutil.which(drop[0]) is None:
        pytest.skip("needs setpriv (util-linux) to hold root to file permissions")
    return run(script, *arguments, prefix=drop)


def is_served_read_only(found):
    assert found["old"] == {"kept": True}
    assert found["new"] == {"i": 2}
    assert found["state"] == "it is read-only"
    assert len(found["said"]) == 1
    assert found["said"][0].startswith("StoreWarning: ")
    assert "read-only" in found["said"][0]


@pytest.mark.parametrize(("file", "folder"), [(0o444, 0o755), (0o666, 0o555), (0o444, 0o555)])
def test_a_file_without_write_permission_is_read(filled, file, folder):
    filled.chmod(file)
    filled.parent.chmod(folder)
    before = filled.read_bytes()
    try:
        is_served_read_only(bound_by_permissions(EXERCISE, filled))
    finally:
        filled.parent.chmod(0o755)
    assert filled.read_bytes() == before


def test_reading_a_read_only_store_warns_of_nothing(filled):
    filled.chmod(0o444)
    script = 'store = DecisionStore(Path(sys.argv[1])); print(json.dumps([store.get("old"), store.state, said]))'
    assert bound_by_permissions(script, filled) == [{"kept": True}, "it is read-only", []]


def test_a_file_that_cannot_be_written_is_not_read_past_an_unfinished_write(filled):
    Path(f"{filled}-journal").write_bytes(b"\xd9\xd5" * 512)
    filled.chmod(0o444)
    script = 'store = DecisionStore(Path(sys.argv[1])); print(json.dumps([store.get("old"), len(said)]))'
    assert bound_by_permissions(script, filled) == [None, 1]


def test_a_folder_without_write_permission_and_no_file(path):
    path.parent.mkdir()
    path.parent.chmod(0o555)
    try:
        found = bound_by_permissions(EXERCISE, path)
    finally:
        path.parent.chmod(0o755)
    assert (found["old"], found["new"]) == (None, {"i": 2})
    assert len(found["said"]) == 1
    assert "not writable" in found["said"][0]


@pytest.mark.parametrize("journal", ["delete", "wal"])  # a WAL database can be read there as immutable only
def test_a_read_only_mount_is_read(filled, journal):
    connection = sqlite3.connect(filled)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.close()
    folder = filled.parent
    mounts = f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}"
    is_served_read_only(in_mounts(mounts, EXERCISE, filled))


def test_a_read_only_mount_without_a_file(path):
    path.parent.mkdir()
    found = in_mounts(f"mount -t tmpfs -o ro x {path.parent}", EXERCISE, path)
    assert (found["old"], found["new"]) == (None, {"i": 2})
    assert len(found["said"]) == 1


def test_a_disk_that_fills_up_keeps_what_it_has(path):
    script = """
    store, n = DecisionStore(Path(sys.argv[1])), 0
    while not said:
        store.put(f"key{n}", {"n": n, "text": "x" * 1000})
        n += 1
    store.put("last", {"n": n})
    again = DecisionStore(Path(sys.argv[1])).entries()
    right = [store.get(f"key{i}")["n"] for i in range(n)] == list(range(n)) and store.get("last") == {"n": n}
    print(json.dumps([n > 5, right, [r["n"] for _, r in again] == list(range(n - 1)), store.state, said]))
    """
    path.parent.mkdir()
    *right, state, said = in_mounts(f"mount -t tmpfs -o size=128k x {path.parent}", "if True:" + script, path)
    assert right == [True] * 3
    assert state == "the disk is full"
    assert len(said) == 1
    assert "Free some space" in said[0]


def test_a_disk_that_is_full_from_the_start(path):
    path.parent.mkdir()
    fill = f"mount -t tmpfs -o size=64k x {path.parent}; head -c 60K /dev/zero > {path.parent}/big; "
    found = in_mounts(fill + f"head -c 60K /dev/zero > {path.parent}/more || true", EXERCISE, path)
    assert (found["old"], found["new"]) == (None, {"i": 2})
    assert len(found["said"]) == 1
    assert "disk" in found["said"][0]


# Where it is


def without_folders(**changes):
    names = ("HOME", "XDG_CACHE_HOME", "DISPATCH_CACHE_DIR")
    return {key: value for key, value in os.environ.items() if key not in names} | changes


@pytest.mark.parametrize("home", ["/", "/nonexistent/x", "", "/proc"])
def test_without_a_home_it_works_in_memory(home):
    started = time.time()
    found = run(EXERCISE, env=without_folders(HOME=home))
    assert (found["old"], found["new"]) == (None, {"i": 2})
    assert len(found["said"]) == 1
    assert "DISPATCH_CACHE_DIR" in found["said"][0]
    path = Path(found["path"])
    assert not path.exists() or path.stat().st_mtime < started  # with HOME empty it may be the user's own
    assert not Path("/nonexistent").exists()


def test_the_default_folder_is_the_users_cache(tmp_path):
    found = run(EXERCISE, env=without_folders(HOME=str(tmp_path)))
    assert (found["state"], found["said"]) == ("ok", [])
    assert Path(found["path"]).is_relative_to(tmp_path)
    assert Path(found["path"]).parts[-2:] == ("gemm-dispatch", "decisions.sqlite")
    assert Path(found["path"]).is_file()


def test_the_environment_names_the_folder_at_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("DISPATCH_CACHE_DIR", str(tmp_path / "early"))
    store = DecisionStore()
    monkeypatch.setenv("DISPATCH_CACHE_DIR", str(tmp_path / "late"))
    store.put("a", {})
    assert store.path == tmp_path / "late" / "decisions.sqlite"
    assert store.path.is_file()
    assert not (tmp_path / "early").exists()


def test_the_folder_may_begin_with_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DISPATCH_CACHE_DIR", "~/here")
    assert DecisionStore().path == tmp_path / "here" / "decisions.sqlite"
