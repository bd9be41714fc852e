"""How many drafts of each request are worth verifying. Page: docs/ops/spec_schedule.md."""

import torch
from torch import Tensor


def spec_schedule(confidences: Tensor, step_times: Tensor, available: Tensor | None = None) -> Tensor:
    """Choose the drafts to verify in this step: those that give most expected tokens for the time of the step.

    A draft counts if it and all before it are accepted: the product of their confidences. Of all drafts of all requests
    the ``B`` with the largest products are verified, ``B`` being the smallest that makes
    ``(requests + sum of the products) / step_times[requests + B]`` largest. Equal products go by request, then draft.

    Parameters
    ----------
    confidences : Tensor
        Shape ``(requests, drafts)``, at most 16384 elements: the chance that a draft is accepted if those before it
        are. Below 0 and NaN count as 0, above 1 as 1.
    step_times : Tensor
        Shape ``(n,)``: the time of a step of 0, 1, ... n - 1 rows, in any unit. What is not above 0 is not chosen.
    available : Tensor, optional
        Shape ``(requests,)``: how many drafts a request has; all if not given.

    Returns
    -------
    Tensor
        Shape ``(requests,)``, int64: how many of its drafts each request gets verified.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, more than 16384 drafts, tensors on different devices.

    Examples
    --------
    >>> confidences = torch.tensor([[0.9, 0.8], [0.5, 0.1]], device="quartz")
    >>> step_times = torch.tensor([1.0, 1.0, 1.1, 1.2, 1.4, 2.5, 4.0], device="quartz")
    >>> torch_quartz.ops.spec_schedule(confidences, step_times).tolist()
    [2, 0]
    """
    return torch.ops.quartz.spec_schedule(confidences, step_times, available)


@torch.library.register_fake("quartz::spec_schedule")
def _(confidences, step_times, available=None):
    return confidences.new_empty((confidences.shape[0],), dtype=torch.int64)
