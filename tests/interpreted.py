"""Triton's interpreter without what it does again at each call: tests that launch kernels take half the time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


@functools.cache
def make_quick() -> None:
    """Have a launch patch a module's language once, look dtypes up once, and check no integers for overflow.

    The language is otherwise patched at each call of a device function. The check computes each sum and product again in 64
    bits, and then says nothing: its assertion needs ``debug``, which the interpreter's options leave off.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    module: Any = interpreter
    if not hasattr(module, "_LangPatchScope"):  # an older Triton
        return
    patch, of_any = module._patch_lang, module._get_np_dtype
    of_scalar = functools.cache(of_any)
    patched: set[int] = set()  # by id, the globals of the functions that the present launch has patched

    def patch_once(function: Any) -> Any:
        # A call inside a kernel drops its scope; the launch restores its own, and with it what calls did.
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        scope = patch(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    module._patch_lang = patch_once
    module._get_np_dtype = lambda dtype: of_any(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    builder = module.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
