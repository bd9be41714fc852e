"""Every operator with a proof of determinism, in one form: some arguments have a row for each row of the result.

`test_invariance.py` runs its properties over this table. A new operator with an own kernel gets an entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_quartz import ops
from torch_quartz.testing import FLOATS

HALVES = (torch.bfloat16, torch.float16)
TABLE: dict[str, "Operator"] = {}


@dataclass(frozen=True)
class Operator:
    """An operator as a function of rows.

    Attributes
    ----------
    rows : callable
        ``rows(count, random)`` gives the arguments whose first dimension is that of rows; ``random(*shape)`` draws
        numbers of the dtype under test.
    shared : callable
        ``shared(random)`` gives the arguments that all rows share.
    call : callable
        Takes both and returns a tensor, or several, with the rows first.
    covers : tuple of str
        The operators that an entry proves, as docs/determinism.md names them.
    dtypes : tuple of torch.dtype
        What the kernels serve on every substrate.
    lines : tuple of str
        Arguments whose last dimension has to be contiguous.
    """

    rows: Callable[..., dict[str, Tensor]]
    shared: Callable[..., dict[str, Tensor]]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    covers: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    lines: tuple[str, ...] = ()


def operator(name, rows, call, shared=lambda random: {}, covers=None, **options):
    TABLE[name] = Operator(rows, shared, call, covers or (name,), **options)


def one(*shape):
    """Rows of one argument `x`."""
    return lambda count, random: {"x": random(count, *shape)}


def integers(count, below, *shape, generator_seed=3):
    generator = torch.Generator().manual_seed(generator_seed)
    return torch.randint(0, below, (count, *shape), generator=generator).to("quartz")


# ---- products --------------------------------------------------------------------------------------------------------

K, N = 200, 72


def weights(random):
    return {"w": random(N, K), "b": random(N)}


operator("mm", one(K), lambda x, w, b: torch.mm(x, w.t()), weights)
operator("addmm", one(K), lambda x, w, b: torch.addmm(b, x, w.t()), weights)
operator("linear", one(K), lambda x, w, b: F.linear(x, w, b), weights)
operator("quartz::linear", one(K), lambda x, w, b: ops.linear(x, w, b, "silu"), weights)
operator("matmul", one(3, K), lambda x, w, b: torch.matmul(x, w.t()), weights)
operator("mv", one(K), lambda x, w, b: torch.mv(x, w[0]), weights)
operator("dot", one(K), lambda x, w, b: torch.stack([torch.dot(row, w[1]) for row in x]), weights)
operator("bmm", one(5, K), lambda x, w, b: torch.bmm(x, w.t().expand(len(x), -1, -1)), weights)
operator(
    "baddbmm",
    one(5, K),
    lambda x, w, b: torch.baddbmm(b.expand(len(x), 5, -1), x, w.t().expand(len(x), -1, -1)),
    weights,
)
operator(
    "_grouped_mm",
    one(K),
    # All rows are the first group's, the second is empty.
    lambda x, w: torch._grouped_mm(x, w, offs=torch.full((2,), len(x), dtype=torch.int32, device=x.device)),
    lambda random: {"w": random(2, K, N)},
)


def quantised(kind, *shape, seed=0):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    if kind == "nvfp4":
        return ops.QuantizedWeight(*ops.quantize_nvfp4(w), kind, shape[-1]).to("quartz")
    if kind == "mxfp4":
        return ops.QuantizedWeight(*ops.quantize_mxfp4(w), None, kind, shape[-1]).to("quartz")
    parts = [ops.quantize_fp8(part, "block", 32) for part in (w if w.dim() == 3 else w[None])]
    codes, scales = (torch.stack(part).reshape(*shape[:-2], *part[0].shape) for part in zip(*parts, strict=True))
    return ops.QuantizedWeight(codes, scales, None, "fp8", shape[-1], 32).to("quartz")


for kind in ("fp8", "nvfp4", "mxfp4"):
    for how in ("none", "token"):
        operator(
            f"linear_quantized {kind} {how}",
            one(K),
            lambda x, w, how=how: ops.linear_quantized(x, w, quantize_input=how),
            lambda random, kind=kind: {"w": quantised(kind, N, K)},
            covers=("quartz::linear_quantized",),
        )

# ---- mixture of experts ----------------------------------------------------------------------------------------------


def routed(count, random):
    return {"x": random(count, 64), "ids": integers(count, 6, 3) - 1, "weights": random(count, 3).float()}


def experts(random):
    return {"up": random(5, 128, 64) * 0.1, "down": random(5, 64, 64) * 0.1}


operator("moe_experts", routed, ops.moe_experts, experts, ("quartz::moe_experts",), dtypes=HALVES)
for kind in ("fp8", "nvfp4", "mxfp4"):
    operator(
        f"moe_experts_quantized {kind}",
        routed,
        ops.moe_experts_quantized,
        lambda random, kind=kind: {"up": quantised(kind, 5, 128, 64), "down": quantised(kind, 5, 64, 64, seed=1)},
        ("quartz::moe_experts_quantized",),
        dtypes=HALVES,
    )
for scoring in ("softmax", "sigmoid", "sqrt_softplus", "softmax_selected"):
    operator(
        f"moe_topk {scoring}",
        one(60),
        lambda x, b, scoring=scoring: ops.moe_topk(x, 4, scoring=scoring, bias=b.float()),
        lambda random: {"b": random(60)},
        ("quartz::moe_topk",),
    )

# ---- attention -------------------------------------------------------------------------------------------------------


def attended(queries):
    def rows(count, random):
        return {"q": random(count, 4, queries, 64), "k": random(count, 2, 150, 64), "v": random(count, 2, 150, 64)}

    return rows


def sequences(count, random):
    tables = integers(count, 9, 4)
    return {"q": random(count, 4, 64), "tables": tables, "counts": integers(count, 64)[:, None] + 1}


def paged(q, tables, counts, k, v):
    starts = torch.arange(len(q) + 1, device=q.device)
    return ops.paged_attention(q, k, v, tables, starts, counts[:, 0].contiguous(), window=40)


def written(key, value, slots):
    caches = [torch.zeros(len(slots), 16, *t.shape[1:], dtype=t.dtype, device=t.device) for t in (key, value)]
    slots = slots[:, 0] + torch.arange(len(slots), device=slots.device) * 16
    ops.write_kv(key, value, *caches, slots)
    return tuple(cache.flatten(0, 1)[slots] for cache in caches)


def caches(random):
    return {"k": random(9, 16, 2, 64), "v": random(9, 16, 2, 64)}


operator(
    "attention",
    attended(3),
    lambda q, k, v: ops.attention(q, k, v, causal=True, window=70),
    covers=("quartz::attention",),
)
operator(
    "attention with bounds",
    lambda count, random: attended(1)(count, random) | {"ends": integers(count, 150)[:, None] + 1},
    lambda q, k, v, ends: ops.attention(q, k, v, key_end=ends[:, 0].contiguous(), soft_cap=20.0),
    covers=("quartz::attention",),
)
operator(
    "scaled_dot_product_attention",
    attended(5),
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
)
operator("paged_attention", sequences, paged, caches, ("quartz::paged_attention",), lines=("k", "v"))
operator(
    "write_kv",
    lambda count, random: {
        "key": random(count, 2, 64),
        "value": random(count, 2, 64),
        "slots": integers(count, 16)[:, None],
    },
    written,
    covers=("quartz::write_kv",),
)

# ---- norms, rotary embeddings, activations ---------------------------------------------------------------------------

operator("rms_norm", one(200), ops.rms_norm, lambda random: {"weight": random(200)}, ("quartz::rms_norm",))
operator(
    "add_rms_norm",
    lambda count, random: {"x": random(count, 200), "residual": random(count, 200)},
    ops.add_rms_norm,
    lambda random: {"weight": random(200)},
    ("quartz::add_rms_norm",),
)
affine = {"weight": 200, "bias": 200}
operator(
    "layer_norm",
    one(200),
    ops.layer_norm,
    lambda random: {name: random(size) for name, size in affine.items()},
    ("quartz::layer_norm",),
)
operator(
    "native_layer_norm",
    one(200),
    lambda x, weight, bias: torch.native_layer_norm(x, (200,), weight, bias, 1e-5),
    lambda random: {name: random(size) for name, size in affine.items()},
)


def turned(count, random):
    angles = random(count, 5, 16)
    return {"q": random(count, 4, 5, 40), "k": random(count, 2, 5, 40), "cos": angles.cos(), "sin": angles.sin()}


for style in ("half", "interleaved"):
    operator(
        f"rotary {style}",
        turned,
        lambda q, k, cos, sin, style=style: ops.rotary(q, cos, sin, style=style, pair_table=True),
        covers=("quartz::rotary",),
    )
operator(
    "rotary_qk",
    turned,
    lambda q, k, cos, sin: ops.rotary_qk(q, k, cos, sin, pair_table=True),
    covers=("quartz::rotary_qk",),
)
for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"):
    operator(
        f"gated_activation {activation}",
        lambda count, random: {"gate": random(count, 90), "up": random(count, 90)},
        lambda gate, up, activation=activation: ops.gated_activation(gate, up, activation),
        covers=("quartz::gated_activation",),
    )
operator("silu_and_mul", one(90), ops.silu_and_mul, covers=("quartz::silu_and_mul",))
ELEMENTS = {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus, "gelu": F.gelu, "rsqrt": torch.rsqrt}
for name, function in ELEMENTS.items():
    operator(name, one(130), lambda x, function=function: function(x))

# ---- rows ------------------------------------------------------------------------------------------------------------

ROWS = {
    "_softmax": lambda x: x.softmax(-1),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "topk": lambda x: x.topk(7, -1),
    "sort": lambda x: x.sort(-1),
}
for name, function in ROWS.items():
    for width in (300, 5000):
        operator(f"{name} {width}", one(width), function, covers=(name,))
for name in ("_softmax", "sum", "mean"):
    function = {"_softmax": torch.softmax, "sum": torch.sum, "mean": torch.mean}[name]
    operator(f"{name} dim 1", one(40, 7), lambda x, function=function: function(x, 1), covers=(name,))

# ---- recurrent layers ------------------------------------------------------------------------------------------------


def scanned(count, random):
    shapes = {"x": (3, 9), "dt": (3, 9), "B": (9, 5), "C": (9, 5), "z": (3, 9), "state": (3, 5)}
    rows = {name: random(count, *shape) for name, shape in shapes.items()}
    return rows | {"state": rows["state"].float()}


operator(
    "selective_scan",
    scanned,
    lambda A, D, **rows: ops.selective_scan(A=A, D=D, dt_softplus=True, **rows),
    lambda random: {"A": -random(3, 5).float().exp(), "D": random(3).float()},
    ("quartz::selective_scan",),
)
operator(
    "gated_delta_rule",
    lambda count, random: {
        "query": random(count, 9, 2, 16) * 0.2,
        "key": random(count, 9, 2, 16) * 0.2,
        "value": random(count, 9, 2, 16),
        "g": -random(count, 9, 2).abs(),
        "beta": random(count, 9, 2).sigmoid(),
    },
    ops.gated_delta_rule,
    covers=("quartz::gated_delta_rule",),
)
operator(
    "convolution",
    one(6, 20),
    lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6),
    lambda random: {"w": random(6, 1, 4), "b": random(6)},
)

# ---- sampling and verification ---------------------------------------------------------------------------------------


def requests(count, random):
    return {
        "logits": random(count, 333) * 3,
        "seeds": integers(count, 10**6),
        "positions": integers(count, 10**6, generator_seed=4),
    }


def masked(logits, bitmask):
    logits = logits.clone(memory_format=torch.contiguous_format)
    return ops.apply_token_bitmask_(logits, bitmask)


operator(
    "sample", requests, lambda **rows: ops.sample(top_k=20, top_p=0.9, top_n=3, **rows), covers=("quartz::sample",)
)
operator(
    "sample whole rows",
    requests,
    lambda **rows: ops.sample(temperature=0.8, min_p=0.01, **rows)[:3],
    covers=("quartz::sample",),
)
operator(
    "apply_token_bitmask_",
    lambda count, random: {"logits": random(count, 333), "bitmask": integers(count, 2**31, 11).int()},
    masked,
    covers=("quartz::apply_token_bitmask_",),
)
operator(
    "markov_draft",
    lambda count, random: {"base": random(count, 3, 60), "previous": integers(count, 60), "seeds": integers(count, 99)},
    lambda **arguments: ops.markov_draft(temperature=1.0, **arguments),
    lambda random: {"w1": random(60, 8), "w2": random(60, 8)},
    ("quartz::markov_draft",),
)


def verified(target, drafts):
    cu = torch.arange(len(drafts) + 1, device=drafts.device) * drafts.shape[1]
    got = ops.spec_verify(target.flatten(), drafts.flatten(), cu)
    return (*got[:4], got.tokens.view(target.shape))


operator(
    "spec_verify",
    lambda count, random: {"target": integers(count, 2, 4), "drafts": integers(count, 2, 3, generator_seed=4)},
    verified,
    covers=("quartz::spec_verify",),
)
operator(
    "ngram_propose",
    lambda count, random: {"tokens": integers(count, 3, 40)},
    lambda tokens: ops.ngram_propose(tokens, 5),
    covers=("quartz::ngram_propose",),
)

# ---- formats ---------------------------------------------------------------------------------------------------------

for granularity in ("row", "group"):
    operator(
        f"quantize_fp8 {granularity}",
        one(100),
        lambda x, granularity=granularity: ops.quantize_fp8(x, granularity, 32),
        covers=("quartz::quantize_fp8",),
    )
operator(
    "quantize_nvfp4",
    one(100),
    lambda x, total: ops.quantize_nvfp4(x, total)[:2],
    lambda random: {"total": torch.tensor(0.01, device="quartz")},
    ("quartz::quantize_nvfp4",),
)
operator("quantize_mxfp4", one(100), lambda x: ops.quantize_mxfp4(x), covers=("quartz::quantize_mxfp4",))
operator(
    "dequantize_fp8",
    lambda count, random: {
        "codes": integers(count, 120, 96).to(torch.uint8).view(torch.float8_e4m3fn),
        "scales": random(count, 3).float(),
    },
    lambda codes, scales: ops.dequantize_fp8(codes, scales, torch.bfloat16, 32),
    covers=("quartz::dequantize_fp8",),
)
operator(
    "dequantize_mxfp4",
    lambda count, random: {"packed": integers(count, 256, 48).byte(), "scales": integers(count, 254, 3).byte()},
    lambda packed, scales: ops.dequantize_mxfp4(packed, scales, 96),
    covers=("quartz::dequantize_mxfp4",),
)
operator(
    "dequantize_nvfp4",
    lambda count, random: {"packed": integers(count, 256, 48).byte(), "scales": integers(count, 120, 6).byte()},
    lambda packed, scales: ops.dequantize_nvfp4(packed, scales, None, 96),
    covers=("quartz::dequantize_nvfp4",),
)

# What has an own kernel and is no function of rows, with the reason.
NOT_BY_ROWS = {
    "quartz::attention_plan": "integers: who computes which keys; no bit depends on it (test_paged_attention.py)",
    "quartz::spec_schedule": "chooses among all requests together, by integers (test_verify.py)",
    "quartz::random_fill_": "a function of an element's index (test_random_fill.py)",
    "quartz::moe_experts_backward": "gradients are no part of the contract (docs/determinism.md, not covered)",
    "quartz::moe_experts_quantized_backward": "gradients are no part of the contract",
    "rand": "the numbers of a counter (test_random_operators.py); so the five that follow",
    "randn": "a counter",
    "uniform_": "a counter",
    "normal_": "a counter",
    "exponential_": "a counter",
    "bernoulli": "a counter",
    "multinomial": "a counter, which counts rows too",
    "native_dropout": "a counter",
}
