"""The proof at load: the engine's logits have the bits of the plain model's, or the model is refused.

Two short prompts run through the engine's own step, in chunks that are mixed, and once through the plain model. A model
with whatever the engine does not know of (another mask, a cache of its own, a bias of positions) shows here, before it
gives a wrong number to anybody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.model_layout import refused, text_config

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner

_LENGTH = 40  # tokens of a prompt: longer than a block, and than the windows below
_WINDOW = 8  # stands in for a window that such a prompt would not fill
_SEED = 20


def plan_of(rows: list[dict[str, Any]], **changes: Any) -> SimpleNamespace:
    """Return a plan with the fields of the scheduler's.

    Parameters
    ----------
    rows : list of dict
        Of each sequence: slot, start, query_len, max_length; drafts, samples, kind, logits_from, key and index where
        they are not 0 (logits_from: -1).
    **changes
        Of the plan: new, forked, released, table_updates, copies, swap_out, swap_in, state_ops, step_id.
    """

    def column(name: str, default: int = 0, dtype: Any = np.int32) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    empty = {"new": [], "forked": [], "released": np.zeros(0, np.int32), "step_id": 0}
    empty.update({name: np.zeros((0, 3), np.int32) for name in ("copies", "swap_out", "swap_in")})
    empty.update({name: np.zeros((0, 4), np.int32) for name in ("table_updates", "state_ops")})
    return SimpleNamespace(
        **{**empty, **changes},
        num_rows=int(sum(row["query_len"] for row in rows)),
        key=column("key", 0, np.int64),
        index=column("index"),
        slot=column("slot"),
        query_len=column("query_len"),
        start=column("start"),
        drafts=column("drafts"),
        samples=column("samples"),
        kind=column("kind"),
        max_length=column("max_length"),
        logits_from=column("logits_from", -1),
    )


def sequence_of(key: int, ids: list[int], prompt: int) -> SimpleNamespace:
    """Return a sequence that samples greedily, with the fields that the runner reads."""
    params = SimpleNamespace(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias=None,
        min_tokens=0,
        allowed_token_ids=None,
        logprobs=None,
        prompt_logprobs=None,
    )
    request = SimpleNamespace(params=params, all_stop_token_ids=(), bad_words_token_ids=())
    return SimpleNamespace(key=key, index=0, request=request, token_ids=ids, num_prompt_tokens=prompt, seed=0)


@torch.no_grad()
def prove(runner: ModelRunner) -> None:
    """Compare the engine's logits with the plain model's.

    Parameters
    ----------
    runner : ModelRunner
        Without pools: small ones are made for this and dropped.

    Raises
    ------
    NotImplementedError
        Where a bit differs, or the engine cannot run the model.
    """
    length = min(_LENGTH, runner.config.max_model_len or _LENGTH)
    generator = torch.Generator().manual_seed(_SEED)
    top = min(runner.vocab_size, text_config(runner.model).vocab_size)
    prompts = [torch.randint(1, top, (length,), generator=generator).tolist() for _ in range(2)]
    with _small_windows(runner, length):
        expected = [
            runner.model(torch.tensor([ids], device=runner.device), use_cache=False).logits[0] for ids in prompts
        ]
        try:
            _compare(runner, _served(runner, prompts), expected)
        except (RuntimeError, NotImplementedError):
            if not runner.saving:
                raise
            # Some models look at the number of rows behind their layers; all rows must then go through the last one.
            runner.saving = False
            _compare(runner, _served(runner, prompts), expected)


def _compare(runner: ModelRunner, got: list[dict[int, Tensor]], expected: list[Tensor]) -> None:
    for number, (rows, whole) in enumerate(zip(got, expected, strict=True)):
        for position, row in rows.items():
            same = row.dtype == whole.dtype and torch.equal(_bits(row), _bits(whole[position]))
            if not same:
                difference = (row.float() - whole[position].float()).abs().max().item()
                raise refused(
                    runner.model,
                    f"the logits of position {position} of test prompt {number} are not those of the plain model, "
                    f"they differ by up to {difference:.1e} (something in it looks beyond the attention interface)",
                )


def _bits(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.uint8)


def _served(runner: ModelRunner, prompts: list[list[int]]) -> list[dict[int, Tensor]]:
    """Run prompts through the engine; return the logits of positions."""
    length = len(prompts[0])
    size = runner.cache.block_size
    blocks = -(-length // size)
    runner._make_state(None, num_blocks=2 * blocks + 1, slots=3, swap_bytes=0)
    for group in runner.cache.groups:
        for pool in group.pools:
            pool.fill_(torch.nan)  # unused places count for nothing
    sequences = {key: sequence_of(key, ids, length) for key, ids in enumerate(prompts)}
    slots = (2, 0)
    updates, operations = [], []
    for number, group in enumerate(runner.cache.groups):
        for i, slot in enumerate(slots):
            if group.kind == "state":
                updates.append((number, slot, 0, 1 + i))
                operations.append((0, number, -1, 1 + i))
            else:
                updates += [(number, slot, column, 2 * column + i) for column in range(blocks)]
    cuts = [sorted({0, min(11, length), min(12, length), length}), sorted({0, min(5, length), min(25, length), length})]
    chunks = [list(itertools.pairwise(cut)) for cut in cuts]
    found: list[dict[int, Tensor]] = [{}, {}]
    for number in range(max(map(len, chunks))):
        rows = []
        for i, slot in enumerate(slots):
            if number < len(chunks[i]):
                begin, end = chunks[i][number]
                # All rows of one prompt; of the other the last row only, which leaves rows of the last layer out.
                wanted = begin if i == 0 or end < length else -1
                rows.append(
                    {
                        "slot": slot,
                        "key": i,
                        "start": begin,
                        "query_len": end - begin,
                        "samples": int(end == length),
                        "max_length": end,
                        "logits_from": wanted if i == 0 else -1,
                    }
                )
        first = {
            "new": [(slot, i, 0, 0) for i, slot in enumerate(slots)],
            "table_updates": np.array(updates, np.int32).reshape(-1, 4),
            "state_ops": np.array(operations, np.int32).reshape(-1, 4),
        }
        step = runner.execute(plan_of(rows, **(first if number == 0 else {})), lambda key, _: sequences[key])
        _collect(runner, step, found)
    return found


def _collect(runner: ModelRunner, step: Any, found: list[dict[int, Tensor]]) -> None:
    if step.hidden is None:
        return
    inputs = step.inputs
    logits = runner.head(step.hidden, step.output)
    row = 0
    for i, tail in enumerate(inputs.tails.tolist()):
        end = int(inputs.start[i] + inputs.query_len[i])
        for position in range(end - tail, end):
            found[int(step.plan.key[i])][position] = logits[row]
            row += 1


@contextlib.contextmanager
def _small_windows(runner: ModelRunner, length: int) -> Iterator[None]:
    """Let windows that a short prompt does not fill be small for the time of the proof, in the masks too."""
    wide = [layer for layer in runner.layout.attention.values() if layer.window is not None and layer.window >= length]
    config = text_config(runner.model)
    if not wide or getattr(config, "sliding_window", None) is None:
        yield
        return
    before, windows = config.sliding_window, [layer.window for layer in wide]
    try:
        config.sliding_window = _WINDOW
        for layer in wide:
            layer.window = _WINDOW
        yield
    finally:
        config.sliding_window = before
        for layer, window in zip(wide, windows, strict=True):
            layer.window = window


def measure_peak(runner: ModelRunner) -> int:
    """Return the bytes that a step of the most rows takes beside what is there before it.

    Parameters
    ----------
    runner : ModelRunner
        Without pools: small ones are made for this and dropped.
    """
    config = runner.config
    assert config.max_model_len is not None
    rows = min(config.max_num_batched_tokens, config.max_model_len)
    number = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // rows))
    blocks = -(-rows // runner.cache.block_size)
    runner._make_state(None, num_blocks=blocks, slots=number, swap_bytes=0)
    sequence = sequence_of(0, [1] * rows, rows)
    # All sequences in the same blocks: what is computed does not matter here.
    updates = [
        (g, slot, column, column)
        for g, group in enumerate(runner.cache.groups)
        for slot in range(number)
        for column in range(1 if group.kind == "state" else blocks)
    ]
    entries = [{"slot": s, "start": 0, "query_len": rows, "samples": 1, "max_length": rows} for s in range(number)]
    torch.quartz.synchronize(runner.device)
    torch.quartz.reset_peak_memory_stats(runner.device)
    before = torch.quartz.memory_allocated(runner.device)
    plan = plan_of(
        entries, new=[(s, 0, 0, 0) for s in range(number)], table_updates=np.array(updates, np.int32).reshape(-1, 4)
    )
    step = runner.execute(plan, lambda key, index: sequence)
    runner.sample(step)
    runner.wait(step)
    return int(torch.quartz.max_memory_allocated(runner.device) - before)
