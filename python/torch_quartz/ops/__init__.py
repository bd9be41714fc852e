"""The operators of namespace ``quartz`` as Python functions: for quartz, CPU and CUDA tensors.

Importing this package registers their fake kernels (for ``torch.compile`` and ``torch.export``) and their gradients.
``docs/ops`` has a page for each.
"""

from torch_quartz.ops.moe_topk import moe_topk
from torch_quartz.ops.rms_norm import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "moe_topk", "rms_norm"]
