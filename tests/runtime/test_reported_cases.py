"""Failures that users of other devices reported (A1, A5, A6 of our list), and the kind behind each.

Every expected value is the same call on the CPU.
"""

import contextlib
import itertools

import pytest
import torch

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def equal(result, expected):
    assert result.device.type == "quartz" and result.dtype == expected.dtype and result.shape == expected.shape
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), equal_nan=True)


class TestConversions:
    """A1 (pytorch#95207): the second conversion found no kernel."""

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_reported(self, mode):
        with mode():
            source = torch.rand(2, 3)
            x = source.to("quartz:0", dtype=torch.half)
            half = source.half()
            assert x.dtype == torch.half and x.device == torch.device("quartz:0")
            equal(x.to(torch.float), half.float())
            equal(x.float(), half.float())
            equal(x.to(torch.bfloat16), half.to(torch.bfloat16))
            y = x.to("cpu", torch.float64)
            assert y.dtype == torch.float64 and torch.equal(y, half.double())

    @pytest.mark.parametrize("source,target", itertools.product(DTYPES, DTYPES), ids=str)
    def test_every_pair_of_dtypes(self, source, target):
        base = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(source)
        x = base.to("quartz")
        expected = base.to(target)
        for mode in MODES.values():
            with mode():
                for result in (x.to(target), x.to("quartz:0", target), base.to("quartz").to(dtype=target, copy=True)):
                    assert result.device.type == "quartz" and result.dtype == target
                    assert torch.equal(result.cpu().view(torch.uint8), expected.view(torch.uint8))
                direct = base.to("quartz", dtype=target)
                assert torch.equal(direct.cpu().view(torch.uint8), expected.view(torch.uint8))
                assert torch.equal(x.to("cpu", target).view(torch.uint8), expected.view(torch.uint8))

    def test_gradients_pass_conversions(self):
        x = torch.rand(3, requires_grad=True)
        y = (
            x.to("quartz", torch.float16).to(torch.float64).to("cpu").sum()
            + x.to("quartz").bfloat16().float().sum().cpu()
        )
        y.backward()
        assert x.grad.tolist() == [2, 2, 2] and x.grad.dtype == torch.float32

    def test_type_methods(self):
        x = torch.arange(3, device="quartz")
        for name in ("float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat"):
            equal(getattr(x, name)(), getattr(torch.arange(3), name)())
        equal(x.type(torch.float32), torch.arange(3).float())
        equal(x.type_as(torch.ones(1, device="quartz")), torch.arange(3).float())
        assert x.to(torch.long) is x and x.to("quartz") is x and x.to("quartz:0") is x
        assert x.to("quartz", copy=True) is not x

    def test_memory_formats(self):
        base = torch.randn(2, 3, 4, 5)
        x = base.to("quartz", memory_format=torch.channels_last)
        assert x.is_contiguous(memory_format=torch.channels_last)
        y = x.to(torch.float16)
        assert y.stride() == base.to(memory_format=torch.channels_last).half().stride()
        assert torch.equal(x.cpu(), base) and x.cpu().is_contiguous(memory_format=torch.channels_last)


SCALAR_CALLS = {
    "rsub": lambda u: torch.rsub(u, 1),
    "1 - u": lambda u: 1 - u,
    "2 / u": lambda u: 2 / u,
    "2 ** u": lambda u: 2**u,
    "7 // u": lambda u: 7 // u,
    "7 % u": lambda u: 7 % u,
    "tensor - u": lambda u: torch.tensor(1.0) - u,
    "tensor * u": lambda u: torch.tensor(2.0, dtype=torch.float64) * u,
    "int tensor + u": lambda u: torch.tensor(2) + u,
    "bool tensor": lambda u: torch.tensor(True) * u,
    "u - tensor": lambda u: u - torch.tensor(1.0),
    "tensor > u": lambda u: torch.tensor(3.0) > u,
    "where": lambda u: torch.where(u > 0.5, torch.tensor(0.0), u),
    "where both": lambda u: torch.where(u > 0.5, torch.tensor(0.0), torch.tensor(1.0)),
    "maximum": lambda u: torch.maximum(torch.tensor(0.5), u),
    "pow": lambda u: torch.pow(torch.tensor(2.0), u),
    "atan2": lambda u: torch.atan2(torch.tensor(2.0), u),
    "clamp": lambda u: torch.clamp(u, torch.tensor(0.25), torch.tensor(0.75)),
    "lerp": lambda u: torch.lerp(u, u + 1, torch.tensor(0.5)),
    "masked_fill": lambda u: u.masked_fill(u > 0.5, torch.tensor(7.0)),
    "addcmul": lambda u: torch.addcmul(u, u, u, value=0.5),
    "index_put": lambda u: u.clone().index_put((torch.tensor([0]).to(u.device),), torch.tensor(5.0)),
    "set item": lambda u: [v := u.clone(), v.__setitem__((0, 1), torch.tensor(3.0))][0],
    "python complex": lambda u: u * 1j,
    "in place": lambda u: u.clone().mul_(torch.tensor(2.0)),
    "out": lambda u: torch.sub(torch.tensor(1.0), u, out=torch.empty_like(u)),
    "foreach": lambda u: torch._foreach_mul([u], torch.tensor(2.0))[0],
}


class TestScalarsOfTheCpu:
    """A5 (Torch-FL#238): a CPU scalar as the first operand."""

    @pytest.mark.parametrize("name", SCALAR_CALLS)
    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_calls(self, name, mode):
        torch.manual_seed(0)
        u = torch.rand(4, 8)
        with mode():
            if name == "clamp" and torch.quartz.substrate() == "cuda":  # CUDA's kernel takes no bounds on the CPU
                with pytest.raises(RuntimeError, match="min is on cpu"):
                    SCALAR_CALLS[name](u.to("quartz"))
            else:
                equal(SCALAR_CALLS[name](u.to("quartz")), SCALAR_CALLS[name](u))
        assert torch.ones(2, device="quartz").sum().item() == 2

    def test_a_quartz_scalar_does_not_move_a_cpu_tensor(self):
        with pytest.raises(RuntimeError, match="quartz"):
            torch.ones(3) + torch.ones(3, device="quartz")
        with pytest.raises(RuntimeError, match="quartz"):
            torch.ones(3) + torch.ones((), device="quartz")

    def test_type_promotion_follows_the_tensor(self):
        u = torch.ones(2, dtype=torch.float16, device="quartz")
        assert (torch.tensor(1.0, dtype=torch.float64) * u).dtype == torch.float16
        assert (torch.tensor(1) * torch.ones(2, device="quartz", dtype=torch.int8)).dtype == torch.int8
        assert (2.5 * torch.ones(2, device="quartz", dtype=torch.int8)).dtype == torch.float32


EMPTY_CALLS = {
    "square": lambda e: e.square(),
    "sum": lambda e: e.sum(),
    "sum dim": lambda e: e.sum(1),
    "prod": lambda e: e.prod(),
    "mean": lambda e: e.mean(),
    "mean dim": lambda e: e.mean(1),
    "any": lambda e: e.bool().any(),
    "all": lambda e: e.bool().all(),
    "softmax": lambda e: e.softmax(-1),
    "log_softmax": lambda e: e.log_softmax(0),
    "cat": lambda e: torch.cat([e, torch.ones(4, 3, device=e.device)], 1),
    "stack": lambda e: torch.stack([e, e]),
    "index_select": lambda e: torch.ones(3, 2, device=e.device).index_select(
        0, torch.empty(0, dtype=torch.long, device=e.device)
    ),
    "index": lambda e: torch.ones(3, device=e.device)[torch.zeros(3, dtype=torch.bool, device=e.device)],
    "topk": lambda e: e.t().topk(2, 1)[0],
    "sort": lambda e: e.sort(1)[0],
    "gather": lambda e: e.gather(1, e.long()),
    "scatter": lambda e: torch.zeros(4, 3, device=e.device).scatter(1, e.long(), e),
    "cumsum": lambda e: e.cumsum(0),
    "nonzero": lambda e: e.nonzero(),
    "unique": lambda e: e.unique(),
    "where": lambda e: torch.where(e > 0, e, -e),
    "linear": lambda e: torch.nn.functional.linear(
        torch.empty(0, 3, device=e.device), torch.ones(2, 3, device=e.device)
    ),
    "layer_norm": lambda e: torch.nn.functional.layer_norm(torch.empty(0, 3, device=e.device), (3,)),
    "embedding": lambda e: torch.nn.functional.embedding(
        torch.empty(0, dtype=torch.long, device=e.device), torch.ones(3, 2, device=e.device)
    ),
    "dropout": lambda e: torch.nn.functional.dropout(e),
    "conv2d": lambda e: torch.nn.functional.conv2d(
        torch.empty(0, 1, 4, 4, device=e.device), torch.ones(1, 1, 2, 2, device=e.device)
    ),
    "attention": lambda e: torch.nn.functional.scaled_dot_product_attention(
        *[torch.empty(1, 0, 4, device=e.device)] * 3
    ),
    "copy": lambda e: torch.empty_like(e).copy_(e),
    "fill": lambda e: e.clone().fill_(2),
    "random": lambda e: torch.rand(0, 3, device=e.device),
    "cpu and back": lambda e: e.cpu().to(e.device),
    "mm no rows": lambda e: torch.empty(0, 16, device=e.device) @ torch.ones(16, 8, device=e.device),
    "mm no inner": lambda e: torch.ones(4, 0, device=e.device) @ torch.ones(0, 8, device=e.device),
    "bmm": lambda e: torch.empty(0, 2, 3, device=e.device).bmm(torch.empty(0, 3, 2, device=e.device)),
    "addmm": lambda e: torch.addmm(
        torch.ones(4, 8, device=e.device), torch.ones(4, 0, device=e.device), torch.ones(0, 8, device=e.device)
    ),
    "foreach": lambda e: torch._foreach_add([e, e], 1)[1],
    "norm": lambda e: torch.linalg.vector_norm(e),
}


class TestEmpty:
    """A6 (Torch-FL#214): tensors without elements."""

    @pytest.mark.parametrize("name", EMPTY_CALLS)
    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_calls(self, name, mode):
        base = torch.ones(4, 8)
        with mode():
            expected = EMPTY_CALLS[name](torch.narrow(base, 1, 2, 0))
            equal(EMPTY_CALLS[name](torch.narrow(base.to("quartz"), 1, 2, 0)), expected)

    def test_backward_through_an_empty_slice(self):
        x = torch.ones(4, 8, device="quartz", requires_grad=True)
        e = torch.narrow(x, 1, 2, 0)
        (e.square().sum() + e.prod() + x.sum()).backward()
        assert torch.equal(x.grad.cpu(), torch.ones(4, 8))

    @pytest.mark.parametrize(
        "call", [lambda e: e.max(), lambda e: e.argmin(), lambda e: e.max(1), lambda e: e.median(1)]
    )
    def test_errors_are_those_of_the_cpu(self, call):
        with pytest.raises(Exception) as expected:
            call(torch.empty(4, 0))
        with pytest.raises(type(expected.value)):
            call(torch.empty(4, 0, device="quartz"))
