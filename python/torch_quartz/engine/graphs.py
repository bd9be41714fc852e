"""Graphs of the forward pass for the shapes that repeat: decoding, and verification of drafts.

A bucket has static inputs for some number of sequences with some rows each. A step is copied into the smallest bucket
that holds it and replayed; what is left of the bucket is rows of no sequence, which write nowhere. The operators' bits
do not depend on the number of rows, so they are those of the eager pass. On cuda the launches are saved, on host the
way through Python; there only small batches have buckets, because padded rows cost time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_quartz.engine.paged_context import PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner
    from torch_quartz.engine.step_inputs import StepInputs

_log = logging.getLogger(__name__)
_MOST_SEQUENCES = 512  # larger batches are bound by the device, not by launches
_HOST_SEQUENCES = {1: (1, 2, 3, 4, 6, 8), 2: (1, 2, 4)}  # without drafts; with them
_HOST_WASTE = 1.34  # rows of a bucket to those of a step: what Python would have cost


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
        self._on_host = torch.quartz.substrate() == "host"
        self._weights: list[int] = []
        self._buckets: list[_Bucket] = []
        if runner.layout.states:
            return  # states are gathered by lists that the host makes
        self._weights = _places(runner)
        config = runner.config
        most = min(config.max_num_seqs, _MOST_SEQUENCES)
        for drafts, rows in enumerate(sorted({1, 1 + config.max_drafts}), 1):
            sizes: Any = sorted({1, 2, 4, *range(8, most, 8), most})
            if self._on_host:
                sizes = _HOST_SEQUENCES[drafts]
            fitting = [size for size in sizes if size <= most and size * rows <= config.max_num_batched_tokens]
            self._buckets += [_Bucket(runner, size, rows) for size in fitting]
        if capture:
            self._capture()

    def _capture(self) -> None:
        runner = self._runner
        before = torch.quartz.memory_reserved(runner.device)
        pool = torch.quartz.graph_pool_handle()
        buckets = sorted(self._buckets, key=lambda one: -one.rows)  # the largest first: others fit into its memory
        if not self._on_host:
            from tqdm import tqdm

            buckets = tqdm(buckets, desc="CUDA graphs")
        with torch.inference_mode(), _small_pools(runner) if self._on_host else contextlib.nullcontext():
            try:
                for bucket in buckets:
                    self._forward(bucket)
                    torch.quartz.synchronize(runner.device)
                    bucket.graph = torch.quartz.Graph()
                    with torch.quartz.graph(bucket.graph, pool=pool):
                        self._forward(bucket)
            except RuntimeError as error:
                # A model that looks at values on the host, for example.
                _log.warning("%s runs without graphs: %s", type(runner.model).__name__, error)
                self._buckets = []
        self.bytes = max(0, int(torch.quartz.memory_reserved(runner.device) - before))

    @property
    def stale(self) -> bool:
        """Whether parameters or buffers lie elsewhere than in the capture; graphs see what changes in place."""
        return bool(self._buckets) and self._weights != _places(self._runner)

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
            if bucket.sequences >= inputs.num_seqs
            and bucket.rows >= rows
            and bucket.rows_each >= most
            and not (self._on_host and bucket.graph is not None and bucket.rows > rows * _HOST_WASTE)
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


def _places(runner: ModelRunner) -> list[int]:
    return [t.data_ptr() for tensors in (runner.model.parameters(), runner.model.buffers()) for t in tensors]


@contextlib.contextmanager
def _small_pools(runner: ModelRunner) -> Iterator[None]:
    """Let the pools be one block long: a capture on host keeps what recorded calls may write, to put it back.

    The rows of a bucket write nowhere and read the first block while it is captured. Nothing else may use the pools.
    """
    storages = [(pool.untyped_storage(), pool[0].nbytes) for group in runner.cache.groups for pool in group.pools]
    sizes = [storage.nbytes() for storage, _ in storages]
    try:
        for storage, block in storages:
            storage.resize_(block)
        yield
    finally:
        for (storage, _), size in zip(storages, sizes, strict=True):
            storage.resize_(size)
