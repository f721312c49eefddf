"""Wrong arguments, which a function names in one line before any kernel or collective."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode


class NoOperator(TorchDispatchMode):
    """Fails where an operator of the library runs, and so where a kernel or a collective would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace != "cce_dist", f"{func} ran before the arguments were checked"
        return func(*args, **(kwargs or {}))


class Bad(NamedTuple):
    """A call with wrong arguments, the error that it raises, and what the error's one line says."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    says: str


def assert_refused(rows: Iterable[Bad], inside: Callable[[], AbstractContextManager[Any]] = NoOperator) -> None:
    """Raise unless each row is refused by its error, in one line; name all rows that are not."""
    wrong = []
    for row in rows:
        try:
            with inside():
                row.call()
        except Exception as raised:
            if isinstance(raised, row.error) and re.search(row.says, str(raised)) and "\n" not in str(raised):
                continue
            wrong.append(f"{row.name}: {type(raised).__name__}: {raised}")
        else:
            wrong.append(f"{row.name}: no error")
    assert not wrong, "\n".join(wrong)


def assert_changes_refused(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    rows: Iterable[tuple[dict[str, Any], type[Exception], str]],
) -> None:
    """Raise unless a call is refused with each of these changes of its arguments. Operators may run: they read values."""
    calls = (
        Bad(says, lambda change=change: function(**(arguments | change)), error, says) for change, error, says in rows
    )
    assert_refused(calls, nullcontext)
