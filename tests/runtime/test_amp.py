"""Autocast and gradient scaling."""

import pytest
import torch
from torch import nn


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return torch.randn(4, 8, device="quartz"), torch.randn(8, 8, device="quartz")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_policies(tensors, dtype):
    x, w = tensors
    half = x.to(dtype)
    with torch.autocast("quartz", dtype=dtype):
        # lower precision
        assert (x @ w).dtype == nn.functional.linear(x, w).dtype == torch.mm(x, w).dtype == dtype
        assert torch.bmm(x[None], w[None]).dtype == dtype
        assert nn.functional.conv1d(x[None], torch.ones(3, 4, 2, device="quartz")).dtype == dtype
        # float32
        for function in (torch.exp, torch.softmax, torch.sum, torch.log, nn.functional.layer_norm):
            arguments = {torch.softmax: (-1,), nn.functional.layer_norm: ((8,),)}.get(function, ())
            assert function(half, *arguments).dtype == torch.float32, function
        assert (
            nn.functional.cross_entropy(half, torch.zeros(4, dtype=torch.long, device="quartz")).dtype == torch.float32
        )
        # the widest of the arguments
        assert torch.cat([half, x]).dtype == torch.float32
        # unchanged
        assert torch.relu(half).dtype == dtype and torch.relu(x).dtype == torch.float32
        assert (half + half).dtype == dtype
        with torch.autocast("quartz", enabled=False):
            assert (x @ w).dtype == torch.float32
    assert (x @ w).dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        half @ w


def test_default_dtype_and_state():
    assert torch.amp.is_autocast_available("quartz")
    assert torch.get_autocast_dtype("quartz") == torch.float16  # CUDA's, on both substrates
    assert not torch.is_autocast_enabled("quartz")
    with torch.autocast("quartz"):
        assert torch.is_autocast_enabled("quartz") and not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("quartz")


def test_cpu_autocast_does_not_change_quartz(tensors):
    x, w = tensors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.float32
    with torch.autocast("quartz", dtype=torch.bfloat16):
        assert (x.cpu() @ w.cpu()).dtype == torch.float32


def test_unsupported_dtype_warns_and_disables(tensors):
    x, w = tensors
    with pytest.warns(UserWarning, match="(?i)quartz autocast only supports dtypes of torch.bfloat16, torch.float16"):
        context = torch.autocast("quartz", dtype=torch.float64)
    with context:
        assert (x @ w).dtype == torch.float32


def test_module_and_decorator(tensors):
    x, _ = tensors
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to("quartz")

    @torch.quartz.amp.autocast(dtype=torch.bfloat16)
    def forward(x):
        return model(x)

    y = forward(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(y.float(), model(x), rtol=0.05, atol=0.05)


def test_weight_cast_is_cached(tensors):
    x, w = tensors
    w.requires_grad_()
    torch.quartz.reset_op_counts()
    with torch.autocast("quartz", dtype=torch.bfloat16):
        for _ in range(3):
            x.to(torch.bfloat16) @ w
    copies = sum(
        sum(count)
        for name, count in torch.quartz.op_counts().items()
        if name in ("aten::_to_copy", "aten::_copy_from", "aten::copy_")
    )
    assert copies <= 4  # three of x, one of w


def test_custom_function():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="quartz", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            assert not torch.is_autocast_enabled("quartz")
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="quartz")
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.ones(2, dtype=torch.float16, device="quartz", requires_grad=True)
    with torch.autocast("quartz", dtype=torch.float16):
        y = Square.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [2, 2] and x.grad.dtype == torch.float16


def train(scaler, optimizer, model, x, poison=False):
    optimizer.zero_grad()
    with torch.autocast("quartz", dtype=torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    if poison:
        model.weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item(), norm


@pytest.mark.parametrize("make", [lambda **o: torch.amp.GradScaler("quartz", **o), torch.quartz.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(tensors, make, fused):
    x, _ = tensors
    torch.manual_seed(0)
    model = nn.Linear(8, 2).to("quartz")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    scaler = make(init_scale=1024.0, growth_interval=2)
    first, _ = train(scaler, optimizer, model, x)
    assert scaler.get_scale() == 1024
    second, _ = train(scaler, optimizer, model, x)
    assert second < first and scaler.get_scale() == 2048
    before = model.weight.detach().clone()
    train(scaler, optimizer, model, x, poison=True)
    assert torch.equal(model.weight, before) and scaler.get_scale() == 1024  # the step was skipped
    state = scaler.state_dict()
    other = make()
    other.load_state_dict(state)
    assert other.get_scale() == 1024
    disabled = make(enabled=False)
    loss = model(x).sum()
    assert disabled.scale(loss) is loss


def test_scaler_with_the_accelerator_default():
    scaler = torch.amp.GradScaler("quartz")
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones((), device="quartz")).device.type == "quartz"
