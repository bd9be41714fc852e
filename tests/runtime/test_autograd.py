"""Autograd: checkpointing, anomaly mode, hooks, own Functions, higher derivatives, torch.func."""

import pytest
import torch
import torch.nn.attention
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pair(*shape):
    """Return a CPU tensor that requires gradients, and the same on quartz."""
    x = torch.randn(*shape, requires_grad=True)
    return x, x.detach().to("quartz").requires_grad_()


def same(result, expected):
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve_rng_state", [False, True])
def test_checkpoint(use_reentrant, preserve_rng_state):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to("quartz")
    x = torch.randn(3, 4, device="quartz", requires_grad=True)
    model(x).sum().backward()
    expected = [x.grad.clone()] + [p.grad.clone() for p in model.parameters()]
    x.grad = None
    model.zero_grad()
    output = checkpoint(model, x, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    output.sum().backward()
    for got, want in zip([x.grad] + [p.grad for p in model.parameters()], expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_random_numbers(use_reentrant):
    x = torch.ones(1000, device="quartz", requires_grad=True)
    masks = []

    def block(x):
        y = torch.nn.functional.dropout(x * 1.0, 0.5)
        masks.append(y.detach() != 0)
        return y

    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert torch.equal(x.grad != 0, masks[0])  # from the second run, without the reentrant kind cut short


def test_checkpoint_under_autocast():
    layer = torch.nn.Linear(4, 4).to("quartz")
    x = torch.randn(2, 4, device="quartz", requires_grad=True)
    seen = []

    def block(x):
        seen.append((x @ layer.weight).dtype)
        return layer(x)

    with torch.autocast("quartz", dtype=torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=False)
    y.float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_checkpoint_sequential():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).to("quartz")
    x = torch.randn(2, 4, device="quartz", requires_grad=True)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    assert x.grad.shape == x.shape


def test_anomaly_mode_names_the_forward_call():
    x = torch.zeros(2, device="quartz", requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"'SqrtBackward0' returned nan values"),
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        torch.autograd.set_detect_anomaly(True),
    ):
        (x.sqrt() * 0).sum().backward()
    assert (x.detach() + 1).sum().item() == 2


def test_version_counter_guards_saved_tensors():
    x = torch.ones(2, device="quartz", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    z = torch.ones(3, device="quartz")
    version = z._version
    z.add_(1)
    z[0] = 5
    assert z._version == version + 2


def test_hooks():
    x = torch.ones(3, device="quartz", requires_grad=True)
    order = []
    handle = x.register_hook(lambda grad: order.append("tensor") or grad * 2)
    x.register_post_accumulate_grad_hook(lambda p: order.append("post"))
    y = x * 3
    y.grad_fn.register_prehook(lambda grads: order.append("pre"))
    y.retain_grad()
    y.sum().backward()
    assert x.grad.tolist() == [6, 6, 6] and y.grad.tolist() == [1, 1, 1] and order == ["pre", "tensor", "post"]
    handle.remove()

    layer = torch.nn.Linear(2, 2).to("quartz")
    layer.register_forward_pre_hook(lambda m, args: order.append("forward pre"))
    layer.register_forward_hook(lambda m, args, out: out + 1)
    layer.register_full_backward_hook(lambda m, gi, go: order.append(go[0].device.type))
    layer(torch.ones(1, 2, device="quartz", requires_grad=True)).sum().backward()
    assert order[-2:] == ["forward pre", "quartz"]


def test_saved_tensor_hooks():
    x = torch.ones(4, device="quartz", requires_grad=True)
    packed = []

    def pack(t):
        packed.append(t.device.type)
        return t.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to("quartz")):
        y = (x * x).sum()
    y.backward()
    assert x.grad.tolist() == [2, 2, 2, 2] and "quartz" in packed
    x.grad = None
    for pin in (False, True):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin, device_type="quartz"):
            y = (x.exp() * x).sum()
        y.backward()
    assert x.grad is not None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return x**3 * scale, x.detach() > 0

    @staticmethod
    def backward(ctx, grad, _):
        (x,) = ctx.saved_tensors
        return None if grad is None else 3 * x**2 * grad * ctx.scale, None


def test_own_function():
    x, q = pair(5)
    for t in (x, q):
        y, positive = Cube.apply(t, 2.0)
        y[positive].sum().backward()
    same(q.grad, x.grad)
    assert torch.autograd.gradcheck(
        lambda t: Cube.apply(t, 2.0)[0], torch.randn(3, dtype=torch.float64, device="quartz", requires_grad=True)
    )


class DirtyDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_own_function_in_place():
    x = torch.ones(3, device="quartz", requires_grad=True)
    y = x.clone()
    z = DirtyDouble.apply(y)
    assert z is y
    z.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_double_backward_and_gradient_penalty():
    x, q = pair(4, 4)
    for t in (x, q):
        y = (t @ t).tanh().sum()
        (grad,) = torch.autograd.grad(y, t, create_graph=True)
        (grad.square().sum() + y).backward()
    same(q.grad, x.grad)


def math_attention(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivative
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.conv2d(x.reshape(1, 1, 4, 4), x.reshape(1, 1, 4, 4)[..., :2, :2]),
        lambda x: torch.linalg.solve(x + 5 * torch.eye(4, dtype=x.dtype, device=x.device), x),
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: math_attention(x[None]),
        lambda x: torch.cumsum(x, 0).prod(1),
    ],
)
def test_gradcheck(function):
    x = torch.randn(4, 4, dtype=torch.float64, device="quartz", requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_backward_with_inputs_and_several_roots():
    x, q = pair(3)
    for t in (x, q):
        a, b = t * 2, t.exp()
        torch.autograd.backward([a, b], [torch.ones_like(a), torch.full_like(b, 2)], inputs=[t])
    same(q.grad, x.grad)


def test_gradients_across_devices():
    x = torch.randn(3, requires_grad=True)
    y = (x.to("quartz") * 2).cpu() + x
    y.sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_sparse_and_accumulated_gradients():
    table = torch.nn.Embedding(6, 2, sparse=True).to("quartz")
    for _ in range(2):
        table(torch.tensor([1, 1, 4], device="quartz")).sum().backward()
    dense = table.weight.grad.to_dense().cpu()
    assert dense[1].tolist() == [4, 4] and dense[4].tolist() == [2, 2] and dense[0].tolist() == [0, 0]


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3, device="quartz")
        y = x * 2
        y.add_(1)
        view = y[1:]
        assert y.is_inference() and view.is_inference() and x.is_inference()
    with pytest.raises(RuntimeError, match=r"Inference tensors|inference"):
        torch.ones(3, device="quartz", requires_grad=True) * y
    assert not torch.ones(1, device="quartz").is_inference()


def test_no_grad_and_set_grad_enabled():
    x = torch.ones(2, device="quartz", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.add_(1)
    with torch.set_grad_enabled(False):
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)


class TestFunc:
    def test_grad_and_hessian(self):
        x, q = pair(4)
        f = lambda t: t.exp().square().sum()  # noqa: E731
        for transform in (
            torch.func.grad,
            torch.func.hessian,
            lambda f: torch.func.grad(lambda t: torch.func.grad(f)(t).sum()),
        ):
            same(transform(f)(q.detach()), transform(f)(x.detach()))

    def test_vmap(self):
        x, q = pair(3, 4)
        same(torch.func.vmap(torch.dot)(q, q), torch.func.vmap(torch.dot)(x, x))
        f = torch.func.vmap(torch.func.grad(lambda t: t.sin().sum()))
        same(f(q), f(x))
        g = torch.func.vmap(torch.linalg.norm, in_dims=1)
        same(g(q), g(x))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_vmap_with_random_numbers(self, randomness):
        q = torch.zeros(3, 50, device="quartz")
        out = torch.func.vmap(lambda t: t + torch.rand_like(t), randomness=randomness)(q)
        assert torch.equal(out[0], out[1]) == (randomness == "same")

    def test_forward_mode(self):
        x, q = pair(4)
        f = lambda t: (t.tanh() * t).sum()  # noqa: E731
        a = torch.func.jvp(f, (x.detach(),), (torch.ones(4),))
        b = torch.func.jvp(f, (q.detach(),), (torch.ones(4, device="quartz"),))
        same(b[0], a[0])
        same(b[1], a[1])
        same(torch.func.jacfwd(torch.sin)(q.detach()), torch.func.jacfwd(torch.sin)(x.detach()))
        same(torch.func.jacrev(torch.sin)(q.detach()), torch.func.jacrev(torch.sin)(x.detach()))

    def test_functional_call_and_per_sample_gradients(self):
        model = torch.nn.Linear(3, 2)
        x = torch.randn(5, 3)

        def loss(parameters, sample):
            return torch.func.functional_call(model, parameters, (sample,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        expected = per_sample({k: v.detach() for k, v in model.named_parameters()}, x)
        moved = {k: v.detach().to("quartz") for k, v in model.named_parameters()}
        result = per_sample(moved, x.to("quartz"))
        for name, value in expected.items():
            same(result[name], value)

    def test_vjp_linearize_and_functionalize(self):
        x, q = pair(4)
        f = lambda t: (t * t).sum() + t.clone().add_(1).prod()  # noqa: E731
        same(
            torch.func.vjp(f, q.detach())[1](torch.ones((), device="quartz"))[0],
            torch.func.vjp(f, x.detach())[1](torch.ones(()))[0],
        )
        same(torch.func.functionalize(f)(q.detach()), f(x.detach()))
        same(torch.func.linearize(f, q.detach())[1](q.detach()), torch.func.linearize(f, x.detach())[1](x.detach()))
