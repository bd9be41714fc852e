"""Sparse, nested, oneDNN and quantised tensors: every call gives what the native device gives, or a clear error.

PyTorch's operator database has few samples of these layouts (``tests/upstream``), so the calls that users make are
listed here. Each runs on the native device and on quartz: equal results, or an exception of the same type where the
native device refuses.
"""

import copy
import io
import pickle

import pytest
import torch
import torch_quartz

NATIVE = torch_quartz.device.native_device(0)
LAYOUTS = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}


def matrix(device, dtype=torch.float32):
    """A small matrix with zeros, whose shape fits blocks of 2 x 3."""
    values = torch.arange(24.0).reshape(4, 6) - 9
    return (values * (values.long() % 3 != 0)).to(dtype).to(device)


def sparse(layout, device, dtype=torch.float32):
    """The matrix in a sparse layout."""
    blocks = {"blocksize": (2, 3)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return matrix(device, dtype).to_sparse(layout=layout, **blocks)


def describe(result, device):
    """Everything comparable about a result, with dense values on the CPU."""
    if isinstance(result, (list, tuple)):
        return [describe(item, device) for item in result]
    if not isinstance(result, torch.Tensor):
        return result
    place = "device" if result.device.type == torch.device(device).type else str(result.device)
    facts = [place, result.dtype, str(result.layout), result.requires_grad]
    if result.is_nested:
        return [*facts, [describe(part, device) for part in result.unbind()]]
    dense = result.detach()
    if dense.layout != torch.strided:
        facts.append(dense._nnz() if dense.layout != torch._mkldnn else None)
        dense = dense.to_dense()
    return [*facts, tuple(dense.shape), dense.cpu()]


def same(a, b):
    """Compare two descriptions; values within PyTorch's tolerance."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(b, a, equal_nan=True)
        return True
    return a == b


def attempt(call):
    """The result of a call, or the exception it raised."""
    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:
        return error


def check(call):
    """Run `call(device)` on both devices and compare results or exception types."""
    expected = attempt(lambda: describe(call(NATIVE), NATIVE))
    got = attempt(lambda: describe(call("quartz"), "quartz"))
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{got!r}, expected {expected!r}"
    else:
        assert not isinstance(got, Exception) and same(expected, got), f"{got!r}, expected {expected}"


# Calls on a sparse matrix `s`; `d` is the same matrix, dense.
SPARSE_CALLS = {
    "to_dense": lambda s, d: s.to_dense(),
    "to cpu": lambda s, d: s.to("cpu").to_dense().tolist(),
    "to cpu and back": lambda s, d: s.to("cpu").to(d.device),
    "dtype": lambda s, d: s.to(torch.float64),
    "clone": lambda s, d: s.clone(),
    "detach": lambda s, d: s.detach(),
    "values": lambda s, d: s.values() if s.layout != torch.sparse_coo else s.coalesce().values(),
    "coordinates": lambda s, d: s.coalesce().indices(),
    "row pointers": lambda s, d: s.crow_indices(),
    "column pointers": lambda s, d: s.ccol_indices(),
    "transpose": lambda s, d: s.t(),
    "transpose dims": lambda s, d: s.transpose(0, 1),
    "negate": lambda s, d: -s,
    "times number": lambda s, d: s * 2,
    "divided by number": lambda s, d: s / 4,
    "plus itself": lambda s, d: s + s,
    "minus itself": lambda s, d: s - s,
    "times itself": lambda s, d: s * s,
    "times dense": lambda s, d: s * d,
    "plus dense": lambda s, d: d + s,
    "abs": lambda s, d: s.abs(),
    "sqrt of abs": lambda s, d: s.abs().sqrt(),
    "relu": lambda s, d: torch.relu(s),
    "sign": lambda s, d: s.sign(),
    "isnan": lambda s, d: s.isnan(),
    "sum": lambda s, d: s.sum(),
    "sum of rows": lambda s, d: torch.sparse.sum(s, dim=0),
    "sum kept": lambda s, d: s.sum(dim=1, keepdim=True),
    "norm": lambda s, d: s.norm(),
    "softmax": lambda s, d: torch.sparse.softmax(s, dim=1),
    "log_softmax": lambda s, d: torch.sparse.log_softmax(s, dim=1),
    "matrix product": lambda s, d: s @ d.t(),
    "product with vector": lambda s, d: s @ d[0],
    "sparse product": lambda s, d: s @ s.t(),
    "dense times sparse": lambda s, d: d.t() @ s,
    "mm": lambda s, d: torch.mm(s, d.t().contiguous()),
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d.t()),
    "sparse.mm reduce": lambda s, d: torch.sparse.mm(s, d.t().contiguous(), "amax"),
    "addmm": lambda s, d: torch.addmm(torch.ones(4, 4, device=d.device), s, d.t()),
    "sparse.addmm": lambda s, d: torch.sparse.addmm(torch.ones(4, 4, device=d.device), s, d.t()),
    "sampled_addmm": lambda s, d: torch.sparse.sampled_addmm(s, d @ d.t(), d),
    "linear": lambda s, d: torch.nn.functional.linear(d, s),
    "select": lambda s, d: s[1],
    "element": lambda s, d: s[1, 2],
    "slice": lambda s, d: s[1:3],
    "index_select": lambda s, d: s.index_select(0, torch.tensor([2, 0], device=d.device)),
    "cat": lambda s, d: torch.cat([s, s]),
    "stack": lambda s, d: torch.stack([s, s]),
    "unsqueeze": lambda s, d: s.unsqueeze(0),
    "sparse_mask": lambda s, d: d.sparse_mask(s),
    "zeros_like": lambda s, d: torch.zeros_like(s),
    "empty_like": lambda s, d: torch.empty_like(s).shape,
    "zero_": lambda s, d: s.clone().zero_(),
    "mul_": lambda s, d: s.clone().mul_(3),
    "add_": lambda s, d: s.clone().add_(s),
    "copy_": lambda s, d: s.clone().copy_(s * 2),
    "dense add_": lambda s, d: d.clone().add_(s),
    "coalesce": lambda s, d: s.coalesce(),
    "to coo": lambda s, d: s.to_sparse(),
    "to csr": lambda s, d: s.to_sparse_csr(),
    "to csc": lambda s, d: s.to_sparse_csc(),
    "to bsr": lambda s, d: s.to_sparse_bsr((2, 3)),
    "to bsc": lambda s, d: s.to_sparse_bsc((2, 3)),
    "view": lambda s, d: s.view(-1),
    "reshape": lambda s, d: s.reshape(2, 12),
    "sort": lambda s, d: s.sort(),
    "numpy": lambda s, d: s.numpy(),
    "data_ptr": lambda s, d: s.storage(),
    "facts": lambda s, d: [s.is_sparse, s.is_sparse_csr, s.sparse_dim(), s.dense_dim(), s.numel(), tuple(s.shape)],
    "pickle": lambda s, d: pickle.loads(pickle.dumps(s)),
    "save and load": lambda s, d: _saved(s),
    "print": lambda s, d: "layout=" in repr(s) and str(s.layout) in repr(s),
    "equal": lambda s, d: torch.equal(s, s),
    "in place dense mm": lambda s, d: torch.mm(s, d.t(), out=torch.empty(0, device=d.device)),
    "pin_memory": lambda s, d: s.is_pinned(),
}


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("call", SPARSE_CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_call(layout, call):
    check(lambda device: SPARSE_CALLS[call](sparse(LAYOUTS[layout], device), matrix(device)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_dtypes(layout, dtype):
    check(lambda device: [s := sparse(LAYOUTS[layout], device, dtype), s.to_dense(), s.t(), s.abs()])
    check(lambda device: sparse(LAYOUTS[layout], device, dtype) @ matrix(device, dtype).t())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_deepcopy(layout):
    """PyTorch cannot copy compressed tensors on the CPU this way; on other devices it clones them."""
    given = sparse(LAYOUTS[layout], "quartz")
    twin = copy.deepcopy(given)
    assert twin.device == given.device and twin.layout == given.layout
    assert twin.values().data_ptr() != given.values().data_ptr() if layout != "coo" else twin is not given
    assert torch.equal(twin.to_dense(), given.to_dense())


CONSTRUCTORS = {
    "coo": lambda device: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 4), device=device),
    "coo, repeated": lambda device: torch.sparse_coo_tensor([[0, 0], [2, 2]], [3.0, 4.0], (2, 4), device=device),
    "coo, hybrid": lambda device: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3, device=device), (4, 3)),
    "coo, empty": lambda device: torch.sparse_coo_tensor(size=(3, 2), device=device),
    "coo, negative index": lambda device: torch.sparse_coo_tensor(
        [[-1]], [1.0], (2,), device=device, check_invariants=True
    ),
    "coo, index too large": lambda device: torch.sparse_coo_tensor(
        [[7]], [1.0], (2,), device=device, check_invariants=True
    ),
    "csr": lambda device: torch.sparse_csr_tensor([0, 1, 3], [1, 0, 2], [1.0, 2.0, 3.0], (2, 3), device=device),
    "csr, int32": lambda device: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), [1.0, 2.0], device=device
    ),
    "csr, wrong pointers": lambda device: torch.sparse_csr_tensor(
        [0, 1], [1, 0, 2], [1.0, 2.0, 3.0], (2, 3), device=device, check_invariants=True
    ),
    "csc": lambda device: torch.sparse_csc_tensor([0, 1, 2, 3], [1, 0, 1], [1.0, 2.0, 3.0], (2, 3), device=device),
    "bsr": lambda device: torch.sparse_bsr_tensor([0, 1], [0], torch.ones(1, 2, 2, device=device), (2, 2)),
    "compressed": lambda device: torch.sparse_compressed_tensor(
        [0, 1, 2], [0, 1], [1.0, 2.0], layout=torch.sparse_csr, device=device
    ),
    "spdiags": lambda device: torch.sparse.spdiags(torch.ones(2, 3), torch.tensor([0, 1]), (3, 3)).to(device),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_sparse_constructor(name):
    check(CONSTRUCTORS[name])


def test_coalesce_sums_repeated_coordinates():
    def call(device):
        s = torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 0]], [3.0, 4.0, 5.0], (2, 4), device=device)
        return [s.is_coalesced(), s.coalesce().values(), s.coalesce().indices(), s.to_dense()]

    check(call)


GRADIENTS = {
    "sum of product": lambda s, w: torch.sparse.mm(s, w).sum(),
    "matmul": lambda s, w: (s @ w).square().sum(),
    "to_dense": lambda s, w: (s.to_dense() @ w).sum(),
    "sum": lambda s, w: torch.sparse.sum(s) * w.sum(),
    "times number": lambda s, w: ((s * 3).to_dense() @ w).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_gradients(layout, name):
    def call(device):
        s = sparse(LAYOUTS[layout], device).requires_grad_()
        w = torch.linspace(-1, 1, 12).reshape(6, 2).to(device).requires_grad_()
        GRADIENTS[name](s, w).backward()
        return [s.grad, w.grad]

    # The reference is the CPU on both substrates: a backward pass of "cuda" tensors is not possible in this process.
    expected = attempt(lambda: describe(call("cpu"), "cpu"))
    got = attempt(lambda: describe(call("quartz"), "quartz"))
    if isinstance(got, Exception):
        assert isinstance(expected, Exception) or layout in str(got).lower() or "sparse" in str(got).lower(), got
    elif isinstance(expected, Exception):
        assert NATIVE.type != "cpu", f"quartz computed what the CPU refuses: {expected}"
    else:
        assert same(expected, got), f"{got}, expected {expected}"


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_embedding_training(optimizer):
    def train(device):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 4, sparse=True).to(device)
        steps = optimizer(table.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            table(torch.tensor([1, 3, 3, 7], device=device)).square().sum().backward()
            assert table.weight.grad.is_sparse and table.weight.grad.device.type == torch.device(device).type
            steps.step()
        return table.weight.detach()

    torch.testing.assert_close(train("quartz").cpu(), train("cpu"))


def test_sparse_dense_memory_is_shared_where_it_is_on_the_native_device():
    values = torch.ones(3, device="quartz")
    s = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]], device="quartz"), values, (4,))
    assert s._values().data_ptr() == values.data_ptr()
    values.mul_(5)
    assert s.to_dense().tolist() == [5, 5, 5, 0]


# Calls on a nested tensor `n` (rows of different lengths), for both layouts of nested tensors.
NESTED_CALLS = {
    "unbind": lambda n: n.unbind(),
    "to cpu": lambda n: [part.tolist() for part in n.to("cpu").unbind()],
    "dtype": lambda n: n.to(torch.float64),
    "clone": lambda n: n.clone(),
    "relu": lambda n: torch.relu(n),
    "negate": lambda n: -n,
    "times number": lambda n: n * 2,
    "plus itself": lambda n: n + n,
    "times itself": lambda n: n * n,
    "padded": lambda n: torch.nested.to_padded_tensor(n, -1.0),
    "sum": lambda n: n.sum(dim=-1),
    "softmax": lambda n: torch.softmax(n, -1),
    "layer_norm": lambda n: torch.nn.functional.layer_norm(n, (4,)),
    "linear": lambda n: torch.nn.functional.linear(n, torch.ones(3, 4, device=n.device)),
    "matmul": lambda n: n @ torch.ones(4, 2, device=n.device),
    "transpose": lambda n: n.transpose(1, 2),
    "select": lambda n: n[0],
    "size": lambda n: [n.size(0), n.dim(), n.numel(), n.is_nested],
    "dropout": lambda n: torch.nn.functional.dropout(n, 0.0),
    "gelu": lambda n: torch.nn.functional.gelu(n),
    "cat": lambda n: torch.cat([n, n]),
    "zeros_like": lambda n: torch.zeros_like(n),
    "mul_": lambda n: n.clone().mul_(2),
    "chunk": lambda n: n.chunk(2, dim=-1),
    "view": lambda n: n.view(-1),
    "sort": lambda n: n.sort(),
    "deepcopy": lambda n: copy.deepcopy(n),
    "save and load": lambda n: _saved(n),
    "print": lambda n: "nested" in repr(n).lower(),
}


def nested(layout, device, dtype=torch.float32):
    """Two matrices of 4 columns with 2 and 3 rows."""
    rows = [torch.arange(8.0).reshape(2, 4) - 3, torch.arange(12.0).reshape(3, 4) / 7]
    return torch.nested.nested_tensor([row.to(dtype) for row in rows], layout=layout, device=device)


@pytest.mark.parametrize("call", NESTED_CALLS)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_call(layout, call):
    check(lambda device: NESTED_CALLS[call](nested(layout, device)))


def test_nested_numpy():
    with pytest.raises(TypeError, match=r"quartz.*Tensor\.cpu\(\)"):
        nested(torch.strided, "quartz").numpy()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_gradients(layout):
    def call(device):
        parts = [torch.ones(rows, 4, device=device, requires_grad=True) for rows in (2, 3)]
        n = torch.nested.as_nested_tensor(parts, layout=layout)
        weight = torch.linspace(0, 1, 8).reshape(2, 4).to(device).requires_grad_()
        out = torch.nn.functional.linear(n, weight)
        torch.nested.to_padded_tensor(out, 0.0).square().sum().backward()
        return [parts[0].grad, parts[1].grad, weight.grad]

    expected = [t.cpu() for t in call("cpu")]
    for got, want in zip(call("quartz"), expected, strict=True):
        assert got.device.type == "quartz"
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_attention(layout):
    def call(device):
        torch.manual_seed(0)
        rows = [torch.randn(n, 2, 8).to(device) for n in (3, 5)]
        q = torch.nested.nested_tensor(rows, layout=layout, device=device).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)

    check(call)


def test_transformer_encoder_with_padding_mask_uses_nested_tensors():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        got = copy.deepcopy(encoder).to("quartz")(x.to("quartz"), src_key_padding_mask=mask.to("quartz"))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


QUANTISED = {
    "per tensor": lambda device: torch.quantize_per_tensor(matrix(device), 0.5, 3, torch.qint8),
    "per channel": lambda device: torch.quantize_per_channel(
        matrix(device),
        torch.full((4,), 0.5, device=device),
        torch.zeros(4, dtype=torch.long, device=device),
        0,
        torch.qint8,
    ),
    "dynamic": lambda device: torch.quantize_per_tensor_dynamic(matrix(device), torch.quint8, False),
    "empty": lambda device: torch._empty_affine_quantized(
        (0, 2), scale=1.0, zero_point=0, dtype=torch.qint8, device=device
    ),
    "moved": lambda device: torch.quantize_per_tensor(matrix("cpu"), 0.5, 3, torch.qint8).to(device),
    "fake": lambda device: torch.fake_quantize_per_tensor_affine(matrix(device), 0.5, 3, -128, 127),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_works_or_says_so(name):
    expected = attempt(lambda: QUANTISED[name](NATIVE))
    got = attempt(lambda: QUANTISED[name]("quartz"))
    if isinstance(got, Exception):
        assert isinstance(expected, Exception) or "quantiz" in str(got).lower(), got
        return
    assert got.device.type == "quartz" and got.dtype == expected.dtype
    if got.is_quantized:
        got, expected = got.dequantize(), expected.dequantize()
    torch.testing.assert_close(got.cpu(), expected.cpu())


def test_mkldnn_says_so():
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)mkldnn"):
        matrix("quartz").to_mkldnn()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)mkldnn|layout"):
        matrix("cpu").to_mkldnn().to("quartz")
    assert (matrix("quartz") + 1).device.type == "quartz"  # the device still works


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_devices_are_refused(layout):
    with pytest.raises(RuntimeError):
        sparse(LAYOUTS[layout], "quartz") @ matrix("cpu").t()
    with pytest.raises(RuntimeError):
        matrix("quartz") @ sparse(LAYOUTS[layout], "cpu").t()


# ------------------------------------------------------------------ found by trying to break it


def quantized(device="quartz", dtype=torch.qint8):
    return torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, dtype).to(device)


@pytest.mark.host
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantised_tensors_are_saved_and_copied(dtype, tmp_path):
    q = quantized(dtype=dtype)
    torch.save({"q": q, "view": q[1:]}, tmp_path / "q.pt")
    loaded = torch.load(tmp_path / "q.pt", weights_only=False)
    for got in (loaded["q"], copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert got.device.type == "quartz" and got.int_repr().cpu().equal(q.int_repr().cpu())
    assert loaded["view"].int_repr().tolist() == q.int_repr().tolist()[1:]


@pytest.mark.host
def test_quantised_resize_and_set():
    before = torch.quartz.memory_allocated()
    q = quantized()
    assert q.resize_(2).shape == (2,) and q.int_repr().tolist() == [3, 13]
    q.resize_(10**5)
    assert q.shape == (10**5,) and q.untyped_storage().nbytes() == 10**5
    assert q.int_repr()[:2].tolist() == [3, 13]
    empty = torch._empty_affine_quantized((0,), scale=0.1, zero_point=3, dtype=torch.qint8, device="quartz")
    assert empty.set_(q.untyped_storage(), 0, (2,), (1,)).int_repr().tolist() == [3, 13]
    del q, empty
    assert torch.quartz.memory_allocated() == before


@pytest.mark.two_devices
def test_layouts_move_between_devices():
    with torch.quartz.device(0):
        assert quantized("quartz:1").to("quartz:0").device == torch.device("quartz:0")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="quartz:1")
        for moved in (nested.to("quartz:0"), nested.to("quartz:0", torch.double)):
            assert moved.device == torch.device("quartz:0")
            assert [part.tolist() for part in moved.unbind()] == [[1, 1], [1, 1, 1]]
        s = torch.eye(2).to_sparse().to("quartz:1")
        for got in (s, s * 2, s + s, s.clone(), s.sin(), s.unsqueeze(0), torch.ones(2, device="quartz:1").to_sparse()):
            assert got.device == torch.device("quartz:1")
        assert (s + s).to_dense().cpu().equal(torch.eye(2) * 2)


def test_sparse_and_nested_copies_between_devices():
    source = torch.eye(3).to_sparse() * 2
    for convert in (lambda t: t, lambda t: t.to_dense().to_sparse_csr()):
        cpu = convert(source)
        there = convert(torch.eye(3, device="quartz").to_sparse())
        there.copy_(cpu)
        assert there.device.type == "quartz" and there.to_dense().cpu().equal(cpu.to_dense())
        back = convert(torch.eye(3).to_sparse())
        assert back.copy_(there).to_dense().equal(cpu.to_dense()) and back.device.type == "cpu"
    module = torch.nn.Module()
    module.register_buffer("a", torch.eye(3, device="quartz").to_sparse())
    module.load_state_dict({"a": source})
    assert module.a.to_dense().cpu().equal(source.to_dense())


def test_collectives_are_refused(run_python):
    run_python(
        """
        import os, warnings, torch, torch_quartz, torch.distributed as dist
        warnings.simplefilter("ignore")
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29653")
        dist.init_process_group("gloo")
        sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (4,), device="quartz", check_invariants=False)
        try:
            dist.all_reduce(sparse)
        except NotImplementedError as error:
            assert "no process group for quartz" in str(error), error
        else:
            raise SystemExit("nothing was refused")
        dist.destroy_process_group()
        """
    )
