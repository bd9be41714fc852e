"""torch.compile: every result equals that of the same program compiled by stock PyTorch for the native device."""

import contextlib
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch_quartz.integrations.inductor_bridge import as_promised

NATIVE = str(torch.quartz.native_device(0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled before counts, and a quartz graph that falls back to eager is an error."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Inductor cannot compile a graph of quartz.*")
        yield


def on(device, value):
    """Move tensors of nested lists, tuples and dicts; other leaves stay."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(on(device, item) for item in value)
    return {key: on(device, item) for key, item in value.items()} if isinstance(value, dict) else value


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


@contextlib.contextmanager
def repeatable():
    """What the native device computes twice alike; on host it does so anyway.

    On CUDA two compilations of one program differ in the last bits: Inductor times how it should reduce and whether it
    should pad a product, and the gradients of embeddings and cuDNN's convolutions are summed in any order.
    """
    if torch.quartz.substrate() == "host":
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with torch._inductor.config.patch(deterministic=True):
            yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_same(got, expected):
    """The same bits on host. On CUDA two compilations of one program may reduce in another order: the same values."""
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if torch.quartz.substrate() == "host":
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected)


@repeatable()
def same(function, *args, seed=0, **options):
    """Compile `function` for both devices; outputs, arguments after the call and gradients must be equal."""
    results = {}
    for device in (NATIVE, "quartz:0"):
        torch._dynamo.reset()
        arguments = on(device, args)
        compiled = torch.compile(function, **options)
        torch.manual_seed(seed)
        outputs = compiled(*arguments)
        differentiable = [tensor for tensor in flat(outputs) if tensor.requires_grad]
        if differentiable:
            sum(tensor.float().sum() for tensor in differentiable).backward()
        gradients = [tensor.grad for tensor in flat(arguments) if tensor.grad is not None]
        results[device] = flat(outputs) + flat(arguments) + gradients
        last = outputs
    expected, got = results[NATIVE], results["quartz:0"]
    assert len(expected) == len(got)
    for reference, tensor in zip(expected, got, strict=True):
        assert tensor.shape == reference.shape and tensor.dtype == reference.dtype
        assert tensor.stride() == reference.stride()
        assert_same(tensor, reference)
    return last


def kernels():
    """Number of graphs that Inductor compiled or found in its cache."""
    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]


class Block(torch.nn.Module):
    """A transformer block in small: embedding, attention, norms, a linear pair, a buffer."""

    def __init__(self, width=32, heads=4, words=64):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.heads = heads

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        x = x + torch.arange(tokens.shape[1], device=tokens.device)[None, :, None] / 10
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norm2(x)))))


@repeatable()
def train(device, steps=4, compile_step=False, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = Block().to(device)
    compiled = torch.compile(model, **options)
    # foreach: by default PyTorch chooses it for GPUs and quartz, and the loop over parameters for the CPU
    optimizer = optimizer(model.parameters(), lr=1e-2, foreach=True)
    step = torch.compile(optimizer.step) if compile_step else optimizer.step
    tokens = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


# ------------------------------------------------------------------ forward and backward


def test_forward_is_the_native_code():
    same(
        lambda x, y: (F.softmax(x @ y, -1) * 2 + y.sum(), x.relu().cumsum(0)), torch.randn(17, 17), torch.randn(17, 17)
    )
    assert kernels() >= 2


def test_backward():
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    same(lambda x, w: F.gelu(x @ w).softmax(-1).pow(2), x, w)


def test_training_loop():
    # The loss is not compiled: own kernels compute it, in another order of sums.
    torch.testing.assert_close(*(torch.tensor(train(device)[0]) for device in ("quartz:0", NATIVE)))


def test_compiled_optimizer_step():
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        (losses, parameters), (expected, references) = (
            train(device, compile_step=True, optimizer=optimizer) for device in ("quartz:0", NATIVE)
        )
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        if optimizer is torch.optim.SGD:  # Adam makes whole steps of gradients that are zero but for rounding
            torch.testing.assert_close(parameters, references)


def test_convolution_and_batch_norm():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())

    def run(x, weight, bias, mean, variance):
        y = F.conv2d(x, weight, bias, padding=1)
        return F.batch_norm(y, mean, variance, training=True).relu()

    same(
        run,
        torch.randn(2, 3, 10, 10, requires_grad=True),
        module[0].weight.detach().requires_grad_(),
        module[0].bias.detach().requires_grad_(),
        torch.zeros(8),
        torch.ones(8),
    )


def test_autocast():
    def run(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return x @ w, (x @ w).float().sum()

    outputs = same(run, torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True))
    assert outputs[0].dtype == torch.bfloat16


def test_autocast_around_the_compiled_call():
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    results = []
    for device in (NATIVE, "quartz"):
        torch._dynamo.reset()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16), torch.no_grad():
            results.append(torch.compile(lambda x, w: (x @ w).relu())(x.to(device), w.to(device)).cpu())
    assert results[0].dtype == torch.bfloat16
    assert_same(results[1], results[0])


# ------------------------------------------------------------------ shapes, views, mutation


def test_dynamic_shapes():
    compiled = torch.compile(lambda x: (x * 2).sum(-1) + x.shape[0], dynamic=True, fullgraph=True)
    for rows in (2, 3, 7, 31):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(compiled(x.to("quartz")).cpu(), (x * 2).sum(-1) + rows)
    assert counters["stats"]["unique_graphs"] == 1


def test_automatic_dynamic_shapes_with_backward():
    compiled = torch.compile(lambda x: (x.sin() * x.shape[0]).sum())
    for rows in (2, 3, 9):
        x, reference = torch.randn(rows, 4, device="quartz", requires_grad=True), None
        compiled(x).backward()
        reference = x.detach().cpu().cos() * rows
        torch.testing.assert_close(x.grad.cpu(), reference)


def test_mutated_inputs():
    def run(x, y):
        x.add_(1)
        y[:, 0] = 7
        return x.t() @ y

    same(run, torch.randn(4, 4), torch.randn(4, 4))


def test_mutation_raises_the_version_counter():
    x = torch.ones(3, device="quartz", requires_grad=True)
    buffer = torch.zeros(3, device="quartz")
    y = (x * buffer).sum()
    torch.compile(lambda b: b.add_(1))(buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_mutation_through_a_view():
    base = torch.zeros(4, 4, device="quartz")
    torch.compile(lambda row: row.copy_(torch.ones_like(row)).sum())(base[2])
    assert torch.equal(base.sum(1).cpu(), torch.tensor([0.0, 0.0, 4.0, 0.0]))


def test_outputs_that_are_views_of_inputs_share_their_storage():
    x = torch.randn(4, 6, device="quartz")
    same_tensor, view, alias, fresh = torch.compile(lambda x: (x, x[1:, ::2], x.t(), x + 1))(x)
    assert same_tensor is x or same_tensor.data_ptr() == x.data_ptr()
    for output in (view, alias):
        assert output.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert fresh.untyped_storage()._cdata != x.untyped_storage()._cdata
    view.zero_()
    assert torch.equal(x[1:, ::2].cpu(), torch.zeros(3, 3))


def test_outputs_that_share_memory_share_one_storage():
    def run(x):
        y = x + 1
        return y, y.view(-1), y.t()

    first, flat_view, transposed = torch.compile(run)(torch.randn(3, 4, device="quartz"))
    assert flat_view.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert transposed.untyped_storage()._cdata == first.untyped_storage()._cdata


def test_inputs_with_an_offset_and_strides():
    base = torch.randn(9, 13)

    def run(x):
        return (x * 2).sum(0), x.contiguous()

    expected = torch.compile(run)(base.to(NATIVE)[1:, 1::3])
    got = torch.compile(run)(base.to("quartz")[1:, 1::3])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, got, strict=True))


def test_data_dependent_shapes():
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        x = torch.tensor([0.0, 1.0, 0.0, 2.0])
        got = torch.compile(lambda x: x[x > 0] * 2, fullgraph=True)(x.to("quartz"))
        assert torch.equal(got.cpu(), torch.tensor([2.0, 4.0]))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


# ------------------------------------------------------------------ constants and devices


def test_device_constructors():
    def run(x):
        return (
            torch.arange(x.shape[0], device=x.device) + torch.zeros(x.shape[0], device=x.device, dtype=torch.int64) + x
        )

    out = same(run, torch.ones(5, dtype=torch.int64))
    assert out.device == torch.device("quartz:0")


def test_a_graph_without_tensor_arguments():
    out = torch.compile(lambda: torch.full((3,), 2.0, device="quartz") * torch.arange(3, device="quartz"))()
    assert out.device.type == "quartz" and out.tolist() == [0.0, 2.0, 4.0]


def test_captured_constants():
    table = torch.tensor([1.0, 2.0, 3.0], device="quartz")
    out = torch.compile(lambda x: x * table + torch.tensor([1.0, 2.0, 3.0], device="quartz"))(
        torch.ones(3, device="quartz")
    )
    assert out.tolist() == [2.0, 4.0, 6.0]
    table.add_(1)
    assert table.tolist() == [2.0, 3.0, 4.0]


def test_a_cpu_output_does_not_share_the_memory_of_quartz_tensors():
    def run(x):
        y = x + 1
        return y, y.cpu(), x.cpu(), x.to("cpu", torch.float64)

    x = torch.ones(4, device="quartz")
    y, y_cpu, x_cpu, x_double = torch.compile(run)(x)
    assert [t.device.type for t in (y, y_cpu, x_cpu, x_double)] == ["quartz", "cpu", "cpu", "cpu"]
    y.zero_()
    x.zero_()
    assert y_cpu.tolist() == [2.0] * 4 and x_cpu.tolist() == [1.0] * 4 and x_double.dtype == torch.float64


def test_a_cpu_input_moved_to_quartz():
    x = torch.arange(4.0)
    out = torch.compile(lambda x: x.to("quartz") * 2)(x)
    assert out.device.type == "quartz" and out.tolist() == [0.0, 2.0, 4.0, 6.0]
    moved = torch.compile(lambda x: x.to("quartz"))(x)
    moved.zero_()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.two_devices
def test_two_devices():
    def run(x, y):
        return x + 1, y * 2, x.to("quartz:1") + y

    x, y = torch.ones(3, device="quartz:0"), torch.full((3,), 5.0, device="quartz:1")
    a, b, c = torch.compile(run)(x, y)
    assert [str(t.device) for t in (a, b, c)] == ["quartz:0", "quartz:1", "quartz:1"]
    assert (a.tolist(), b.tolist(), c.tolist()) == ([2.0] * 3, [10.0] * 3, [6.0] * 3)
    moved = torch.compile(lambda x: x.to("quartz:1"))(x)
    moved.zero_()
    assert str(moved.device) == "quartz:1" and x.tolist() == [1.0] * 3


# ------------------------------------------------------------------ random numbers


def kept(y):
    """Where dropout(x).exp().cos() kept its input: elsewhere it is cos(exp(0))."""
    return (y.detach() - torch.tensor(1.0).cos()).abs() > 1e-3


def test_dropout_follows_the_seed_and_leaves_the_cpu_generator_alone():
    compiled = torch.compile(lambda x: F.dropout(x, 0.5))
    x = torch.ones(1000, device="quartz")
    torch.manual_seed(3)
    before = torch.default_generator.get_state()
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first.cpu(), second.cpu())
    assert torch.equal(torch.default_generator.get_state(), before)
    torch.quartz.manual_seed(3)
    assert torch.equal(compiled(x).cpu(), first.cpu())
    torch.manual_seed(3)
    assert torch.equal(compiled(x).cpu(), first.cpu()) and torch.equal(compiled(x).cpu(), second.cpu())
    state = torch.quartz.get_rng_state()
    third = compiled(x)
    torch.quartz.set_rng_state(state)
    assert torch.equal(compiled(x).cpu(), third.cpu())
    assert 350 < int((first != 0).sum()) < 650


@pytest.mark.parametrize("fallback_random", [False, True])
def test_dropout_uses_one_mask_forward_and_backward(fallback_random):
    with torch._inductor.config.patch(fallback_random=fallback_random):
        x = torch.ones(512, device="quartz", requires_grad=True)
        y = torch.compile(lambda x: F.dropout(x.sin(), 0.5).exp().cos())(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, kept(y))


def random_functions(x):
    return torch.rand_like(x), torch.randn(5, device=x.device) + x, torch.randint(0, 9, (5,), device=x.device)


def test_random_functions_equal_the_native_ones():
    same(random_functions, torch.zeros(5))


@pytest.mark.parametrize(
    "draw",  # one a graph: the order of operators that do not depend on one another is Inductor's
    [
        lambda x: torch.rand_like(x),
        lambda x: torch.randn(5, device=x.device) + x,
        lambda x: torch.randint(0, 9, (5,), device=x.device),
        lambda x: torch.multinomial(x + 1, 2),
        lambda x: F.dropout(x + 1, 0.25),
    ],
)
def test_with_fallback_random_they_equal_the_eager_ones(draw):
    x = torch.zeros(5, device="quartz")
    torch.manual_seed(9)
    eager = [draw(x), draw(x)]
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(9)
        compiled = torch.compile(draw)
        for want in eager:
            torch.testing.assert_close(compiled(x), want)


def test_eager_and_compiled_draw_from_one_generator():
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(11)
        eager = [torch.rand(4, device="quartz").cpu() for _ in range(3)]
        torch.manual_seed(11)
        compiled = torch.compile(lambda x: torch.rand(4, device=x.device) + x)
        zero = torch.zeros(4, device="quartz")
        mixed = [compiled(zero).cpu(), torch.rand(4, device="quartz").cpu(), compiled(zero).cpu()]
    assert all(map(torch.equal, eager, mixed))


def test_checkpoint_recomputes_with_the_same_random_numbers():
    def run(x):
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp().cos(), x, use_reentrant=False)

    x = torch.ones(512, device="quartz", requires_grad=True)
    y = torch.compile(run)(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept(y))


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    compiled = torch.compile(lambda x, w: F.relu(x @ w) + 1, mode=mode)
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    quartz = x.to("quartz"), w.to("quartz")
    for _ in range(3):  # CUDA graphs: warm up, record, replay
        out = compiled(*quartz).clone()
    torch.testing.assert_close(out.cpu(), F.relu(x @ w) + 1)


def test_reduce_overhead_trains():
    losses = train("quartz:0", mode="reduce-overhead")[0]
    torch.testing.assert_close(losses, train(NATIVE)[0], rtol=1e-4, atol=1e-5)


def test_fullgraph_and_a_control_flow_operator():
    def run(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.ones(3, device=x.device), lambda x: x - 1, (x,))

    compiled = torch.compile(run, fullgraph=True)
    assert compiled(torch.ones(3, device="quartz")).tolist() == [2.0] * 3
    assert compiled(-torch.ones(3, device="quartz")).tolist() == [-2.0] * 3


def test_freezing():
    model = Block().eval()
    tokens = torch.randint(0, 64, (2, 7))
    expected = model(tokens)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        out = torch.compile(model.to("quartz"))(tokens.to("quartz"))
    torch.testing.assert_close(out.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_other_backends(backend):
    losses = train("quartz:0", backend=backend)[0]
    torch.testing.assert_close(losses, train(NATIVE, backend=backend)[0], rtol=1e-5, atol=1e-6)


def test_a_compiled_function_inside_another():
    inner = torch.compile(lambda x: x.sin() + 1)

    @torch._dynamo.disable
    def hidden(x):
        return inner(x)

    outer = torch.compile(lambda x: hidden(x * 2) + inner(x))
    x = torch.randn(7)
    torch.testing.assert_close(outer(x.to("quartz")).cpu(), (x * 2).sin() + 1 + x.sin() + 1)


def test_several_threads():
    compiled = torch.compile(lambda x: (x * 2 + F.dropout(x, 0.0)).sum())
    results = {}

    def work(index):
        x = torch.full((50,), float(index), device="quartz", requires_grad=True)
        for _ in range(5):
            value = compiled(x)
            value.backward()
        results[index] = (value.item(), x.grad[0].item())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: (150.0 * index, 15.0) for index in range(4)}


# ------------------------------------------------------------------ where Inductor cannot serve


def test_no_compiler_gives_one_warning_and_right_results(monkeypatch):
    from torch._inductor.codegen.triton import TritonScheduling
    from torch_quartz.integrations import inductor

    def fails(*args, **kwargs):
        raise RuntimeError("no code for this node")

    monkeypatch.setattr(TritonScheduling, "codegen_node", fails)  # cuda
    monkeypatch.delenv("CXX", raising=False)
    options = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}

    inductor._warned.clear()
    x = torch.randn(64, requires_grad=True)
    q = x.detach().to("quartz").requires_grad_()
    with warnings.catch_warnings(record=True) as caught, torch._inductor.config.patch(options):
        warnings.simplefilter("always")
        y = torch.compile(lambda x: (F.dropout(x, 0.5) + x.sin() * 3).cos())(q)
        y.sum().backward()
        z = torch.compile(lambda x: x.exp())(q)
    ours = [str(w.message) for w in caught if "quartz" in str(w.message)]
    assert len(ours) == 1 and "runs uncompiled" in ours[0]
    torch.testing.assert_close(z.detach().cpu(), x.detach().exp())
    mask = ((q.detach().sin() * 3).cos() - y.detach()).abs().gt(1e-6).float() * 2
    expected = -(q.detach() * mask + q.detach().sin() * 3).sin() * (mask + 3 * q.detach().cos())
    torch.testing.assert_close(q.grad.cpu(), expected.cpu())


def test_an_error_of_the_program_is_not_swallowed():
    with pytest.raises(Exception, match=r"size|shape"):
        torch.compile(lambda x, y: x @ y)(torch.ones(2, 3, device="quartz"), torch.ones(2, 3, device="quartz"))


def test_ahead_of_time_packages_are_refused(tmp_path):
    program = torch.export.export(torch.nn.Linear(2, 2).to("quartz"), (torch.ones(1, 2, device="quartz"),))
    with pytest.raises(Exception, match="AOTInductor cannot package a program of quartz tensors"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))


# ------------------------------------------------------------------ the patch


def test_native_programs_are_left_alone():
    torch._dynamo.reset()
    counters.clear()
    with torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            out = torch.compile(lambda x: x.sin() * 3.25)(torch.ones(5))
    assert torch.equal(out, torch.ones(5).sin() * 3.25)
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 1


def test_undo_and_install(run_python):
    run_python(
        """
        import sys, torch, torch_quartz
        from torch_quartz.integrations import inductor
        assert "torch._inductor.compile_fx" not in sys.modules  # importing the package costs nothing here
        inductor.undo()
        import torch._inductor.compile_fx as module
        original = module.compile_fx
        inductor.install()
        assert module.compile_fx is not original and module.compile_fx.__wrapped__ is original
        inductor.undo()
        assert module.compile_fx is original
        """
    )


# ------------------------------------------------------------------ operators and subsystems of their own kind


@pytest.mark.parametrize("head_size", [8, 20])
def test_attention_in_half_precision(head_size):
    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 16, head_size) for _ in range(3)]
    results = []
    for device, dtype in (("cpu", torch.float32), ("quartz", torch.bfloat16)):
        arguments = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs]
        out = torch.compile(run)(*arguments) if device == "quartz" else run(*arguments)
        out.sum().backward()
        results.append([t.float().cpu() for t in (out.detach(), *(x.grad for x in arguments))])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
@pytest.mark.parametrize("value_size", [20, 24])
def test_attention_results_have_the_promised_layout(order, value_size):
    # The quartz kernel exists on the cuda substrate only; here its padded result is made by hand.
    inverse = tuple(order.index(i) for i in range(4))
    query = torch.empty([(2, 4, 16, 20)[i] for i in order]).permute(inverse)
    result = torch.randn(2, 4, 16, 24)[..., :value_size]
    operator = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
    with torch.device("meta"):
        promised = operator(query.to("meta"), query.to("meta"), torch.empty(2, 4, 16, value_size))
    got = as_promised(operator, (result, None, 3), (query, query), {"value": result})
    assert got[0].stride() == promised[0].stride() and torch.equal(got[0], result) and got[1:] == (None, 3)
    assert as_promised(operator, got, (query, query), {"value": result})[0] is got[0]
    backward = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default
    arguments = (result, query, query.clone(), torch.empty(2, 4, 16, value_size))
    results = (torch.randn(2, 4, 16, 24)[..., :20], query.clone(), result, None)
    for kind, tensor in zip(arguments[1:], as_promised(backward, results, arguments, {}), strict=False):
        assert tensor.stride() == torch.empty_like(kind).stride()


def test_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    def run(q, k, v, device, compiled):
        mask = create_block_mask(causal, 1, 1, 128, 128, device=device)
        function = torch.compile(flex_attention) if compiled else flex_attention
        return function(q.to(device), k.to(device), v.to(device), block_mask=mask).cpu()

    inputs = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(run(*inputs, "quartz", compiled=False), expected, rtol=1e-3, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on host Inductor has no code for it, and says so
        torch.testing.assert_close(run(*inputs, "quartz", compiled=True), expected, rtol=1e-3, atol=1e-3)


def test_operators_whose_quartz_kernel_takes_more_dtypes_than_the_cpus():
    x = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device="quartz")
    out = torch.compile(lambda x: torch.histc(x, bins=4, min=0, max=3) * 2, fullgraph=True)(x)
    assert out.device.type == "quartz" and out.tolist() == [2, 4, 0, 2]


def test_recurrent_layers():
    torch.manual_seed(0)
    layer = torch.nn.LSTM(4, 8, batch_first=True)
    x = torch.randn(2, 5, 4)
    expected = layer(x)[0]
    with torch._dynamo.config.patch(allow_rnn=True):
        got = torch.compile(layer.to("quartz"))(x.to("quartz"))[0]
    torch.testing.assert_close(got.cpu(), expected)


def test_storage_resizes_inside_a_graph():
    x = torch.randn(4, 4, device="quartz")
    expected = x.cpu() + 1

    def run(x):
        y = x + 1
        torch.ops.inductor.resize_storage_bytes_(x, 0)
        return y

    assert torch.equal(torch.compile(run, fullgraph=True)(x).cpu(), expected)
    assert x.untyped_storage().nbytes() == 0


def test_compiled_autograd():
    w = torch.randn(4, 4, device="quartz", requires_grad=True)
    x = torch.randn(4, 4, device="quartz")
    loss = torch.compile(lambda x: (x @ w).sin().sum())

    @torch.compile
    def step(x):
        loss(x).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
    torch.testing.assert_close(w.grad, x.T @ (x @ w.detach()).cos())


def test_nothing_is_kept_alive():
    compiled = torch.compile(lambda x: (x @ x).relu() @ x)
    x = torch.randn(64, 64, device="quartz", requires_grad=True)
    compiled(x).sum().backward()
    x.grad = None
    before = torch.quartz.memory_allocated()
    for _ in range(3):
        compiled(x).sum().backward()
        x.grad = None
    assert torch.quartz.memory_allocated() == before


def test_activations_are_freed_during_the_backward_pass():
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(8)]).to("quartz")
    x = torch.randn(1024, 128, device="quartz")

    def peak(function):
        for _ in range(2):
            model.zero_grad()
            torch.quartz.reset_peak_memory_stats()
            function(x).sum().backward()
        return torch.quartz.max_memory_allocated()

    assert peak(torch.compile(model)) <= 1.02 * peak(model)
