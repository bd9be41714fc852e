"""torch.quartz.Graph on both substrates: what a capture holds, what it leaves alone, and the bits of its replays."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from graph_helpers import captured, flat, fresh
from torch_quartz import ops
from torch_quartz.testing import same_bits

KINDS = [torch.quartz.Graph]
if hasattr(torch.accelerator, "Graph"):
    KINDS.append(torch.accelerator.Graph)


def views(x):
    y = x.t()[1:].reshape(-1)
    y = y.view(-1, 2).unsqueeze(0).expand(3, -1, -1)
    a, b = y.chunk(2, 1)
    return a + 1, b.flatten(), torch.stack(y.unbind(0)), y.diagonal(0, 1, 2) * 2


def in_place(x):
    y = x + 1
    y[1] = 5
    y[:, ::2].mul_(3).add_(x[:, ::2])
    y[2, 1:3] = x[0, :2]
    y.t_()
    z = y * 2
    z[z > 4] = 0.5
    return y, z.clamp_(max=3.0)


def out_arguments(x):
    out, values, indices = (torch.empty(0, dtype=d, device="quartz") for d in (x.dtype, x.dtype, torch.int64))
    torch.add(x, 2, out=out)
    torch.sort(x, dim=1, out=(values, indices))
    return out, values, indices, torch.max(out, dim=1)[0]


def lists(x):
    parts = [p.clone() for p in x.split(2)]
    torch._foreach_add_(parts, 1.5)
    products = torch._foreach_mul(parts, parts)
    return torch.cat(products), *torch.split_with_sizes_copy(x, [1, 3], dim=1)


def factories(x):
    y = torch.zeros(4, 4, device=x.device)
    y += torch.arange(4, device=x.device, dtype=torch.float32)
    e = torch.empty_like(x).copy_(x)
    return y, e + torch.full((4,), 0.5, device=x.device), x.new_ones(3), torch.eye(4, device=x.device)


def dtypes(x):
    h = x.to(torch.bfloat16) @ x.to(torch.bfloat16).t()
    whole, z = x.to(torch.int32), torch.complex(x, x)
    return h, h.float() + x, (x > 0).sum(-1), x.double().cumsum(0), whole // 2, z.conj() * 2


def fallbacks(x):
    u = F.interpolate(x.view(1, 1, 4, 4), scale_factor=2.0, mode="bilinear")
    products = torch.einsum("ij,kj->ik", x, x)
    return u, torch.logsumexp(x, 0), torch.roll(x, 1), torch.where(x > 0, x, -x), products, x.std(0)


def indices(x):
    i = torch.arange(3, -1, -1, device=x.device)
    y = x.clone().index_copy_(0, i, x).index_add(1, i, x)
    y[i, i] = 7.0
    return y, x[i], x.gather(1, i.expand(4, 4)), x.scatter(1, i[:, None], 0.0), torch.embedding(x, i)


def own_kernels(x):
    wide = x.repeat(1, 8)
    n = ops.rms_norm(wide, torch.ones(32, device=x.device))
    s, r = ops.add_rms_norm(wide, n, None)
    angles = wide[None, :, None, :16].float()
    q = ops.rotary(n.view(1, 4, 1, 32), angles.cos().view(1, 4, 16), angles.sin().view(1, 4, 16), heads_dim=2)
    return n, s, r, q, ops.layer_norm(wide, None, None), ops.silu_and_mul(wide), F.linear(n, s)


@pytest.mark.parametrize(
    "program",
    [views, in_place, out_arguments, lists, factories, dtypes, fallbacks, indices, own_kernels],
    ids=lambda f: f.__name__,
)
def test_replays_have_the_bits_of_eager_calls(program):
    x = fresh(4, 4)
    graph, outputs = captured(program, x)
    for seed in (1, 2, 3):
        x.copy_(fresh(4, 4, seed=seed))
        with torch.no_grad():
            want = flat(program(x))
        graph.replay()
        got = flat(outputs)
        assert len(got) == len(want) and all(map(same_bits, got, want))
        assert same_bits(x.cpu(), fresh(4, 4, seed=seed).cpu())


def test_experts_attention_and_sampling():
    tokens, heads, size, vocabulary, experts = 3, 4, 32, 50, 4
    query, key, value = (fresh(tokens, h, size, seed=s) for h, s in ((heads, 1), (2, 2), (2, 3)))
    caches = [torch.zeros(8, 4, 2, size, device="quartz") for _ in range(2)]
    tables = torch.tensor([[0, 3], [5, 1], [2, 4]], dtype=torch.int32, device="quartz")
    starts = torch.arange(4, dtype=torch.int32, device="quartz")
    counts = torch.tensor([1, 1, 1], dtype=torch.int32, device="quartz")
    hidden = heads * size
    up, down = fresh(experts, 64, hidden, seed=4) / 8, fresh(experts, hidden, 32, seed=5) / 8
    head, gate = fresh(vocabulary, hidden, seed=6), fresh(experts, hidden, seed=7)

    def step():
        position = counts - 1
        slots = tables.gather(1, (position // 4)[:, None].long()).squeeze(1) * 4 + position % 4
        ops.write_kv(key, value, *caches, slots)
        x = ops.paged_attention(query, *caches, tables, starts, counts).flatten(1)
        weights, ids = torch.softmax(F.linear(x, gate), -1).topk(2)
        x = x + ops.moe_experts(x, ids, weights, up, down)
        drawn = ops.sample(F.linear(x, head), 1.0, seeds=7, positions=counts.long())
        counts.add_(1)
        return x, drawn.tokens, drawn.logprobs

    def restart():
        counts.fill_(1)
        for cache in caches:
            cache.zero_()

    graph, outputs = captured(lambda: step())
    restart()
    want = [flat(step()) for _ in range(6)]
    assert counts.tolist() == [7, 7, 7]
    restart()
    for expected in want:
        graph.replay()
        assert all(map(same_bits, flat(outputs), expected))
    assert counts.tolist() == [7, 7, 7]


class Llama(torch.nn.Module):
    """A tiny decoder whose step has fixed shapes: a cache of fixed size, positions on the device."""

    def __init__(self, layers=2, hidden=32, heads=4, length=32, vocabulary=64):
        super().__init__()
        linear = torch.nn.Linear
        self.embed = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "qkv": linear(hidden, 3 * hidden, bias=False),
                    "out": linear(hidden, hidden, bias=False),
                    "up": linear(hidden, 4 * hidden, bias=False),
                    "down": linear(2 * hidden, hidden, bias=False),
                    "norm": torch.nn.RMSNorm(hidden),
                    "norm2": torch.nn.RMSNorm(hidden),
                }
            )
            for _ in range(layers)
        )
        self.head = linear(hidden, vocabulary)
        self.heads, self.length = heads, length
        self.register_buffer("k", torch.zeros(layers, heads, length, hidden // heads))
        self.register_buffer("v", torch.zeros(layers, heads, length, hidden // heads))

    def forward(self, token, position):
        x = self.embed(token)
        mask = torch.arange(self.length, device=x.device) <= position
        for i, layer in enumerate(self.layers):
            q, k, v = layer["qkv"](layer["norm"](x)).view(1, 3, self.heads, -1).unbind(1)
            self.k[i].index_copy_(1, position, k.transpose(0, 1))
            self.v[i].index_copy_(1, position, v.transpose(0, 1))
            query, keys, values = q.transpose(0, 1)[None], self.k[i][None], self.v[i][None]
            y = F.scaled_dot_product_attention(query, keys, values, mask[None, None])
            x = x + layer["out"](y.flatten(1))
            x = x + layer["down"](ops.silu_and_mul(layer["up"](layer["norm2"](x))))
        logits = self.head(x)
        token.copy_(logits.argmax(-1))
        position.add_(1)
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_of_a_model(kind, mode, dtype):
    torch.manual_seed(0)
    model = Llama().to("quartz", dtype)
    token, position = torch.tensor([3], device="quartz"), torch.tensor([0], device="quartz")

    def restart():
        model.k.zero_()
        model.v.zero_()
        token.fill_(3)
        position.zero_()

    with mode():
        stream = torch.quartz.Stream()
        with torch.quartz.stream(stream):
            want = []
            for _ in range(20):
                logits = model(token, position)
                want.append((logits.cpu(), token.item()))
            torch.quartz.synchronize()
            restart()
            graph = kind()
            if kind is torch.quartz.Graph:
                with torch.quartz.graph(graph, stream=stream):
                    logits = model(token, position)
            else:
                with stream, graph:
                    logits = model(token, position)
        assert (token.item(), position.item()) == (3, 0) and not model.k.any()  # a capture changes nothing
        got = []
        for _ in range(20):
            graph.replay()
            got.append((logits.cpu(), token.item()))
    assert [t for _, t in got] == [t for _, t in want] and len({t for _, t in want}) > 1
    assert all(same_bits(a, b) for (a, _), (b, _) in zip(got, want, strict=True))


def test_a_capture_leaves_memory_and_generators_as_they_were():
    x, big = fresh(8), torch.zeros(100_000, device="quartz")
    torch.manual_seed(3)
    offset = torch.quartz.default_generators[0].get_offset()
    generator = torch.Generator("quartz").manual_seed(9)
    graph = torch.quartz.Graph()
    with torch.no_grad(), torch.quartz.graph(graph):
        x.add_(1).mul_(x)
        x[2:4].zero_()
        big[50_000:60_000].fill_(1)
        big[::7].add_(2)
        y = torch.rand(5, device="quartz") + x[:5]
        if torch.quartz.substrate() == "host":  # CUDA wants such a generator registered with the graph
            y = y + torch.rand(5, device="quartz", generator=generator)
    assert same_bits(x.cpu(), fresh(8).cpu()) and not big.any()
    assert torch.quartz.default_generators[0].get_offset() == offset and generator.get_offset() == 0
    graph.replay()
    assert big.sum() == 10_000 + 2 * len(range(0, 100_000, 7)) and x[2] == 0 and y.isfinite().all()


@pytest.mark.parametrize("normalise", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_running_statistics_are_those_of_the_replays(normalise):
    x = fresh(5, 3, 4)
    layer, other = (normalise(3, track_running_stats=True, device="quartz") for _ in range(2))
    graph, y = captured(layer, x)
    if torch.quartz.substrate() == "cuda":
        layer.reset_running_stats()  # the run before the capture has counted
    assert not layer.running_mean.any() and layer.num_batches_tracked == 0
    for _ in range(2):
        graph.replay()
        want = other(x)
    assert same_bits(y.cpu(), want.detach().cpu()) and layer.num_batches_tracked == other.num_batches_tracked
    assert same_bits(layer.running_mean.cpu(), other.running_mean.cpu())
    assert same_bits(layer.running_var.cpu(), other.running_var.cpu())


def test_random_numbers_follow_the_generator():
    x = torch.ones(100, device="quartz")

    def draw():
        noise = torch.randn(100, device="quartz")
        return noise, F.dropout(x, 0.5), torch.multinomial(noise.abs(), 3), torch.randperm(9, device="quartz")

    graph, outputs = captured(lambda: draw())

    def replay():
        graph.replay()
        return flat(outputs)

    torch.manual_seed(5)
    first, second = replay(), replay()
    assert not any(map(torch.equal, first, second))
    torch.manual_seed(5)
    assert all(map(torch.equal, first, replay())) and all(map(torch.equal, second, replay()))
    if torch.quartz.substrate() == "host":
        torch.manual_seed(5)
        assert all(map(torch.equal, first, flat(draw())))


def test_several_graphs_share_tensors_and_a_pool():
    pool, x = torch.quartz.graph_pool_handle(), torch.zeros(4, device="quartz")
    first, second = torch.quartz.Graph(), torch.quartz.Graph()
    with torch.quartz.graph(first, pool=pool):
        y = (x + 1) * 2
    with torch.quartz.graph(second, pool=first.pool()):
        z = y.cumsum(0)
    assert first.pool() == second.pool() == pool != torch.quartz.graph_pool_handle()
    for value in (1.0, 2.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.tolist() == [2 * (value + 1) * n for n in (1, 2, 3, 4)]
    del first
    gc.collect()
    second.replay()
    assert z[3].item() == 24


def test_outputs_stay_where_they_are():
    x = fresh(8)
    graph, y = captured(lambda t: (t * 2).view(2, 4)[1], x)
    pointer, held = y.data_ptr(), y.view(2, 2)
    graph.replay()
    x.fill_(3)
    graph.replay()
    assert y.data_ptr() == pointer and held.flatten().tolist() == [6] * 4


def test_weights_may_change_in_place():
    layer = torch.nn.Linear(4, 4, device="quartz")
    x = fresh(1, 4)
    graph, y = captured(layer, x)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    graph.replay()
    assert same_bits(y.cpu(), x.cpu())


# ------------------------------------------------------------------------------------------------- layers of PyTorch


@torch.library.custom_op("quartz_graphs::scale", mutates_args=(), device_types=("cpu", "cuda"))
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("quartz_graphs::push", mutates_args=("buffer",), device_types=("cpu", "cuda"))
def push(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    buffer.mul_(0.5).add_(value)
    return buffer.sum()


def test_operators_of_third_parties():
    x, buffer = fresh(4), torch.zeros(4, device="quartz")
    graph, total = captured(lambda x, buffer: push(buffer, scale(x, 2.0)) + 1, x, buffer)
    assert not buffer.any()
    want = torch.zeros(4)
    for _ in range(3):
        graph.replay()
        want = want * 0.5 + x.cpu() * 2
        assert same_bits(buffer.cpu(), want)
    torch.testing.assert_close(total.cpu(), want.sum() + 1)


@pytest.mark.host
def test_custom_operators_in_cpp_namespaces():
    library = torch.library.Library("quartz_graphs_gone", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("size_of(Tensor x) -> int")
    library.define("make(int n) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("size_of", lambda x: int(x.sum()), "CPU")
    library.impl("make", lambda n: torch.ones(n, device="quartz"), "CompositeExplicitAutograd")
    namespace = torch.ops.quartz_graphs_gone
    x = fresh(4)
    graph, y = captured(lambda: namespace.twice(x) + namespace.make(4).add_(1))
    graph.replay()
    graph.replay()
    assert same_bits(y.cpu(), x.cpu() * 2 + 2)
    with pytest.raises(RuntimeError, match="size_of returns a number to the host"):
        captured(lambda: namespace.size_of(x))
    library._destroy()
    with pytest.raises(RuntimeError, match=r"operator quartz_graphs_gone::\w+ was removed after the capture"):
        graph.replay()


def test_autocast_vmap_and_dispatch_modes():
    x, w = fresh(4, 4), fresh(4, 4, seed=1)

    def program(x):
        with torch.autocast("quartz", dtype=torch.bfloat16):
            y = F.linear(x, w)
        batched = torch.vmap(lambda row: (row * 2).sum())(x)
        return y, batched, torch.func.functionalize(lambda t: t.clone().add_(1))(x)

    graph, outputs = captured(program, x)
    assert outputs[0].dtype == torch.bfloat16
    x.copy_(fresh(4, 4, seed=2))
    want = flat(program(x))
    graph.replay()
    assert all(map(same_bits, flat(outputs), want))


@pytest.mark.host
def test_python_modes_and_subclasses_see_their_calls():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Negate(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result.neg() if function is torch.ops.aten.mul.Tensor else result

    x = fresh(4)

    def program():
        with Negate():
            return x * 3

    graph, y = captured(program)
    graph.replay()
    assert same_bits(y.cpu(), -(x.cpu() * 3))


# ----------------------------------------------------------------------------------------------- pinned memory, threads


def test_pinned_memory_is_read_and_written_by_each_replay():
    source, target = torch.zeros(4).pin_memory(), torch.zeros(4).pin_memory()
    x = torch.zeros(4, device="quartz")

    def program():
        x.copy_(source, non_blocking=True)
        target.copy_(x + 1, non_blocking=True)

    graph = torch.quartz.Graph()
    with torch.quartz.graph(graph):
        program()
    assert not target.any()
    source.fill_(4)
    graph.replay()
    torch.quartz.synchronize()
    assert target.tolist() == [5, 5, 5, 5]


@pytest.mark.host
def test_other_threads_are_not_recorded_and_replay_in_turn():
    x, graph, seen = fresh(4), torch.quartz.Graph(), []

    def other():
        seen.append(((x + 1).sum().item(), torch.quartz.is_current_stream_capturing()))

    with torch.quartz.graph(graph):
        y = x * 2
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        wrong = []

        def end():
            try:
                graph.capture_end()
            except RuntimeError as error:
                wrong.append(str(error))

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert seen[0][1] is False and "begun in another thread" in wrong[0]
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    assert same_bits(y.cpu(), x.cpu() * 2)


@pytest.mark.host
def test_two_threads_cannot_replay_one_graph_at_once():
    inside, go = threading.Event(), threading.Event()
    hold = []

    @torch.library.custom_op("quartz_graphs::wait", mutates_args=(), device_types="cpu")
    def wait(x: torch.Tensor) -> torch.Tensor:
        if hold:
            inside.set()
            assert go.wait(60)
        return x.clone()

    graph, _ = captured(wait, fresh(2))
    hold.append(True)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    assert inside.wait(60)
    try:
        for call in (graph.replay, graph.reset):
            with pytest.raises(RuntimeError, match="replay"):
                call()
    finally:
        go.set()
        thread.join()
    hold.clear()
    graph.replay()


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.host
def test_memory_of_intermediate_results_is_given_back():
    x = torch.ones(250_000, device="quartz")  # 1 MB

    def program():
        y = x
        for _ in range(20):
            y = y.mul(0.5) + torch.empty_like(y).fill_(1.0)
        return y.sum()

    def peak(call):
        gc.collect()
        torch.quartz.reset_peak_memory_stats()
        before = torch.quartz.memory_allocated()
        result = call()
        return torch.quartz.max_memory_allocated() - before, result

    eager, want = peak(program)
    capture, (graph, y) = peak(lambda: captured(program))
    replay, _ = peak(graph.replay)
    again, _ = peak(graph.replay)
    assert same_bits(y.cpu(), want.cpu())
    assert eager >= 3_000_000 and capture <= eager + 1_100_000 and max(replay, again) <= eager
    del graph, y
    gc.collect()
    before = torch.quartz.memory_allocated()
    graph, _sum = captured(program)
    graph.replay()
    assert torch.quartz.memory_allocated() - before <= 1024  # the sum alone


@pytest.mark.host
def test_an_error_during_a_replay_frees_what_it_made():
    fail = []

    @torch.library.custom_op("quartz_graphs::maybe", mutates_args=(), device_types="cpu")
    def maybe(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise ValueError("no")
        return x.clone()

    x = torch.ones(1000, device="quartz")
    graph, y = captured(lambda x: maybe(x + 1) + (x + 2), x)
    graph.replay()
    before = torch.quartz.memory_allocated()
    fail.append(True)
    with pytest.raises(ValueError, match="no"):
        graph.replay()
    assert torch.quartz.memory_allocated() == before
    fail.clear()
    graph.replay()
    assert y.sum().item() == 5000


@pytest.mark.host
def test_results_that_change_shape_are_refused():
    sizes = [4]

    @torch.library.custom_op("quartz_graphs::grow", mutates_args=(), device_types="cpu")
    def grow(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(sizes[0])

    graph, _ = captured(grow, fresh(2))
    sizes[0] = 5
    with pytest.raises(RuntimeError, match=r"grow returned shape \[5\] of float, but in the capture shape \[4\]"):
        graph.replay()


@pytest.mark.parametrize("kind", KINDS)
def test_keep_graph_and_debug_dump(kind, tmp_path):
    x, stream = torch.zeros(4, device="quartz"), torch.quartz.Stream()
    graph = kind(keep_graph=True)
    graph.enable_debug_mode()
    with torch.quartz.stream(stream):
        graph.capture_begin()
        y = x * 2 + 1
        graph.capture_end()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    text = (tmp_path / "graph.dot").read_text()
    assert "digraph" in text and (torch.quartz.substrate() == "cuda" or "aten::mul" in text)
    graph.instantiate()
    x.fill_(3)
    graph.replay()
    torch.quartz.synchronize()
    assert y.tolist() == [7, 7, 7, 7]
    graph.reset()


@pytest.mark.two_devices
def test_two_devices():
    a, b = torch.ones(4, device="quartz:0"), torch.ones(4, device="quartz:1")
    graph, (y, z) = captured(lambda a, b: (a + 1, (b * 2) + torch.ones(4, device="quartz:1")), a, b)
    b.fill_(5)
    graph.replay()
    assert y.device.index == 0 and z.device.index == 1
    assert y.tolist() == [2] * 4 and z.tolist() == [11] * 4


@pytest.mark.host
def test_graphed_callables_need_cuda():
    with pytest.raises(RuntimeError, match="make_graphed_callables needs the cuda substrate: a graph of the host"):
        torch.quartz.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(2),))
