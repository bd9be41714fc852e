"""CUDA graphs of the forward pass for the shapes that repeat: decoding, and verification of drafts.

A bucket has static inputs for some number of sequences with some rows each. A step is copied into the smallest bucket
that holds it and replayed; what is left of the bucket is rows of no sequence, which write nowhere. The operators' bits
do not depend on the number of rows, so they are those of the eager pass. All graphs share one private pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_quartz.engine.paged_context import PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner
    from torch_quartz.engine.step_inputs import StepInputs

_MOST_SEQUENCES = 512  # larger batches are bound by the device, not by launches


class _Bucket:
    """Static inputs of a forward pass."""

    def __init__(self, runner: ModelRunner, sequences: int, rows_each: int):
        state, device = runner.state, runner.device
        self.sequences, self.rows_each = sequences, rows_each
        self.rows = sequences * rows_each
        self.ids = torch.zeros(1, self.rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, self.rows, dtype=torch.int64, device=device)
        self.tables = [
            torch.zeros(sequences, table.shape[1], dtype=torch.int32, device=device) for table in state.tables
        ]
        self.slots = [torch.full((self.rows,), -1, dtype=torch.int64, device=device) for _ in state.tables]
        self.query_starts = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self.key_counts = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.graph: Any = None
        self.hidden: Tensor | None = None
        self.output: Any = None
        self.taps: dict[int, Tensor] = {}

    def step(self, runner: ModelRunner) -> PagedStep:
        """Return the step over the static inputs."""
        return PagedStep(
            runner.layout.attention, self.tables, self.slots, self.query_starts, self.key_counts, self.rows_each
        )

    def load(self, inputs: StepInputs) -> None:
        """Copy a step in."""
        rows, sequences = inputs.num_rows, inputs.num_seqs
        self.ids[:, :rows].copy_(inputs.ids)
        self.positions[:, :rows].copy_(inputs.positions)
        for own, given in zip(self.tables, inputs.step.tables, strict=True):
            own[:sequences, : given.shape[1]].copy_(given)
        for own, given in zip(self.slots, inputs.step.slots, strict=True):
            own.fill_(-1)
            own[:rows].copy_(given)
        self.query_starts.fill_(rows)
        self.query_starts[: sequences + 1].copy_(inputs.query_starts)
        self.key_counts.zero_()
        self.key_counts[:sequences].copy_(inputs.step.key_counts)


class DecodeGraphs:
    """The buckets of a runner, captured when it is made.

    Parameters
    ----------
    runner : ModelRunner
        With its pools.
    capture : bool
        False runs the buckets' static inputs eagerly: the same rows and padding without a graph, for tests.
    """

    def __init__(self, runner: ModelRunner, capture: bool = True):
        self._runner = runner
        self.bytes = 0
        self._buckets: list[_Bucket] = []
        if runner.layout.states:
            return  # states are gathered by lists that the host makes
        config = runner.config
        most = min(config.max_num_seqs, _MOST_SEQUENCES)
        sizes = sorted({1, 2, 4, *range(8, most, 8), most})
        self._buckets = [
            _Bucket(runner, size, rows)
            for rows in sorted({1, 1 + config.max_drafts})
            for size in sizes
            if size <= most and size * rows <= max(config.max_num_batched_tokens, rows)
        ]
        if capture:
            self._capture()

    def _capture(self) -> None:
        from tqdm import tqdm

        before = torch.quartz.memory_reserved(self._runner.device)
        pool = torch.quartz.graph_pool_handle()
        # The largest first: the others find their memory in the pool.
        for bucket in tqdm(sorted(self._buckets, key=lambda one: -one.rows), desc="CUDA graphs"):
            with torch.inference_mode():
                self._forward(bucket)
                torch.quartz.synchronize(self._runner.device)
                bucket.graph = torch.quartz.Graph()
                with torch.quartz.graph(bucket.graph, pool=pool):
                    self._forward(bucket)
        self.bytes = int(torch.quartz.memory_reserved(self._runner.device) - before)

    def _forward(self, bucket: _Bucket) -> None:
        hidden, output = self._runner.forward(bucket.step(self._runner), bucket.ids, bucket.positions)
        bucket.hidden, bucket.output, bucket.taps = hidden, output, self._runner.taps

    def run(self, inputs: StepInputs) -> tuple[Tensor, Any, dict[int, Tensor]] | None:
        """Replay a step; None where no bucket holds it.

        Parameters
        ----------
        inputs : StepInputs

        Returns
        -------
        tuple or None
            Hidden states of the step's rows, what the base model returned, and the taps. They are overwritten by the
            next replay, behind which nothing of this step reads them.
        """
        if inputs.saves:
            return None
        rows = inputs.num_rows
        most = inputs.step.most_queries
        fitting = [
            bucket
            for bucket in self._buckets
            if bucket.sequences >= inputs.num_seqs and bucket.rows >= rows and bucket.rows_each >= most
        ]
        if not fitting:
            return None
        bucket = min(fitting, key=lambda one: one.rows)
        bucket.load(inputs)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            self._forward(bucket)
        assert bucket.hidden is not None
        return bucket.hidden[:rows], bucket.output, {number: tap[:rows] for number, tap in bucket.taps.items()}
