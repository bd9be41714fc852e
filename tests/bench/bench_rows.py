"""The operators over rows on this CPU (or GPU): time on quartz divided by PyTorch's time on the native device.

Norms, gated activations, rotary embeddings, and the reductions that quartz computes itself. PyTorch's side of the fused
ones is the code that a model's module runs. Results are compared before anything is timed; the two sides alternate.

    python tests/bench/bench_rows.py [--rows 1 64 1024] [--width 4096] [--dtype bfloat16] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch_quartz
from torch import Tensor
from torch.nn import functional
from torch_quartz import ops

Call = Callable[[], Tensor]


def cases(rows: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[str, bool], Call]]:
    """Return for each name a function of the device and of whether quartz's own operator is meant."""
    x, y, weight = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    heads = max(1, width // 128)
    q = torch.randn(1, rows, heads, 128).to(dtype)
    angles = torch.randn(1, rows, 128)

    def rms_norm(device: str, own: bool) -> Call:
        a, w = x.to(device), weight.to(device)
        if own:
            return lambda: ops.rms_norm(a, w, 1e-6, round_first=True)

        def module() -> Tensor:
            wide = a.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return w * wide.to(dtype)

        return module

    def add_rms_norm(device: str, own: bool) -> Call:
        a, b, w = x.to(device), y.to(device), weight.to(device)
        if own:
            return lambda: ops.add_rms_norm(a, b, w, 1e-6)[0]
        return lambda: functional.rms_norm(a + b, (width,), w, 1e-6)

    def gated(device: str, own: bool) -> Call:
        a, b = x.to(device), y.to(device)
        return (lambda: ops.gated_activation(a, b)) if own else (lambda: functional.silu(a) * b)

    def rotary(device: str, own: bool) -> Call:
        t, cos, sin = q.to(device).transpose(1, 2), angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        if own:
            return lambda: ops.rotary(t, cos, sin)

        def module() -> Tensor:
            turned = torch.cat((-t[..., 64:], t[..., :64]), -1)
            return t * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

        return module

    def layer_norm(device: str, own: bool) -> Call:
        a, w = x.to(device), weight.to(device)
        return lambda: functional.layer_norm(a, (width,), w, w)

    def of_tensor(function: Callable[[Tensor], Tensor]) -> Callable[[str, bool], Call]:
        def make(device: str, own: bool) -> Call:
            a = x.to(device)
            return lambda: function(a)

        return make

    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "layer_norm": layer_norm,
        "silu and mul": gated,
        "rotary": rotary,
        "softmax": of_tensor(lambda a: a.softmax(-1)),
        "log_softmax": of_tensor(lambda a: a.log_softmax(-1)),
        "sum": of_tensor(lambda a: a.sum(-1)),
        "mean": of_tensor(lambda a: a.mean(-1)),
        "var": of_tensor(lambda a: a.var(-1)),
        "logsumexp": of_tensor(lambda a: a.logsumexp(-1)),
        "argmax": of_tensor(lambda a: a.argmax(-1)),
        "cumsum": of_tensor(lambda a: a.cumsum(-1)),
        "topk 50": of_tensor(lambda a: a.topk(min(50, width))[0]),
        "sort": of_tensor(lambda a: a.sort(-1)[0]),
    }


def seconds(call: Call, repeats: int) -> float:
    """Return the time of one call."""
    torch.quartz.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    if result.device.type != "cpu":
        torch.accelerator.synchronize()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype, native = getattr(torch, arguments.dtype), "cpu" if torch.quartz.substrate() == "host" else "cuda"
    print(
        f"torch {torch.__version__}, torch-quartz {torch_quartz.__version__}, {torch.quartz.get_device_name()}, "
        f"{arguments.dtype}, {arguments.threads} threads; microseconds and our time / PyTorch's on {native}\n"
    )
    print("| operator | rows | width | quartz | " + native + " | ratio |\n|---|---:|---:|---:|---:|---:|")
    with torch.no_grad():
        for rows in arguments.rows:
            for name, make in cases(rows, arguments.width, dtype).items():
                ours, theirs = make("quartz", True), make(native, False)
                tolerance = 1e-4 if dtype == torch.float32 else 3e-2
                scale = arguments.width**0.5 if name in ("sum", "cumsum") else 1
                torch.testing.assert_close(ours().cpu(), theirs().cpu(), rtol=tolerance, atol=tolerance * scale)
                repeats = max(1, int(2e-3 / max(1e-6, seconds(theirs, 1))))
                times = [(seconds(ours, repeats), seconds(theirs, repeats)) for _ in range(arguments.rounds)]
                ratio = statistics.median(a / b for a, b in times)
                best = [min(column) * 1e6 for column in zip(*times, strict=True)]
                print(
                    f"| {name} | {rows} | {arguments.width} | {best[0]:.1f} | {best[1]:.1f} | {ratio:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
