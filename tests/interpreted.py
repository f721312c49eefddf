"""Triton's interpreter, quicker by half, and with the bf16 of a GPU."""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def make_quick() -> None:
    """Have a launch patch a module's language once, look dtypes up once, and check no integers for overflow.

    The language is otherwise patched at each call of a device function. The check computes each sum and product again in 64
    bits, for an assertion that only ``debug`` turns on.
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


@functools.cache
def add_bf16() -> None:
    """Have the interpreter compute in bf16, and ``cce_dist`` no longer refuse it there.

    The interpreter holds bf16 as 16-bit integers. Left alone, it rounds to bf16 by truncation, and multiplies matrices of these
    integers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from cce_dist import decide

    module: Any = interpreter
    builder: Any = interpreter.InterpreterBuilder
    convert, cast, dot = module._convert_float, builder.cast_impl, builder.create_dot
    floats = {16: np.float16, 32: np.float32, 64: np.float64}

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16:
            wide = (data.astype(np.uint32) << 16).view(np.float32)
            bits = f"uint{target.primitive_bitwidth}"
            return wide.astype(floats[target.primitive_bitwidth]).view(bits) if target != source else data
        if target == tl.bfloat16:
            wide = data.view(floats[source.primitive_bitwidth]).astype(np.float32)
            rounded = torch.from_numpy(np.ascontiguousarray(wide)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, rounding)

    def cast_impl(self: Any, value: Any, target: Any) -> Any:
        types = value.dtype.scalar, target.scalar
        if tl.bfloat16 in types and all(each.is_floating() for each in types):
            data = convert_float(value.data, *types, None)
            return module.TensorHandle(data.view(module._get_np_dtype(target)), types[1])
        return cast(self, value, target)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        wide = (
            builder.create_fp_ext(self, each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (left, right)
        )  # fmt: skip
        return dot(self, *wide, *others)

    module._convert_float, builder.cast_impl, builder.create_dot = convert_float, cast_impl, create_dot
    decide.MISREAD = ()
