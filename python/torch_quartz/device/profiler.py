"""How often each operator ran an own quartz kernel, and how often the fallback to the native device's kernel."""

from typing import NamedTuple

from torch_quartz import _C


class OpCount(NamedTuple):
    """Calls of one operator.

    Attributes
    ----------
    own : int
        Calls that ran a kernel of this project.
    fallback : int
        Calls that ran the native device's kernel on aliases.
    """

    own: int
    fallback: int


def op_counts() -> dict[str, OpCount]:
    """Return the calls of each operator on quartz tensors since the start or `reset_op_counts`, most frequent first.

    Examples
    --------
    >>> torch.quartz.reset_op_counts()
    >>> y = torch.ones(2, device="quartz") * 3
    >>> sum(torch.quartz.op_counts()["aten::mul.Tensor"])
    1
    """
    counts = {name: OpCount(*pair) for name, pair in _C.op_counts().items()}
    return dict(sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0])))


def reset_op_counts() -> None:
    """Set the counters of `op_counts` to zero.

    Examples
    --------
    >>> torch.quartz.reset_op_counts()
    >>> torch.quartz.op_counts()
    {}
    """
    _C.reset_op_counts()
