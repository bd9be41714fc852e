"""The reviewed list of what is not compared, or compared less strictly, each with its cause.

Nothing is excluded because quartz fails it. An entry of `EXCLUDED` counts as skipped, never as passed.
"""

from __future__ import annotations

# (database, entry, dtype or "*", check or "*") -> cause.
_JITERATOR = 'torch.cuda.jiterator is an interface of torch.cuda: it takes tensors of the device "cuda" only'
_SEEDS = (
    "without dropout nobody writes the returned seed and offset: plain CUDA differs from itself; the attention is "
    "compared through scaled_dot_product_attention"
)
_TIES = "rows with equal elements, whose order PyTorch leaves open: it is stable here (tests/ops/test_topk.py)"
_ROUNDED = (
    "the CPU's kernel loses digits of values near 0; ours is compared with float64 in tests/ops/test_row_reduce.py"
)
_RSQRT = (
    "the CPU's kernel rounds 1 / sqrt(x) once or twice by an element's place in memory, ours once: "
    "tests/ops/test_pointwise.py compares it with float64"
)
_RSQRT_GRADIENTS = ("backward", "double_backward", "double_backward_threads", "forward_mode", "inplace_backward")
_GELU_OUT = "torch.nn.functional.gelu of plain CPU writes wrong values into an out= with other strides (oneDNN)"
_CHAOTIC = "LBFGS divides by differences of gradients: the last bits of a product in float32 become the state's first"
EXCLUDED: dict[tuple[str, str, str, str], str] = {
    **{("optim_db", "LBFGS", dtype, "*"): _CHAOTIC for dtype in ("float32", "complex64")},
    **{
        ("module_db", name, dtype, check): _ROUNDED
        for name in ("nn_CrossEntropyLoss", "nn_LinearCrossEntropyLoss")
        for dtype in ("bfloat16", "float16")
        for check in ("backward", "double_backward", "noncontiguous_backward")
    },
    **{
        ("op_db", name, dtype, "*"): _ROUNDED
        for name in ("log_softmax", "masked_log_softmax")
        for dtype in ("bfloat16", "float16")
    },
    **{
        ("op_db", name, dtype, check): _ROUNDED
        for name in (
            *("nn_functional_cross_entropy", "nn_functional_linear_cross_entropy", "softmax"),
            *("nn_functional_linear_cross_entropy_chunked", "nn_functional_linear_cross_entropy_chunked_none"),
        )
        for dtype in ("bfloat16", "float16")
        for check in ("backward", "double_backward", "double_backward_threads", "noncontiguous_backward")
    },
    **{("op_db", "nn_functional_gelu", dtype, "out"): _GELU_OUT for dtype in ("bfloat16", "float32")},
    **{
        ("op_db", name, dtype, check): _RSQRT
        for name in ("rsqrt", "acos", "acosh", "asin", "asinh")
        for dtype in ("bfloat16", "float16")
        for check in (*_RSQRT_GRADIENTS, "noncontiguous_backward", "sparse_backward")
    },
    **{
        (database, f"{prefix}{name}", dtype, "backward"): _RSQRT
        for database, prefix in (("foreach_db", "_foreach_"), ("nested_db", ""))
        for name in ("rsqrt", "acos", "asin")
        for dtype in ("bfloat16", "float16")
    },
    **{("op_db", f"{kind}sort", dtype, "*"): _TIES for kind in ("", "arg", "m") for dtype in ("bfloat16", "float16")},
    # Plain CPU's sort of these is stable on some processors only (x86-simd-sort).
    **{("op_db", name, dtype, "*"): _TIES for name in ("sort", "argsort") for dtype in ("bool", "int8", "uint8")},
    **{
        ("op_db", f"jiterator_{kind}", "*", "*"): _JITERATOR
        for kind in ("unary", "binary", "4inputs_with_extra_args", "2inputs_2outputs", "binary_return_by_ref")
    },
    ("op_db", "torch_ops_aten__flash_attention_forward", "*", "*"): _SEEDS,
    ("op_db", "torch_ops_aten__efficient_attention_forward", "*", "*"): _SEEDS,
}

# The same for the cuda substrate alone: the CPU's kernel takes the lower index among equals too.
EXCLUDED_ON_CUDA: dict[tuple[str, str, str, str], str] = {
    ("op_db", "topk", dtype, "*"): _TIES for dtype in ("bfloat16", "float16")
}

# Operators that return memory nobody has written: everything but the elements is compared.
UNINITIALISED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)

# Operators that make tensors and take ``device=``, but whose Python signature cannot be inspected.
FACTORIES = (
    "arange",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

# Operators whose tensor arguments after the first must be on the CPU for every device.
ARGUMENTS_ON_CPU = ("tensor_split",)

# Host substrate: operators whose result may be close instead of bit-equal -> cause.
_LSTSQ = "plain CPU differs from itself between two processes: LAPACK's rounding depends on where memory is aligned"
_RNN = (
    "PyTorch's recurrent composites test whether the device is the CPU: only there the input gates of all steps are "
    "computed at once and the cells are not fused, so sums are taken in another order"
)
_ATTENTION = (
    "the kernel is this project's: its order of sums is that of docs/ops/attention.md, not that of PyTorch's kernel"
)
CLOSE_ON_HOST: dict[str, str] = {
    "nn_functional_scaled_dot_product_attention": _ATTENTION,
    "nn_MultiheadAttention": _ATTENTION,
    "nn_Transformer": _ATTENTION,
    "nn_TransformerDecoderLayer": _ATTENTION,
    "nn_TransformerEncoder": _ATTENTION,
    "nn_TransformerEncoderLayer": _ATTENTION,
    "nn_GRU": _RNN,
    "nn_GRUCell": _RNN,
    "nn_LSTM": _RNN,
    "nn_LSTMCell": _RNN,
    "nn_RNN": _RNN,
    "linalg_lstsq": _LSTSQ,
    "linalg_lstsq_grad_oriented": _LSTSQ,
}

# Host substrate: own kernels whose order of sums is this project's, and so are the last bits. A check in which one of
# them has computed may be close instead of bit-equal; where it hands its arguments on (float64, integers) bits must be
# equal.
_PRODUCT = "the order of sums is that of docs/ops/matmul.md; PyTorch's depends on the shape and the processor"
_ROWS = "the order of sums is that of docs/ops/rows.md; PyTorch's depends on the shape and the threads"
_PLACE = "one way for every element, docs/ops/pointwise.md; PyTorch's depends on its place in memory"
_TAPS = "taps ascending in float32, docs/ops/recurrent.md; PyTorch's order depends on shape and processor"
OWN_ORDER: dict[str, str] = {
    "aten::convolution": _TAPS,
    **{
        f"aten::{name}": _PLACE
        for name in (
            *("sigmoid", "sigmoid_", "sigmoid.out", "silu", "silu_", "silu.out", "rsqrt", "rsqrt_", "rsqrt.out"),
            *("softplus", "softplus.out", "gelu", "gelu_", "gelu.out"),
        )
    },
    **{
        f"aten::{name}": _ROWS
        for name in (
            *("_softmax", "_softmax.out", "_log_softmax", "_log_softmax.out", "logsumexp", "logsumexp.out"),
            *("sum.dim_IntList", "sum.IntList_out", "mean.dim", "mean.out", "cumsum", "cumsum_", "cumsum.out"),
            *("var.correction", "var.correction_out", "std.correction", "std.correction_out", "native_layer_norm"),
        )
    },
    **{
        f"aten::{name}": _PRODUCT
        for name in (
            *("mm", "mm.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_"),
            *("addmv", "addmv.out", "addmv_", "dot", "_grouped_mm"),
        )
    },
}

# Operators whose numbers come from the counter of quartz's generator (docs/ops/random.md) and are not those of the
# native device. A check in which one of them has computed is compared in everything but the elements; of those the kind
# counts (finite, not negative, whole), and a second run with the same seed must give the same bits. The
# numbers themselves are compared with a reference in tests/ops/test_random_operators.py.
_COUNTER = "the numbers are those of quartz's counter generator, the same on host and CUDA, where PyTorch's differ"
RANDOM: dict[str, str] = {
    f"aten::{name}": _COUNTER
    for name in (
        *("uniform_", "normal_", "exponential_", "bernoulli_.float", "bernoulli_.Tensor", "bernoulli.out"),
        *("bernoulli.p", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
        *("normal.Tensor_float_out", "normal.float_Tensor_out", "normal.Tensor_Tensor_out"),
        *("multinomial", "multinomial.out", "native_dropout"),
    )
}


def excluded(database: str, name: str, dtype: str, check: str, substrate: str) -> str | None:
    """The cause why a check of a variant is not run, or None."""
    keys = [(database, name, a, b) for a in (dtype, "*") for b in (check, "*")]
    tables = [EXCLUDED, EXCLUDED_ON_CUDA] if substrate == "cuda" else [EXCLUDED]
    return next((table[key] for table in tables for key in keys if key in table), None)
