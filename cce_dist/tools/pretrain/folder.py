"""The folder of a run, which one run at a time holds; files that are whole or not there; checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cce_dist.tools.pretrain.exits import UsageError, say, writing
from cce_dist.tools.pretrain.ranks import Ranks

# A file system over the network gives a dead node's lock up after some time: 90 s for NFS.
WAIT_SECONDS, WAIT_OWN_SECONDS = 5.0, 100.0


@contextlib.contextmanager
def hold(out: Path, ranks: Ranks) -> Iterator[bool]:
    """Hold the folder of a run, made if it is not there, until the context ends.

    Yields:
        Whether this run had the folder last: it was started again, by its agent or its scheduler.

    Raises:
        UsageError: Another run holds it; on every rank.
        CheckpointError: It cannot be written; on every rank.
    """
    with contextlib.ExitStack() as held:

        def take() -> bool:
            with writing(out):
                (out / "checkpoints").mkdir(parents=True, exist_ok=True)
                return _lock(out, held)

        same = ranks.on_first(take)
        restarted = any(ranks.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))
        yield same or restarted


def job() -> str | None:
    """Return this run's name for its scheduler, the same when it is started again, or None."""
    return os.environ.get("RUN_ID") or os.environ.get("SLURM_JOB_ID")


def _lock(out: Path, held: contextlib.ExitStack) -> bool:
    """Take the lock until ``held`` closes; return whether its last holder was this very run."""
    # A Slurm job that is queued again keeps its number, but so does everything that is started within one allocation.
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 or bool(os.environ.get("RUN_ID"))
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    lock = held.enter_context((out / "lock").open("a+", encoding="utf-8"))
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                say(f"{out} cannot be locked ({error.strerror}): see to it that no other run writes there")
                return False
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        holder = _holder(lock)
        own = (again and holder.get("job") == job()) or (launch is not None and holder.get("launch") == launch)
        if time.monotonic() - start > (WAIT_OWN_SECONDS if own else WAIT_SECONDS):
            who = "process {pid} on {host}, since {since}".format_map({"pid": "?", "host": "?", "since": "?"} | holder)
            raise UsageError(f"another run holds {out}: {who}; use another --out, or end that run")
        time.sleep(0.2)
    same = again and job() is not None and _holder(lock).get("job") == job()
    us = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S"), "job": job()}
    lock.seek(0)
    lock.truncate()
    lock.write(json.dumps(us | {"launch": launch}) + "\n")
    lock.flush()
    return same


def _holder(lock: TextIO) -> dict[str, Any]:
    lock.seek(0)
    try:
        holder = json.loads(lock.read())
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Replace a file, whole or not at all: the text is flushed to disk before it gets the name."""
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
