"""Answers on disk: found again at any position, never wrong, within the limit, whatever happens to the file."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from paddlenlp_nebula.distill.cache import AnswerCache
from paddlenlp_nebula.distill.identity import Identity
from paddlenlp_nebula.distill.messages import Answer
from paddlenlp_nebula.errors import NebulaError

FILE = "answers-1.sqlite3"


def identity(batch: int, **values: object) -> Identity:
    fixed = {"position": batch, "tokenizer": "a" * 32, "teacher": "b" * 32, "knowledge": "labels"}
    return Identity(**{"batch": f"{batch:032x}", **fixed, **values})


def answer(batch: int, size: int = 100, **values: object) -> Answer:
    payload = (batch.to_bytes(4, "big") * (size // 4 + 1))[:size]
    return Answer(identity(batch, **values), (memoryview(payload),))


def opened(folder: Path, limit_mb: float = 10.0, **values: object) -> tuple[AnswerCache, list[str]]:
    warnings: list[str] = []
    return AnswerCache(folder, limit_mb, identity(0, **values).source, warnings.append), warnings


def found(cache: AnswerCache, batch: int, **values: object) -> bytes | None:
    result = cache.get(identity(batch, **values))
    return None if result is None else b"".join(result.parts)


def test_an_answer_is_found_in_the_next_epoch_and_after_a_restart(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path / "new" / "folder")
    assert cache.get(identity(1)) is None
    assert cache.put(answer(1))
    later = identity(1, position=1001)
    assert cache.get(later).identity == later
    cache.close()
    cache, _ = opened(tmp_path / "new" / "folder")
    assert found(cache, 1) == bytes(answer(1).parts[0])
    assert found(cache, 2) is None
    assert (cache.counts.hits, cache.counts.misses, cache.counts.damaged) == (1, 1, 0)
    assert not warnings


@pytest.mark.parametrize("name", ["batch", "tokenizer", "teacher", "knowledge"])
def test_another_teacher_tokenizer_or_wish_has_other_answers(tmp_path: Path, name: str) -> None:
    cache, _ = opened(tmp_path)
    cache.put(answer(1))
    assert cache.get(Identity(**{**vars(identity(1)), name: "f" * 32})) is None


def edit(folder: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(folder / FILE, isolation_level=None)
    connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE answers SET answer = substr(answer, 1, length(answer) - 1) WHERE key = ?",
        "UPDATE answers SET answer = 'text' WHERE key = ?",
        "UPDATE answers SET answer = NULL WHERE key = ?",
        "UPDATE answers SET checksum = x'00' WHERE key = ?",
        "UPDATE answers SET (answer, checksum) = (SELECT answer, checksum FROM answers WHERE key != ?1) WHERE key = ?1",
    ],
)
def test_a_damaged_answer_is_dropped_counted_and_asked_for_again(tmp_path: Path, statement: str) -> None:
    cache, warnings = opened(tmp_path)
    for batch in (1, 2):
        cache.put(answer(batch))
    edit(tmp_path, statement, identity(1).key)
    assert found(cache, 1) is None
    assert found(cache, 2) == bytes(answer(2).parts[0])
    assert (cache.counts.damaged, len(warnings)) == (1, 1)
    assert "does not match its checksum" in warnings[0]
    assert cache.put(answer(1))
    assert found(cache, 1) == bytes(answer(1).parts[0])


def test_an_answer_of_another_identity_with_a_valid_checksum_is_none(tmp_path: Path) -> None:
    from paddlenlp_nebula.distill.cache import _checksum

    cache, _ = opened(tmp_path)
    cache.put(answer(1))
    other, key = answer(2).pack(), identity(1).key
    edit(tmp_path, "UPDATE answers SET answer = ?, checksum = ? WHERE key = ?", other, _checksum(key, other), key)
    assert found(cache, 1) is None
    assert cache.counts.damaged == 1


@pytest.mark.parametrize("content", [b"", b"no database" * 100, b"SQLite format 3\x00" + bytes(5000)])
def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    cache, warnings = opened(tmp_path)
    assert cache.put(answer(1))
    assert found(cache, 1) == bytes(answer(1).parts[0])
    assert cache.counts.damaged == len(warnings) == bool(content)
    if content:
        assert (tmp_path / "answers-1.damaged").read_bytes() == content


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_a_torn_file_gives_right_answers_or_none(tmp_path: Path, keep: float) -> None:
    cache, _ = opened(tmp_path)
    for batch in range(100):
        cache.put(answer(batch, 3000))
    cache.close()
    path = tmp_path / FILE
    os.truncate(path, int(path.stat().st_size * keep))
    cache, warnings = opened(tmp_path)
    for batch in range(100):
        assert found(cache, batch) in (None, bytes(answer(batch, 3000).parts[0]))
    assert cache.counts.damaged >= 1
    assert len(warnings) == 1
    for batch in range(100):
        assert cache.put(answer(batch, 3000))
        assert found(cache, batch) == bytes(answer(batch, 3000).parts[0])


def test_flipped_bytes_give_right_answers_or_none(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path)
    for batch in range(50):
        cache.put(answer(batch, 3000))
    cache.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    for at in range(1111, len(data), 1111):
        data[at] ^= 0x55
    path.write_bytes(data)
    cache, warnings = opened(tmp_path)
    for batch in range(50):
        assert found(cache, batch) in (None, bytes(answer(batch, 3000).parts[0]))
    assert cache.counts.damaged >= 1
    assert len(warnings) == 1


def test_the_limit_holds_and_what_is_there_stays(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path, limit_mb=1.0)
    stored = [cache.put(answer(batch, 20_000)) for batch in range(100)]
    assert stored == sorted(stored, reverse=True)
    assert 40 <= sum(stored) <= 50
    cache.close()
    assert (tmp_path / FILE).stat().st_size <= 1e6
    cache, _ = opened(tmp_path, limit_mb=1.0)
    assert [found(cache, batch) is not None for batch in range(100)] == stored
    assert len(warnings) == 1
    assert "is full (1 MB)" in warnings[0]


def test_answers_of_another_teacher_make_room(tmp_path: Path) -> None:
    cache, _ = opened(tmp_path, limit_mb=1.0)
    for batch in range(60):
        cache.put(answer(batch, 20_000))
    cache.close()
    cache, warnings = opened(tmp_path, limit_mb=1.0, teacher="c" * 32)
    stored = [cache.put(answer(batch, 20_000, teacher="c" * 32)) for batch in range(40)]
    assert all(stored)
    assert not warnings
    assert (tmp_path / FILE).stat().st_size <= 1e6
    assert found(cache, 0) is None
    assert found(cache, 0, teacher="c" * 32) is not None


def fill(folder: Path, first: int, barrier: object) -> None:
    cache, warnings = opened(folder)
    barrier.wait()
    for batch in range(first, first + 150):
        cache.put(answer(batch, 2000))
        assert found(cache, batch) == bytes(answer(batch, 2000).parts[0])
    cache.close()
    os._exit(1 if warnings or cache.counts.failed or cache.counts.damaged else 0)


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        (tmp_path / FILE).write_bytes(b"no database" * 1000)
        opened(tmp_path)[0].close()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=fill, args=(tmp_path, first, barrier)) for first in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    cache, _ = opened(tmp_path)
    assert all(found(cache, batch) == bytes(answer(batch, 2000).parts[0]) for batch in range(250))


def test_one_process_repairs_and_the_other_goes_on(tmp_path: Path) -> None:
    """Both find the damage; only the first sets the file aside, and they share the new one."""
    one, other = opened(tmp_path)[0], opened(tmp_path)[0]
    for cache in (one, other):
        cache._begin_anew()
    one.put(answer(1))
    assert found(other, 1) == bytes(answer(1).parts[0])
    assert (tmp_path / "answers-1.damaged").exists()


def test_what_cannot_be_written_is_counted_and_training_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paddlenlp_nebula.distill.cache._PATIENCE_S", 0.1)
    cache, warnings = opened(tmp_path)
    lock = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    assert not cache.put(answer(1))
    assert not cache.put(answer(2))
    assert (cache.counts.failed, len(warnings)) == (2, 1)
    assert "could not be read or written: database is locked" in warnings[0]
    lock.execute("ROLLBACK")
    assert cache.put(answer(1))


def test_a_closed_one_finds_nothing_and_harms_nothing(tmp_path: Path) -> None:
    cache, warnings = opened(tmp_path)
    cache.put(answer(1))
    cache.close()
    cache.close()
    assert not cache.put(answer(2))
    assert found(cache, 1) is None
    assert (cache.counts.failed, cache.counts.damaged, len(warnings)) == (2, 0, 1)
    assert found(opened(tmp_path)[0], 1) is not None


def test_damage_that_cannot_be_repaired_ends_the_cache_and_not_the_training(tmp_path: Path, monkeypatch) -> None:
    cache, warnings = opened(tmp_path)
    cache.put(answer(1))
    monkeypatch.setattr(cache, "_open", lambda: (_ for _ in ()).throw(OSError("no space left on device")))
    cache._begin_anew()
    for _ in range(2):
        assert found(cache, 1) is None
        assert not cache.put(answer(1))
    assert cache.counts.failed == 5
    assert len(warnings) == 1
    assert "no space left on device" in warnings[0]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NebulaError, match=r"are to be cached in .*, which cannot be written"):
        opened(tmp_path / "file")
