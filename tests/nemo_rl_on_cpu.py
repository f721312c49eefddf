"""NeMo-RL's losses and log-probabilities without what its workers need besides: Megatron-Bridge, Ray, vLLM, loggers.

Its modules import those for types and for work that no loss does. Here such a module has any name, each an empty class.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = "megatron.bridge", "nemo_rl.models.policy", "nemo_rl.models.generation", "nemo_rl.utils"


class _Absent(types.ModuleType):
    __path__: list = []  # noqa: RUF012, what a package has

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if any(f"{fullname}.".startswith(f"{name}.") for name in ABSENT):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def use_stand_ins() -> None:
    """Have this process find the modules of ``ABSENT``, for good."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
