"""The device in one page: tensors, a training step, and who computed what.

Run it with ``python examples/01_hello_device.py``; it needs no GPU and takes a second.
"""

import torch
import torch_quartz  # noqa: F401  (registers the device "quartz"; a CPU-only PyTorch does it by itself)


def main() -> None:
    """Show tensors, autograd, random numbers and operator counts."""
    name = torch.quartz.get_device_name()
    print(f"{torch.quartz.device_count()} device(s); quartz:0 is {name} ({torch.quartz.substrate()} memory)")

    # Tensors behave as on any device.
    x = torch.arange(6.0, device="quartz").reshape(2, 3)
    print("x.T @ x =", (x.T @ x).tolist(), "on", x.device)

    # Modules, autograd and optimisers follow the device of their tensors.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("quartz")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 3, device="quartz")
    targets = inputs.sum(dim=1, keepdim=True)
    torch.quartz.reset_op_counts()
    for step in range(101):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    # Every operator ran either a kernel of this project or PyTorch's own kernel through the fallback, without a copy.
    counts = torch.quartz.op_counts()
    own, fallback = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    print(f"operator calls: {own} own kernels, {fallback} fallback; the most frequent fallbacks:")
    for operator, (_, calls) in sorted(counts.items(), key=lambda item: -item[1][1])[:3]:
        print(f"  {operator:32s} {calls}")
    print("peak memory:", torch.quartz.max_memory_allocated(), "bytes")


if __name__ == "__main__":
    main()
