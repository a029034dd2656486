"""Makes Triton's interpreter cheaper for tests, without changing its results, except
for products and denormals of bfloat16, which it gets wrong."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

MODULE = "triton.runtime.interpreter"


class _Unchanged:
    """Replaces a patch's scope: there is nothing to restore."""

    def restore(self) -> None: ...


def make_cheaper() -> None:
    """Remove costs without effect from the interpreter, once per process, if Triton is
    imported.
    """
    interpreter: Any = sys.modules.get(MODULE)
    if interpreter is None or hasattr(interpreter._patch_lang, "cache_info"):
        return
    _call_at_once(interpreter)
    _patch_once(interpreter)
    _skip_unread_checks(interpreter)
    _look_types_up_once(interpreter)
    _widen_bfloat16(interpreter)
    _shift_bfloat16(interpreter)
    _reduce_by_halves(interpreter)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _describe_once(interpreter.tl.core)
        _trust_equal_types(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Replace the functions of `triton.language` by interpreted ones once per kernel.

    The interpreter does so at each launch, which restores them, and again at each call
    of a kernel's helper, which does not: searching the modules for functions takes
    half the time of a kernel with helpers.
    """
    patch: Callable[[Callable[..., Any]], object] = interpreter._patch_lang

    @functools.cache
    def patch_first(function: Callable[..., Any]) -> _Unchanged:
        patch(function)
        return _Unchanged()

    interpreter._patch_lang = patch_first


def _skip_unread_checks(interpreter: Any) -> None:
    """Skip recomputing integer sums, differences and products in 64 bits.

    That is for an assertion used only in debug mode, and takes more than half the time
    of a kernel that adds up bytes.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up_once(interpreter: Any) -> None:
    """Cache the numpy type of each Triton type, which otherwise builds a table of all
    types.
    """
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = look_up(kind)
        return found

    interpreter._get_np_dtype = np_dtype


def _widen_bfloat16(interpreter: Any) -> None:
    """Multiply matrices of bfloat16 as float32, which holds their products.

    The interpreter keeps bfloat16 as its bits, and would multiply those.
    """
    builder = type(interpreter.interpreter_builder)
    multiply = builder.create_dot
    core = interpreter.tl

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != core.bfloat16:
            return operand
        return interpreter.interpreter_builder.cast_impl(operand, core.float32)

    def create_dot(self: Any, a: Any, b: Any, *options: Any) -> Any:
        return multiply(self, widen(a), widen(b), *options)

    builder.create_dot = create_dot


def _shift_bfloat16(interpreter: Any) -> None:
    """Read bfloat16 as the upper half of a float32, which also holds for denormals.

    The interpreter takes signs, exponents and mantissas apart, for all types alike.
    """
    convert, core = interpreter._convert_float, interpreter.tl

    def convert_float(bits: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given == core.bfloat16 and wanted == core.float32:
            return bits.astype(np.uint32) << np.uint32(16)
        return convert(bits, given, wanted, rounding)

    interpreter._convert_float = convert_float


def _reduce_by_halves(interpreter: Any) -> None:
    """Combine all pairs of neighbours at once, half as many each time.

    A combination is associative, and a GPU too begins with whichever pairs it likes.
    The interpreter combines one element after the other, each for the price of a whole
    instruction.
    """

    def generic_reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
        rank = given[0].handle.data.ndim
        parts, axis = self.unravel(given, self.axis)
        kinds = [part.dtype for part in parts]
        values = [part.handle.data for part in parts]
        first, second = (
            (slice(None),) * axis + (slice(start, None, 2),) for start in (0, 1)
        )
        while values[0].shape[axis] > 1:  # a power of two
            sides = [value[side] for side in (first, second) for value in values]
            combined = self.combine_fn.fn(*map(self.to_tensor, sides, 2 * kinds))
            each = combined if isinstance(combined, tuple) else (combined,)
            values = [
                part.handle.data.astype(value.dtype, copy=False)
                for part, value in zip(each, values, strict=True)
            ]
        if not self.keep_dims:
            values = [np.squeeze(value, axis) for value in values]
        elif self.axis is None:
            values = [value.reshape((1,) * rank) for value in values]
        return list(map(self.to_tensor, values, kinds))

    interpreter.ReduceOps.generic_reduce = generic_reduce


def _call_at_once(interpreter: Any) -> None:
    """Call the functions of `triton.language` without the two functions around each,
    which see to an argument that is there.
    """
    semantic = interpreter.interpreter_semantic

    def patch_attr(
        target: Any, name: str, member: Any, builder: Any, scope: Any
    ) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(target, name, call)

    interpreter._patch_attr = patch_attr


def _trust_equal_types(interpreter: Any) -> None:
    """Take operands of one type as they are, and a number as one of its tensor's type.

    Promotion, casts and broadcasts of such operands, which change nothing, are half of
    the time of an instruction.
    """
    core = interpreter.tl.core
    semantic = type(interpreter.interpreter_semantic)
    check, equals = semantic.binary_op_type_checking_impl, core.dtype.__eq__
    broadcast = semantic.broadcast_impl_value

    def fits(number: object, kind: Any) -> bool:
        """Whether a number next to a tensor of this type is of it as well."""
        if kind.is_floating():
            return type(number) is float
        return (
            type(number) is int
            and kind.is_int()
            and not kind.is_bool()
            and kind.get_int_min_value() <= number <= kind.get_int_max_value()
        )

    def check_types(
        self: Any,
        left: Any,
        right: Any,
        allow_left_pointer: bool = False,
        allow_right_pointer: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(left) is core.tensor and not div_or_mod:
            kind = left.type.scalar
            if type(right) is core.tensor:
                if left.type is right.type and not kind.is_ptr():
                    return left, right
            elif arithmetic_check and fits(right, kind):
                return broadcast_both(self, left, self.scalar_constant(right, kind))
        allowed = (allow_left_pointer, allow_right_pointer)
        checked = check(self, left, right, *allowed, arithmetic_check, div_or_mod)
        return tuple(checked)

    def broadcast_both(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        are_blocks = left.type.is_block() and right.type.is_block()
        if are_blocks and left.handle.data.shape == right.handle.data.shape:
            return left, right
        return tuple(broadcast(self, left, right))

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or bool(equals(self, other))

    semantic.binary_op_type_checking_impl = check_types
    semantic.broadcast_impl_value = broadcast_both
    core.dtype.__eq__ = is_equal


def _describe_once(core: Any) -> None:
    """Cache the attributes of block types, and of tensors of each type.

    Every instruction makes both for its result: their names, checks and tuples of
    constants take three tenths of the time of a kernel of small tiles.
    """
    _keep_attributes(core.block_type, lambda element, shape: (element.name, *shape))
    _keep_attributes(core.tensor, lambda handle, kind: kind.name, own="handle")


def _keep_attributes(
    kind: Any, key: Callable[[Any, Any], Hashable], own: str = ""
) -> None:
    """Give instances of `kind` the attributes of the first instance with their key,
    except for the attribute `own`, which is the first argument.
    """
    describe: Callable[[Any, Any, Any], None] = kind.__init__
    known: dict[Hashable, dict[str, Any]] = {}

    def init(instance: Any, first: Any, second: Any) -> None:
        name = key(first, second)
        attributes = known.get(name)
        if attributes is None:
            describe(instance, first, second)
            known[name] = dict(instance.__dict__)
        else:
            instance.__dict__.update(attributes)
            if own:
                setattr(instance, own, first)

    kind.__init__ = init
