"""Between IR names and torch: operators, dtypes and constant arguments, in both directions."""

from collections.abc import Mapping
from functools import cache
from typing import Final, TypeAlias

import torch
from torch._ops import OpOverload

from shardwright.ir import Arg, GraphError, Ref, TensorType, Token

__all__ = ["TORCH_DTYPES", "TorchArg", "constant_arg", "dtype_name", "op_name", "tensor_type", "torch_arg", "torch_op"]

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}
_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}

TorchConstant: TypeAlias = (
    int | float | bool | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format
)
TorchArg: TypeAlias = "torch.Tensor | TorchConstant | list[TorchArg]"


def dtype_name(dtype: torch.dtype) -> str:
    """Short name, as in `ir.types`. Raises GraphError for a dtype the IR does not have."""
    if dtype not in _NAMES:
        raise GraphError(f"expected one of {', '.join(TORCH_DTYPES)}, found a tensor of {dtype}")
    return _NAMES[dtype]


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Type of a (fake) tensor; sizes must be plain integers."""
    return TensorType.of(dtype_name(tensor.dtype), tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))


def op_name(op: OpOverload) -> str:
    """`torch.ops.aten.mm.default` to `aten.mm.default`."""
    return str(op)


@cache
def torch_op(name: str) -> OpOverload:
    """Inverse of `op_name`. Raises GraphError when torch does not have it."""
    namespace, packet, overload = name.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise GraphError(f"expected an operator that torch {torch.__version__} has, found {name}") from error
    if not isinstance(found, OpOverload):
        raise GraphError(f"expected an operator overload, found {name}")
    return found


def constant_arg(value: object) -> Arg:
    """A constant argument of an fx node as IR. Raises GraphError for what the IR does not have."""
    if value is None or isinstance(value, int | float | bool | str):
        return value
    if isinstance(value, torch.dtype):
        return Token(f"dtype.{dtype_name(value)}")
    if isinstance(value, torch.device):
        return Token(f"device.{value.type}")
    if isinstance(value, torch.layout | torch.memory_format):
        return Token(str(value).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return tuple(constant_arg(item) for item in value)
    raise GraphError(f"expected a number, text, dtype, device, layout or list, found {value!r}")


_LAYOUTS: Final[Mapping[str, torch.layout | torch.memory_format]] = {
    "strided": torch.strided,
    "preserve_format": torch.preserve_format,
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
}


def torch_arg(arg: Arg, values: Mapping[str, torch.Tensor], device: torch.device) -> TorchArg:
    """An IR argument as torch wants it: refs looked up in `values`, device tokens replaced by `device`."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return [torch_arg(item, values, device) for item in arg]
    if not isinstance(arg, Token):
        return arg
    kind, _, rest = arg.text.partition(".")
    if kind == "dtype":
        return TORCH_DTYPES[rest]
    return device if kind == "device" else _LAYOUTS[arg.text]
