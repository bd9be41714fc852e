"""quartz::moe_experts in the memory of a GPU: what its kernels serve, against a loop in float64, and its bits."""

import pytest
import torch
from test_moe_experts import OAI, layer, loop, to
from torch_quartz import ops
from torch_quartz.testing import same_bits

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 70, 300])
def test_values_and_bits_of_a_token(dtype, tokens):
    arguments = layer(tokens, 2, 8, 128, 64, dtype)
    on_gpu = to(arguments, "quartz")
    got = ops.moe_experts(**on_gpu)
    torch.testing.assert_close(got.cpu().double(), loop(**arguments), rtol=2e-2, atol=2e-2)
    shared = {name: on_gpu[name] for name in ("up", "down")}
    for place in {0, tokens // 2, tokens - 1}:
        alone = ops.moe_experts(**{name: on_gpu[name][place : place + 1] for name in ("x", "ids", "weights")}, **shared)
        assert same_bits(alone[0], got[place])


def test_the_gate_of_gpt_oss():
    arguments = layer(9, 4, 8, 128, 64, torch.bfloat16, transposed=True, biases=True)
    got = ops.moe_experts(**to(arguments, "quartz"), **OAI)
    torch.testing.assert_close(got.cpu().double(), loop(**arguments, **OAI), rtol=3e-2, atol=3e-2)


def test_what_is_not_served_says_so():
    with pytest.raises(NotImplementedError, match="quartz::moe_experts: on a GPU"):
        ops.moe_experts(**to(layer(3, 2, 4, 33, 7), "quartz"))
