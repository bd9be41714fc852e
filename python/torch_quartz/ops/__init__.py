"""The operators of namespace ``quartz`` as Python functions: for quartz, CPU and CUDA tensors.

Importing this package registers their fake kernels (for ``torch.compile`` and ``torch.export``) and their gradients.
``docs/ops`` has a page for each.
"""

from torch_quartz.ops.apply_token_bitmask_ import apply_token_bitmask_
from torch_quartz.ops.attention import attention
from torch_quartz.ops.gated_activation import gated_activation, gelu_and_mul, silu_and_mul
from torch_quartz.ops.gated_delta_rule import gated_delta_rule
from torch_quartz.ops.layer_norm import layer_norm
from torch_quartz.ops.linear import linear
from torch_quartz.ops.linear_quantized import linear_quantized
from torch_quartz.ops.markov_draft import markov_draft
from torch_quartz.ops.moe_experts import moe_experts
from torch_quartz.ops.moe_experts_quantized import moe_experts_quantized
from torch_quartz.ops.moe_topk import moe_topk
from torch_quartz.ops.ngram_propose import ngram_propose
from torch_quartz.ops.paged_attention import attention_plan, paged_attention, write_kv
from torch_quartz.ops.quantize import (
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
)
from torch_quartz.ops.quantized_weight import (
    QuantizedWeight,
    from_compressed_tensors,
    from_fp8,
    from_modelopt,
    from_mxfp4,
    unswizzle_scales,
)
from torch_quartz.ops.random_fill import bernoulli_, exponential_, normal_, uniform_
from torch_quartz.ops.rms_norm import add_rms_norm, rms_norm
from torch_quartz.ops.rotary import rotary, rotary_qk
from torch_quartz.ops.sample import SampleResult, count_tokens, sample, token_bits, token_logprobs
from torch_quartz.ops.selective_scan import selective_scan
from torch_quartz.ops.spec_schedule import spec_schedule
from torch_quartz.ops.spec_verify import VerifyResult, spec_verify

__all__ = [
    "QuantizedWeight",
    "SampleResult",
    "VerifyResult",
    "add_rms_norm",
    "apply_token_bitmask_",
    "attention",
    "attention_plan",
    "bernoulli_",
    "count_tokens",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "exponential_",
    "from_compressed_tensors",
    "from_fp8",
    "from_modelopt",
    "from_mxfp4",
    "gated_activation",
    "gated_delta_rule",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "linear_quantized",
    "markov_draft",
    "moe_experts",
    "moe_experts_quantized",
    "moe_topk",
    "ngram_propose",
    "normal_",
    "paged_attention",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "rms_norm",
    "rotary",
    "rotary_qk",
    "sample",
    "selective_scan",
    "silu_and_mul",
    "spec_schedule",
    "spec_verify",
    "token_bits",
    "token_logprobs",
    "uniform_",
    "unswizzle_scales",
    "write_kv",
]
