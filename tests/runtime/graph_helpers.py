"""Shared by the tests of graphs: a capture as both substrates want it."""

import torch


def captured(function, *arguments):
    """Return a graph of the call and what the call returned."""
    graph = torch.quartz.Graph()
    with torch.no_grad():
        if torch.quartz.substrate() == "cuda":  # libraries make their workspaces outside of the capture
            with torch.quartz.stream(torch.quartz.Stream()):
                state = [a.clone() for a in arguments]
                function(*arguments)
                for a, was in zip(arguments, state, strict=True):
                    a.copy_(was)
            torch.quartz.synchronize()
        with torch.quartz.graph(graph):
            outputs = function(*arguments)
    return graph, outputs


def flat(values):
    values = (values,) if isinstance(values, torch.Tensor) else values
    return [v.cpu() for v in values]


def fresh(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to("quartz", dtype)
