"""Which operators of a run have no proof that their results depend on nothing but their own row.

`determinism_report` reads the counters of ``torch.quartz.op_counts``. An operator is proven if it is an own kernel with
a property test (docs/determinism.md names it), or if the native device's kernel computes every element from the same
element of its operands (PyTorch marks those as pointwise), or only moves data, or has seen integers only.
"""

from dataclasses import dataclass

import torch

from torch_quartz import _C

# Operators of the native device that move data, make it, or look at its shape: no arithmetic whose order could vary.
_MOVES = frozenset(
    f"aten::{name}"
    for name in [
        "_copy_from",
        "_copy_from_and_resize",
        "_local_scalar_dense",
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "arange",
        "arange.start_out",
        "as_strided",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
        "detach",
        "diagonal",
        "embedding",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "expand_as",
        "eye",
        "fill_",
        "flip",
        "full",
        "gather",
        "index",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_put_",
        "_index_put_impl_",
        "index_select",
        "isin",
        "lift_fresh",
        "masked_fill_",
        "masked_scatter",
        "masked_scatter_",
        "masked_select",
        "narrow",
        "new_empty",
        "new_zeros",
        "nonzero",
        "one_hot",
        "ones",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
        "resize_",
        "roll",
        "scatter",
        "scatter_",
        "select",
        "slice",
        "slice_scatter",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "take_along_dim",
        "tile",
        "transpose",
        "tril",
        "triu",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "zero_",
        "zeros",
        "_efficientzerotensor",
        "record_stream",
        "set_",
        "bucketize",
        "searchsorted",
    ]
)

# Computed element by element, and not marked as such by PyTorch.
_POINTWISE = frozenset(f"aten::{name}" for name in ["floor_divide", "floor_divide_"])

# Pointwise, but the native CPU kernel computes the last elements of a range in another way than the others: the bits
# depend on the place (docs/ops/pointwise.md). So do those of `pow` with a fractional exponent, not told from squares.
_BY_PLACE = frozenset(
    f"aten::{name}"
    for name in [
        "exp2",
        "sinh",
        "cosh",
        "atanh",
        "elu",
        "selu",
        "celu",
        "mish",
        "atan2",
        "pow.Scalar",
        "pow.Tensor_Tensor",
    ]
)

# Reductions whose result does not depend on the order: comparisons, integers, booleans; sort, which is always stable.
_EXACT = frozenset(
    f"aten::{name}"
    for name in ["all", "any", "max", "min", "amax", "amin", "count_nonzero", "bincount", "histc", "equal", "sort"]
)


@dataclass(frozen=True)
class UnprovenOperator:
    """An operator without a proof.

    Attributes
    ----------
    name : str
        Namespace, operator and overload.
    calls : int
        How often it ran since the counters were reset.
    """

    name: str
    calls: int


def determinism_report() -> list[UnprovenOperator]:
    """List the operators that ran since ``torch.quartz.reset_op_counts()`` and have no proof.

    Returns
    -------
    list of UnprovenOperator
        The most frequent first; empty if every result is a function of its own row.

    Examples
    --------
    >>> torch.quartz.reset_op_counts()
    >>> y = torch.ones(3, device="quartz") + 1
    >>> torch_quartz.determinism_report()
    []
    >>> y = torch.fft.fft(y)
    >>> [operator.name for operator in torch_quartz.determinism_report()]
    ['aten::_fft_r2c']
    """
    exact = _C.exact_op_counts()  # on integers alone: no order can be seen
    unproven = [
        UnprovenOperator(name, count.fallback - exact.get(name, 0))
        for name, count in torch.quartz.op_counts().items()
        if count.fallback > exact.get(name, 0) and not _is_proven_on_the_native_device(name)
    ]
    return sorted(unproven, key=lambda operator: (-operator.calls, operator.name))


def _is_proven_on_the_native_device(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    base = f"{namespace}::{operator}"
    if {base, name} & _BY_PLACE and _C.substrate() == "host":
        return False
    if base in _MOVES or base in _EXACT or base in _POINTWISE or f"{namespace}::{rest}" in _MOVES:
        return True
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    op = getattr(packet, overload or "default", None) if packet is not None else None
    return op is not None and torch.Tag.pointwise in op.tags
