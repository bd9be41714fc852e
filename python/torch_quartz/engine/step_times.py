"""How long steps of how many rows take: the table by which an adaptive schedule weighs drafts against time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_quartz.engine.proof import plan_of, sequence_of

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner

_TOKENS = 64  # of each sequence: what attention costs beside them is the same for all numbers of rows
_ROUNDS = 3  # the shortest time counts
_ENOUGH = 1.0  # seconds: longer steps are not measured but drawn on from the last ones


def measure(runner: ModelRunner) -> list[float]:
    """Return the seconds of a step of 0, 1, ... rows, as many as a step of decodes with drafts may have.

    Decodes with and without drafts are measured for 1, 2, 4, ... sequences, and the times between them interpolated. A
    time is never above that of more rows.

    Parameters
    ----------
    runner : ModelRunner
        Its pools are allocated, and nothing runs: blocks and slots are overwritten.
    """
    config = runner.config
    most = min(config.max_num_seqs * (1 + config.max_drafts), config.max_num_batched_tokens)
    measured: dict[int, float] = {}
    sequences = 1
    while True:
        for drafts in (0, config.max_drafts):
            rows = sequences * (1 + drafts)
            if rows <= most and rows not in measured:
                measured[rows] = min(_run(runner, sequences, drafts) for _ in range(_ROUNDS))
        if sequences >= config.max_num_seqs or sequences * (1 + config.max_drafts) >= most:
            break
        if max(measured.values()) > _ENOUGH:
            break
        sequences = min(2 * sequences, config.max_num_seqs)
    return fill(measured, most)


def fill(measured: dict[int, float], most: int) -> list[float]:
    """Return times for 0 to `most` rows from some of them.

    Parameters
    ----------
    measured : dict of int to float
        Seconds by the number of rows.
    most : int
        The last row of the table.

    Examples
    --------
    >>> fill({1: 1.0, 3: 2.0}, 5)
    [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    """
    rows = np.array(sorted(measured), np.float64)
    times = np.array([measured[int(row)] for row in rows])
    times = np.minimum.accumulate(times[::-1])[::-1]  # what disturbs a measurement makes it longer
    if rows[-1] < most and len(rows) > 1:  # as steep as from the first to the last
        slope = (times[-1] - times[0]) / (rows[-1] - rows[0])
        times = np.append(times, times[-1] + slope * (most - rows[-1]))
        rows = np.append(rows, most)
    return np.interp(np.arange(most + 1), rows, times).tolist()


def _run(runner: ModelRunner, count: int, drafts: int) -> float:
    config = runner.config
    assert config.max_model_len is not None
    growth = 2 * (1 + drafts)  # of two steps, at most
    length = max(1, min(_TOKENS, config.max_model_len - growth))
    sequence = sequence_of(0, [1] * length, length)
    columns = -(-(length + growth) // config.block_size)
    updates = [
        (g, slot, column, (column + slot) % group.num_blocks)
        for g, group in enumerate(runner.cache.groups)
        for slot in range(count)
        for column in range(1 if group.kind == "state" else columns)
    ]
    entries: list[dict[str, Any]] = [
        {
            "slot": slot,
            "start": -1,
            "query_len": 1 + drafts,
            "drafts": drafts,
            "samples": 1,
            "kind": 1,
            "max_length": length + growth,
        }
        for slot in range(count)
    ]
    admitted = plan_of(
        entries,
        new=[(slot, 0, 0, 0) for slot in range(count)],
        table_updates=np.array(updates, np.int32).reshape(-1, 4),
    )
    seconds = 0.0
    for plan in (admitted, plan_of(entries)):  # the second one only steps
        torch.quartz.synchronize(runner.device)
        start = time.perf_counter()
        step = runner.execute(plan, lambda key, index: sequence)
        runner.sample(step)
        runner.wait(step)
        seconds = time.perf_counter() - start
    return seconds
