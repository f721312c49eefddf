"""Wrong arguments, which a function names in one line before any kernel or collective."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class NoOperator(TorchDispatchMode):
    """Fails where an operator of the library runs, and so where a kernel or a collective would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace != "cce_dist", f"{func} ran before the arguments were checked"
        return func(*args, **(kwargs or {}))


@contextmanager
def refused(says: str, kind: Any = ValueError) -> Iterator[None]:
    """Raise unless what is inside ends in such an error, whose one line matches ``says``."""
    with pytest.raises(kind, match=says) as error:
        yield
    assert "\n" not in str(error.value)


def result_of(function: Callable[[], Any]) -> Any:
    """Return what a call returns, or the exception that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def assert_changes_refused(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    rows: Iterable[tuple[dict[str, Any], type[Exception], str]],
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Raise unless a call with each of these changes of its arguments ends in the error; name all rows that do not."""
    wrong = []
    for change, error, says in rows:
        try:
            with inside():
                function(**(arguments | change))
        except Exception as raised:
            if not (isinstance(raised, error) and re.search(says, str(raised)) and "\n" not in str(raised)):
                wrong.append(f"{says}: {raised!r}")
        else:
            wrong.append(f"{says}: no error")
    assert not wrong, "\n".join(wrong)
