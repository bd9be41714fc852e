"""nn.Module on quartz: moving, tied weights, optimisers built before or after the move."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


MOVES = {
    "to device": lambda m: m.to("quartz"),
    "to device and dtype": lambda m: m.to("quartz", torch.float64),
    "method": lambda m: m.quartz(),
    "there and back and there": lambda m: m.to("quartz").cpu().to("quartz:0"),
    "by example": lambda m: m.to(torch.empty(0, device="quartz")),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_tied_weights_stay_tied(move):
    model = Tied()
    parameter = model.head.weight
    moved = move(model)
    assert moved is model and model.head.weight is model.embedding.weight
    assert model.head.weight is parameter  # the same Parameter object, as on CUDA
    assert model.head.weight.device.type == "quartz" and len(list(model.parameters())) == 1
    model(torch.tensor([[1, 2]], device="quartz")).sum().backward()
    assert parameter.grad is not None and parameter.grad.device.type == "quartz"


def test_views_and_shared_storage_after_a_move():
    base = nn.Parameter(torch.arange(6.0))
    base.data = base.data.to("quartz")
    assert base.device.type == "quartz" and base.is_leaf and base.tolist() == [0, 1, 2, 3, 4, 5]
    view = base.data.view(2, 3)
    view[0, 0] = 9
    assert base[0].item() == 9


@pytest.mark.parametrize("name", ["set_overwrite_module_params_on_conversion", "set_swap_module_params_on_conversion"])
def test_future_modes(name):
    getattr(torch.__future__, name)(True)
    try:
        model = Tied().to("quartz")
        assert model.head.weight.device.type == "quartz"
        model(torch.tensor([[1, 2]], device="quartz")).sum().backward()
        if "swap" in name:
            assert model.head.weight is model.embedding.weight
    finally:
        getattr(torch.__future__, name)(False)


def train(model, optimizer, device, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 5).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, 2))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "foreach SGD": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before_the_move", [False, True])
def test_training_equals_the_native_device(name, before_the_move):
    make = OPTIMIZERS[name]
    native = torch.quartz.native_device()
    reference = net().to(native)
    expected = train(reference, make(reference.parameters()), native)
    model = net()
    if (
        before_the_move and "Adagrad" not in name
    ):  # Adagrad makes its state at once, on the CPU: as on CUDA, it must come after
        optimizer = make(model.parameters())
        model.to("quartz")
    else:
        model.to("quartz")
        optimizer = make(model.parameters())
    assert train(model, optimizer, "quartz") == pytest.approx(expected, rel=1e-5)
    for p, r in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), r.detach().cpu(), rtol=1e-4, atol=1e-6)
    assert all(p.grad.device.type == "quartz" for p in model.parameters())


def test_sparse_adam():
    model = nn.Embedding(10, 3, sparse=True).to("quartz")
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = model.weight.detach().clone()
    model(torch.tensor([1, 3], device="quartz")).sum().backward()
    assert model.weight.grad.is_sparse
    optimizer.step()
    changed = (model.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 3]


def test_lbfgs():
    model = nn.Linear(3, 1).to("quartz")
    x, y = torch.randn(20, 3, device="quartz"), torch.randn(20, 1, device="quartz")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert closure().item() < first


def test_optimizer_state_follows_a_loaded_state_dict():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, "cpu", 1)
    state = copy.deepcopy(optimizer.state_dict())
    model.to("quartz")
    optimizer.load_state_dict(state)
    assert optimizer.state[next(model.parameters())]["exp_avg"].device.type == "quartz"
    train(model, optimizer, "quartz", 2)


def test_an_optimizer_with_state_before_the_move_fails_as_on_cuda():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, "cpu", 1)
    model.to("quartz")
    with pytest.raises(RuntimeError, match=r"quartz:0.*cpu|cpu.*quartz:0"):
        train(model, optimizer, "quartz", 1)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_gradient_clipping():
    model = net().to("quartz")
    model(torch.randn(4, 5, device="quartz")).sum().mul(100).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.device.type == "quartz"
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(total.cpu(), torch.tensor(1.0), rtol=1e-3, atol=1e-3)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert max(p.grad.abs().max().item() for p in model.parameters()) <= 1.001e-3


def test_buffers_state_dict_and_strict_loading():
    model, other = net().to("quartz"), net()
    other.load_state_dict(model.state_dict())
    assert all(v.device.type == "cpu" for v in other.state_dict().values())
    assert all(v.device.type == "quartz" for v in model.state_dict().values())
    model.load_state_dict(other.state_dict(), assign=True)
    assert model[0].weight.device.type == "cpu"


CELLS = {
    "LSTM": nn.LSTM,
    "LSTM with projection": lambda *a, **k: nn.LSTM(*a, proj_size=3, **k),
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN, relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_recurrent_networks(cell, bias, recwarn):
    torch.manual_seed(0)
    model = cell(4, 6, num_layers=2, batch_first=True, bidirectional=True, bias=bias)
    x, lengths = torch.randn(3, 5, 4), torch.tensor([5, 3, 2])

    def run(device):
        inputs = x.to(device, copy=True).requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
        assert packed.data.device.type == device
        output, packed_output = model(inputs)[0], model(packed)[0].data
        model.zero_grad()
        (output.sum() + packed_output.square().sum()).backward()
        return [t.detach().cpu() for t in (output, packed_output, inputs.grad, *(p.grad for p in model.parameters()))]

    expected = run("cpu")
    model.to("quartz")
    with torch.backends.cudnn.flags(allow_tf32=False):
        results = run("quartz")
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)
    assert not [w for w in recwarn if "single contiguous chunk" in str(w.message)]


def test_dropout_between_recurrent_layers_follows_the_seed():
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, num_layers=3, dropout=0.5, bidirectional=True).to("quartz")
    x, state = torch.randn(5, 2, 4, device="quartz"), torch.randn(2, 6, 2, 6, device="quartz")

    def run(seed, train=True):
        torch.manual_seed(seed)
        output, (h, c) = model.train(train)(x, (state[0], state[1]))
        assert h.shape == c.shape == (6, 2, 6)
        return output

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    assert torch.equal(run(1, train=False), run(2, train=False))
    run(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_transformer_encoder_with_a_mask_in_eval():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        result = model.to("quartz")(x.to("quartz"), src_key_padding_mask=mask.to("quartz")).cpu()
    torch.testing.assert_close(result[~mask[:, : result.shape[1]]], expected[~mask], rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_accepts_the_device():
    model = nn.SyncBatchNorm(3).to("quartz").eval()
    assert model(torch.randn(2, 3, 4, device="quartz")).shape == (2, 3, 4)


def test_parametrizations_and_pruning():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)).to("quartz")
    layer(torch.ones(1, 3, device="quartz")).sum().backward()
    pruned = prune.l1_unstructured(nn.Linear(4, 4).to("quartz"), "weight", amount=0.5)
    assert (pruned.weight == 0).sum().item() == 8


def test_lazy_modules():
    model = nn.LazyLinear(3).to("quartz")
    assert model(torch.ones(2, 7, device="quartz")).shape == (2, 3)
    assert model.weight.device.type == "quartz"


def test_to_empty_from_meta():
    model = nn.Linear(3, 3, device="meta").to_empty(device="quartz")
    nn.init.ones_(model.weight)
    assert model.weight.sum().item() == 9
