"""Answers on disk, so that a second epoch asks nobody.

An SQLite file in WAL mode: what is written is whole or absent after any crash, and several processes may use it at
once, on one machine: SQLite's log does not work over a network file system. (diskcache, the library for this, is no longer maintained and unpickles what it reads: CVE-2025-69872.) Each
answer has a checksum over its key and bytes, which finds damage, not malice: whoever may write here can change labels,
though not run code.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import xxhash

from paddlenlp_nebula.distill.identity import Identity
from paddlenlp_nebula.distill.messages import Answer
from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["AnswerCache", "Counts"]

_FILE = "answers-1.sqlite3"  # the number changes with the table
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, source TEXT, checksum BLOB, answer BLOB)"
_PATIENCE_S = 30.0
_LOG_BYTES = 4 << 20


@dataclass
class Counts:
    """What has become of requests in this process.

    Attributes:
        hits, misses: of `AnswerCache.get`.
        stored: answers written.
        declined: answers not written because the cache is full.
        damaged: answers, or whole files, that were found damaged, and dropped.
        failed: reads and writes that the system did not do (a full disk, a lock that nobody released).
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    declined: int = 0
    damaged: int = 0
    failed: int = 0


class AnswerCache:
    """Answers by their identity's key.

    A full cache keeps what it has and declines the rest: an epoch goes through all batches in turn, so that the usual
    rule, to drop what was not used for longest, would always drop what is wanted next. Answers of another teacher, or
    to another wish, do make room.

    Safe for threads; to be opened after a fork.

    Args:
        folder: where the file lies; created.
        limit_mb: of the file, 10^6 bytes; besides it there is a log of a few MB.
        source: `Identity.source` of the answers wanted from now on.
        warn: is told in a sentence, once for each sort, what went less well than it should.

    Attributes:
        counts: since it was opened.

    Raises:
        NebulaError: the folder cannot be written.
    """

    def __init__(self, folder: Path, limit_mb: float, source: str, warn: Callable[[str], None]) -> None:
        self.counts = Counts()
        self._path = folder / _FILE
        self._limit = int(limit_mb * 1e6)
        self._source = source
        self._warn, self._warned = warn, set[str]()
        self._others_dropped = False
        self._lock = Lock()
        self._file: sqlite3.Connection | None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, self._inode = self._open()
        except (OSError, sqlite3.OperationalError) as error:
            raise NebulaError(f"answers are to be cached in {folder}, which cannot be written: {error}") from error

    def get(self, identity: Identity) -> Answer | None:
        """The answer to a question, at whatever position of the data it was asked; None if it is not here."""
        key = identity.key
        with self._lock, self._minding_damage():
            connection = self._connection()
            row = connection.execute("SELECT checksum, answer FROM answers WHERE key = ?", (key,)).fetchone()
            answer = _read(identity, *row) if row else None
            if answer is not None:
                self.counts.hits += 1
                return answer
            if row:
                connection.execute("DELETE FROM answers WHERE key = ?", (key,))
                self._note_damage("an answer does not match its checksum")
        self.counts.misses += 1
        return None

    def put(self, answer: Answer) -> bool:
        """Keep an answer; whether it is here now."""
        data, key, here = answer.pack(), answer.identity.key, False
        with self._lock, self._minding_damage():
            if self._has_room(len(data)):
                row = (key, answer.identity.source, _checksum(key, data), data)
                self._connection().execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", row)
                self.counts.stored += 1
                here = True
            else:
                self.counts.declined += 1
                self._once(
                    "full", f"{self._path} is full ({self._limit / 1e6:g} MB): later answers are asked for again"
                )
        return here

    def close(self) -> None:
        """Nothing is found or kept from here on."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _connection(self) -> sqlite3.Connection:
        if self._file is None:
            raise sqlite3.OperationalError("it is closed")
        return self._file

    def _has_room(self, size: int) -> bool:
        """Whether an answer fits in, once others than ours have made room."""
        need = size + size // 32 + 16384  # pages are not filled to the last byte
        if self._used() + need > self._limit and not self._others_dropped:
            self._others_dropped = True
            self._connection().execute("DELETE FROM answers WHERE source != ?", (self._source,))
        return self._used() + need <= self._limit

    def _used(self) -> int:
        """Bytes of the file that hold something."""
        pages, free, size = (
            self._connection().execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _open(self) -> tuple[sqlite3.Connection, int]:
        """The file, a new one if it is damaged, and its number."""
        with _alone(self._path):
            try:
                return self._connect()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                self._note_damage(str(error))
                self._set_aside()
                return self._connect()

    def _connect(self) -> tuple[sqlite3.Connection, int]:
        connection = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        try:
            for statement in (
                "PRAGMA journal_mode = WAL",
                "PRAGMA synchronous = NORMAL",
                f"PRAGMA journal_size_limit = {_LOG_BYTES}",
                _TABLE,
            ):
                connection.execute(statement)
        except sqlite3.Error:
            connection.close()
            raise
        return connection, self._path.stat().st_ino

    def _set_aside(self) -> None:
        """Keep a damaged file for whoever wants to look at it; one only."""
        self._path.replace(self._path.with_suffix(".damaged"))
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    @contextmanager
    def _minding_damage(self) -> Iterator[None]:
        """What cannot be read counts as absent, and what cannot be written is not."""
        try:
            yield
        except sqlite3.OperationalError as error:
            self._note_failure(str(error))
        except sqlite3.DatabaseError as error:
            self._note_damage(str(error))
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Set the file aside, unless another process has done so, and open the one that is there then."""
        if self._file is not None:
            self._file.close()
            self._file = None
        try:
            with _alone(self._path):
                if self._path.exists() and self._path.stat().st_ino == self._inode:
                    self._set_aside()
            self._file, self._inode = self._open()
        except (OSError, sqlite3.Error) as error:  # do without it from here on
            self._note_failure(str(error))

    def _note_damage(self, what: str) -> None:
        self.counts.damaged += 1
        self._once("damaged", f"{self._path} is damaged ({what}): what is damaged is dropped and asked for again")

    def _note_failure(self, what: str) -> None:
        self.counts.failed += 1
        self._once("failed", f"{self._path} could not be read or written: {what}")

    def _once(self, sort: str, sentence: str) -> None:
        if sort not in self._warned:
            self._warned.add(sort)
            self._warn(sentence)


def _checksum(key: str, data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key.encode() + data)


def _read(identity: Identity, checksum: bytes, data: bytes) -> Answer | None:
    """An answer from its row; None if it is damaged."""
    if not isinstance(data, bytes) or checksum != _checksum(identity.key, data):
        return None
    try:
        answer = Answer.parse(memoryview(data), "the cache")
    except ProtocolError:
        return None
    return Answer(identity, answer.parts) if answer.identity.key == identity.key else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock on what lies at ``path``; the system releases it when the process dies."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
