"""Files of units: what is written is read, anything else is a miss, and a folder that
cannot be used is told at start."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kv_canary.reporter import CanaryViolation
from sglang.srt.kv_tiers import files as unit_files
from sglang.srt.kv_tiers import storage as unit_storage
from sglang.srt.kv_tiers.damage import DamageKind
from sglang.srt.kv_tiers.files import BadUnit, FileLimits, FileStore, open_folder
from sglang.srt.kv_tiers.landing import LandingMemory
from sglang.srt.managers.messages.io_struct import FlushCacheReq
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tier_traffic import serve, tiered, tiers_of
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=12, suite="cpu", full_time=300)

IDENTITY = b"i" * 16
SIZE = 256
ELEMENTS = np.arange(8, dtype=np.int64)


def store(folder, *, max_bytes=1 << 20, max_age=None, identity=IDENTITY, landing=None):
    limits = FileLimits(max_bytes=max_bytes, max_age=max_age)
    return FileStore(
        folder, identity=identity, size=SIZE, limits=limits, landing=landing
    )


def key_of(number):
    return number.to_bytes(16, "big")


def content(number):
    return bytes((number + place) % 256 for place in range(SIZE))


def write(files, number, *, parent=0):
    files.write(
        key_of(number),
        key_of(parent) if parent else b"",
        position=8 * number,
        elements=ELEMENTS + number,
        unit=memoryview(content(number)),
    )


def read(files, number):
    unit = files.read(key_of(number), position=8 * number, elements=ELEMENTS + number)
    return None if unit is None else unit.numpy().tobytes()


def test_what_is_written_is_read_also_after_a_restart(tmp_path):
    files = store(tmp_path)
    for number in (1, 2, 3):
        write(files, number, parent=number - 1)
    again = store(tmp_path)
    for number in (1, 2, 3):
        assert read(files, number) == read(again, number) == content(number)
    assert read(again, 4) is None
    assert again.below([key_of(2)]) == {key_of(2), key_of(3)}
    again.drop([key_of(2)])
    assert read(files, 2) is None
    assert len(files) == 2


def test_files_are_read_to_landing_memory_while_there_is_room(tmp_path):
    landing = LandingMemory(1024, is_pinned=False)
    files = store(tmp_path, landing=landing)
    for number in (1, 2, 3):
        write(files, number)
    assert files.total_bytes > landing.size > files.total_bytes * 2 // 3

    def unit(number):
        where = {"position": 8 * number, "elements": ELEMENTS + number}
        return files.read(key_of(number), **where)

    units = [unit(number) for number in (1, 2, 3)]
    begin = landing.memory.data_ptr()
    inside = [0 <= one.data_ptr() - begin < landing.size for one in units]
    assert inside == [True, True, False]
    assert [one.numpy().tobytes() for one in units] == [content(n) for n in (1, 2, 3)]
    assert landing.free_bytes < landing.size // 3
    units.clear()
    assert landing.is_whole
    path = files.path(key_of(1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadUnit):
        unit(1)
    path = files.path(key_of(2))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(BadUnit):
        unit(2)
    assert landing.is_whole


def test_the_least_recently_used_go_first(tmp_path):
    write(store(tmp_path), 1)
    one = store(tmp_path).total_bytes
    files = store(tmp_path, max_bytes=3 * one)
    for number in (2, 3):
        write(files, number)
    read(files, 1)
    write(files, 4)
    assert [read(files, number) is None for number in (1, 2, 3, 4)] == [
        *(False, True, False, False)
    ]
    assert files.total_bytes == 3 * one
    assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) == 3


def test_old_files_go_at_start(tmp_path):
    files = store(tmp_path)
    write(files, 1)
    write(files, 2)
    os.utime(files.path(key_of(1)), (0, 0))
    again = store(tmp_path, max_age=3600)
    assert read(again, 1) is None
    assert read(again, 2) == content(2)


def test_leftovers_of_a_crash_go_at_start(tmp_path):
    files = store(tmp_path)
    write(files, 1)
    path = files.path(key_of(1))
    old, new = (path.with_name(f"{path.name}.{who}.tmp") for who in ("old", "new"))
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    (path.parent / "notes.txt").write_text("not ours")
    assert len(store(tmp_path)) == 1
    assert not old.exists()
    # Another engine may be writing it.
    assert new.exists()
    assert (path.parent / "notes.txt").exists()


def test_a_link_is_not_followed(tmp_path):
    files = store(tmp_path / "kv")
    write(files, 1)
    path = files.path(key_of(1))
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    assert read(files, 1) is None


def test_engines_that_share_a_folder_do_not_mix_their_bytes(tmp_path):
    """Not even of one unit that they write at the same time."""
    files = [store(tmp_path) for _ in range(2)]
    units = [bytes([number]) * SIZE for number in (1, 2)]
    parts = threading.Barrier(2, timeout=20)

    def write_half(name, mode):
        file = open(name, mode)  # noqa: SIM115

        class Slow:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def write(self, part):
                half = len(part) // 2
                file.write(part[:half])
                file.flush()
                parts.wait()
                file.write(part[half:])
                file.flush()

        return Slow()

    def run(number):
        files[number].write(
            key_of(1),
            b"",
            position=8,
            elements=ELEMENTS + 1,
            unit=memoryview(units[number]),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_files, "open", write_half, raising=False)
        with ThreadPoolExecutor(2) as both:
            list(both.map(run, range(2)))
    assert {read(one, 1) for one in (*files, store(tmp_path))} <= set(units)
    assert len(list(files[0].path(key_of(1)).parent.iterdir())) == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "endless"])
def test_what_is_no_file_of_ours_is_a_miss(tmp_path, kind):
    """A reader neither waits for it, nor reads all of it, nor keeps it open."""
    files = store(tmp_path / "kv")
    write(files, 1)
    path = files.path(key_of(1))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        # Its name may be longer than a socket's.
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / "s"))
        (tmp_path / "s").rename(path)
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with suppress(BadUnit):
            assert read(files, 1) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert read(store(tmp_path / "kv"), 1) is None


def test_any_change_of_a_file_is_a_miss(tmp_path):
    """Changed, cut, grown, swapped or random files: never a wrong byte and never an
    error besides `BadUnit`. Changes of the unit's own bytes are for its sums."""
    rng = random.Random(7)
    files = store(tmp_path)
    write(files, 1)
    path, whole = files.path(key_of(1)), None
    whole = path.read_bytes()
    head = len(whole) - SIZE
    kinds = set()
    for _ in range(count(ci=1500, full=100_000)):
        data = bytearray(whole)
        change = rng.randrange(4)
        if change == 0:
            data[rng.randrange(head)] ^= rng.randrange(1, 256)
        elif change == 1:
            del data[rng.randrange(len(data)) :]
        elif change == 2:
            data += rng.randbytes(rng.randrange(1, 40))
        else:
            data = bytearray(rng.randbytes(rng.randrange(len(whole) + 20)))
        if not path.exists():
            write(files, 1)
        path.write_bytes(data)
        with pytest.raises(BadUnit) as bad:
            read(files, 1)
        kinds.add(bad.value.kind)
        assert key_of(1) not in files
    assert kinds == set(DamageKind)


def test_a_file_of_another_model_or_history_is_a_miss(tmp_path):
    other = store(tmp_path, identity=b"j" * 16)
    write(other, 1)
    with pytest.raises(BadUnit, match="layout"):
        read(store(tmp_path), 1)
    files = store(tmp_path)
    write(files, 1)
    with pytest.raises(BadUnit, match="other tokens"):
        files.read(key_of(1), position=8, elements=ELEMENTS)
    write(files, 1)
    with pytest.raises(BadUnit, match="another unit"):
        files.read(key_of(1), position=16, elements=ELEMENTS + 1)


class TestFolder:
    def test_others_may_not_write(self, tmp_path):
        tmp_path.chmod(0o777)
        with pytest.raises(ValueError, match="chmod 700"):
            open_folder(tmp_path)

    def test_a_file_is_no_folder(self, tmp_path):
        file = tmp_path / "kv"
        file.write_text("")
        with pytest.raises(ValueError, match="kv"):
            open_folder(file)

    def test_a_new_folder_is_ours_alone(self, tmp_path):
        open_folder(tmp_path / "a" / "kv")
        assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700


class TestEngine:
    def options(self, folder, **extra):
        return {
            "hicache_ratio": 1.0,
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(
                {"dir": str(folder), **extra}
            ),
        }

    @pytest.mark.parametrize("kind", ["plain", "state"])
    def test_the_next_engine_finds_the_files(self, tmp_path, kind):
        for life in range(2):
            harness = tiered(
                tmp_path / f"model{life}", kind, **self.options(tmp_path / "kv")
            )
            serve(harness, kind, total=count(ci=25, full=2000), seed=5)
            tiers = tiers_of(harness)
            assert tiers.storage is not None
            tiers.storage.wait_for_writes()
            assert tiers.stats.damaged == 0
            assert not harness.scheduler.own_incidents()
            assert (tiers.storage.stats.read >= 10) or life == 0
            harness.scheduler.tiers.close()

    @pytest.mark.parametrize("changed", ["one weight", "configuration"])
    def test_another_model_does_not(self, tmp_path, changed):
        """Not even if all but one number is equal."""
        models = [write_tiny_model(tmp_path / str(n), "LlamaForCausalLM") for n in "ab"]
        if changed == "one weight":
            file = next(models[1].glob("*.safetensors"))
            tensors = load_file(file)
            name = next(name for name in tensors if "down_proj" in name)
            tensors[name][0, 0] += 0.5
            save_file(tensors, file)
        else:
            file = models[1] / "config.json"
            config = json.loads(file.read_text())
            file.write_text(json.dumps(config | {"rope_theta": 20000.0}))
        prompt = [7] * 200
        found = []
        for model in (models[0], models[0], models[1]):
            harness = EngineHarness(
                model,
                max_total_tokens=640,
                enable_hierarchical_cache=True,
                **self.options(tmp_path / "kv"),
            )
            found.append(harness.generate(prompt, max_new_tokens=2).cached_tokens)
            harness.scheduler.tiers.close()
        assert found == [0, 192, 0]

    def test_another_layout_does_not(self, tmp_path):
        prompt = list(range(200))
        harness = tiered(tmp_path / "a", "plain", **self.options(tmp_path / "kv"))
        harness.generate(prompt, max_new_tokens=2)
        harness.scheduler.tiers.close()
        harness = tiered(tmp_path / "b", "draft", **self.options(tmp_path / "kv"))
        assert harness.generate(prompt, max_new_tokens=2).cached_tokens == 0
        harness.scheduler.tiers.close()

    def test_an_engine_that_stops_leaves_no_damage(self, tmp_path):
        """Otherwise the next engine would load it and stop, too, and so on."""
        harness = tiered(tmp_path / "a", "plain", **self.options(tmp_path / "kv"))
        prompt = list(range(200))
        harness.generate(prompt, max_new_tokens=2)
        tiers = tiers_of(harness)
        run = next(iter(harness.scheduler.cache.iter_cached_runs()))
        tensor = tiers.groups[0].layout.tensors[0]
        tensor.words[:, run.slots[:8]] = tensor.words[:, run.slots[:8]].bitwise_not()
        with pytest.raises(CanaryViolation):
            harness.generate(prompt, max_new_tokens=2)
        assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]

    def test_a_folder_that_fails_costs_hits_alone(self, tmp_path, monkeypatch, caplog):
        harness = tiered(tmp_path / "a", "plain", **self.options(tmp_path / "kv"))
        monkeypatch.setattr(unit_files, "os", FullDisk())
        serve(harness, "plain", total=12, seed=3)
        storage = tiers_of(harness).storage
        assert storage is not None
        storage.wait_for_writes()
        assert storage.stats.written == 0
        assert storage.stats.skipped > 0
        told = [r for r in caplog.records if "not written" in r.getMessage()]
        assert len(told) == 1
        assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        harness.scheduler.tiers.close()

    def test_a_slow_folder_delays_nobody(self, tmp_path, monkeypatch):
        """Neither those who would read from it, for longer than their policy says, nor
        those whose KV would be written."""
        slow = self.options(
            tmp_path / "kv", prefetch_timeout_base=0.02, prefetch_timeout_per_ki_token=0
        ) | {"hicache_storage_prefetch_policy": "timeout"}
        harness = tiered(tmp_path / "a", "plain", **slow)
        serve(harness, "plain", total=8, seed=3)
        harness.scheduler.tiers.close()
        is_quick = threading.Event()
        for name in ("read", "write"):
            monkeypatch.setattr(FileStore, name, self.waiting(name, is_quick))
        monkeypatch.setattr(unit_storage, "MOST_WAITING", 2)
        harness = tiered(tmp_path / "b", "plain", **slow)
        storage = tiers_of(harness).storage
        assert storage is not None and len(storage.stores[0]) > 0
        # The same prompts, whose files are there, and others.
        for seed in (3, 4):
            serve(harness, "plain", total=8, seed=seed)
        assert storage.stats.read == storage.stats.written == 0
        assert storage.stats.skipped > 0
        assert not harness.scheduler.own_incidents()
        is_quick.set()
        harness.scheduler.tiers.close()
        assert storage.stats.written > 0

    def waiting(self, name, event):
        method = getattr(FileStore, name)

        def run(*args, **options):
            event.wait(60)
            return method(*args, **options)

        return run

    @pytest.mark.parametrize(
        ("place", "name"), [(Path, "mkdir"), (os, "listdir")], ids=["write", "read"]
    )
    def test_a_folder_that_cannot_be_used_is_told_at_start(
        self, tmp_path, monkeypatch, place, name
    ):
        """Read-only, or unreadable."""
        folder = tmp_path / "kv"
        folder.mkdir(mode=0o700)
        real = getattr(place, name)

        def refuse(path, *args, **options):
            if folder in (path, *path.parents):
                raise OSError(30, "Read-only file system")
            return real(path, *args, **options)

        monkeypatch.setattr(place, name, refuse)
        with pytest.raises(ValueError, match="Read-only file system; name another"):
            tiered(tmp_path, "plain", **self.options(tmp_path / "kv"))

    def test_a_name_that_is_taken_costs_one_unit(self, tmp_path, caplog):
        """Not the others, as a disk that fails would."""
        prompt = list(range(200))
        harness = tiered(tmp_path / "a", "plain", **self.options(tmp_path / "kv"))
        harness.generate(prompt, max_new_tokens=2)
        storage = tiers_of(harness).storage
        storage.wait_for_writes()
        (path, *others) = sorted(
            file for file in (tmp_path / "kv").rglob("*") if file.is_file()
        )
        storage.clear()
        path.mkdir()
        harness.io.requests.append(FlushCacheReq(call_id=1, tiers=("device", "host")))
        harness.scheduler.step()
        harness.generate(prompt, max_new_tokens=2)
        storage.wait_for_writes()
        assert storage.stats.skipped == 1
        assert all(file.exists() for file in others)
        assert "KV is not written: " in caplog.text
        harness.scheduler.tiers.close()


class FullDisk:
    """The module `os` of a disk without space."""

    def __getattr__(self, name):
        return getattr(os, name)

    def replace(self, *_):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-hicache", "--disable-radix-cache"], "--disable-radix-cache"),
        (["--hicache-storage-backend", "file"], "--enable-hierarchical-cache"),
        (["--enable-hicache", "--hicache-ratio", "0"], "--hicache-ratio 0"),
        (
            ["--enable-hicache", "--hicache-storage-backend-extra-config", "{}"],
            "--hicache-storage-backend",
        ),
        (
            [
                *("--enable-hicache", "--kv-canary", "raise"),
                *("--kv-canary-report-dir", "/tmp", "--kv-canary-record", "10"),
            ],
            "--kv-canary-record 10",
        ),
        (
            ["--hicache-storage-backend-extra-config", '{"folder": "/x"}'],
            "folder",
        ),
        (
            ["--hicache-storage-backend-extra-config", '{"max_gb": 0}'],
            "max_gb 0",
        ),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    with pytest.raises((ValueError, SystemExit), match=message):
        ServerArgs.from_cli(["--model-path", "demo", "--device", "cpu", *flags])


def test_host_memory_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="--hicache-size 1000000 takes"):
        tiered(tmp_path, "plain", hicache_size=1_000_000)
    with pytest.raises(ValueError, match="no unit of group full"):
        tiered(tmp_path, "plain", hicache_ratio=0.01)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
