"""The model on the device: launches the steps that the scheduler plans, and hands their tokens back.

`execute` prepares rows and runs the model, `sample` draws, verifies, updates the slots' tables and proposes drafts,
both without a look at what the device has computed; `wait` waits for one step's copies. The order of calls is that of
the engine's loop: ``execute(n), sample(n), execute(n + 1), wait(n), sample(n + 1), ...``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine import last_layer, proof, step_times
from torch_quartz.engine.config import EngineConfig
from torch_quartz.engine.device_state import DeviceState
from torch_quartz.engine.drafters import DraftContext, Drafter, make_drafter
from torch_quartz.engine.graphs import DecodeGraphs
from torch_quartz.engine.head import Head
from torch_quartz.engine.kv_cache import KVCache, free_bytes, make_groups, states_of, upload
from torch_quartz.engine.model_layout import call_base, find_layout, text_config
from torch_quartz.engine.paged_context import Overrides, PagedLayer, PagedStep, StopLayer, lock_of
from torch_quartz.engine.sampler import Sampler
from torch_quartz.engine.state_layers import StateRunner
from torch_quartz.engine.step_inputs import StepInputs

_PROMPT_ROWS = 256  # whose logits over the vocabulary are in memory at the same time
_ZERO_STATE = 0  # StepPlan.state_ops


@dataclass
class StepResult:
    """What a step drew, on the host.

    Attributes
    ----------
    tokens : numpy array
        ``(num_seqs, 1 + max_drafts)``, int32: committed tokens, -1 behind them.
    raw_logprobs, logprobs : numpy array or None
        The same shape, float32; None where nobody asked.
    top_ids, top_logprobs : numpy array or None
        ``(num_seqs, 1 + max_drafts, n)``, n the most that a request of the step wants.
    drafts : numpy array or None
        ``(num_seqs, max_drafts)``, int32: proposals for the next step.
    available : numpy array or None
        ``(num_seqs,)``, int32: how many there are.
    confidences : numpy array or None
        ``(num_seqs, max_drafts)``, float32.
    prompt_logprobs : list of tuple
        ``(key, first position, raw logprobs, top ids, top logprobs)``: row ``i`` says how likely the prompt's token
        behind position ``first + i`` was.
    """

    tokens: np.ndarray
    raw_logprobs: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    drafts: np.ndarray | None = None
    available: np.ndarray | None = None
    confidences: np.ndarray | None = None
    prompt_logprobs: list[tuple] = field(default_factory=list)


@dataclass
class Step:
    """A launched step: the handle between `execute`, `sample` and `wait`."""

    plan: Any
    inputs: StepInputs
    hidden: Tensor | None
    output: Any
    taps: dict[int, Tensor]
    copies: dict[str, Tensor] = field(default_factory=dict)
    prompt_copies: list[tuple] = field(default_factory=list)
    event: Any = None


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Keep dropout out of a step of a model that is being trained; its modules are as before behind it."""
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class ModelRunner:
    """Runs a model for the scheduler.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of Transformers, on the device, in evaluation mode.
    config : EngineConfig
        Its `max_model_len` is set where it was None.

    Raises
    ------
    NotImplementedError
        For a model that cannot be served with the bits of its plain forward pass.
    ValueError
        Sizes that do not fit the model or the memory.
    """

    def __init__(self, model: Any, config: EngineConfig):
        self.model = model
        self.config = config
        self.device = next(model.parameters()).device
        if self.device.type != "quartz":
            raise ValueError(f"ModelRunner: model must be on a quartz device, got {self.device}")
        self._settle_length()
        self.layout = find_layout(model)
        self.vocab_size = self.layout.vocab_size
        self.head = Head(model, self.layout.base)
        self.drafter: Drafter | None = None
        self.draft_layers: list[PagedLayer] = []
        if config.speculative is not None:
            self.drafter = make_drafter(config.speculative)
            self.drafter.bind(self)
            self.draft_layers = [
                PagedLayer(-1, None, spec.kv_heads, spec.key_size, spec.value_size, spec.dtype, draft=True)
                for spec in self.drafter.kv_layers
            ]
        groups = make_groups([*self.layout.attention.values(), *self.draft_layers], self.layout.states)
        for layer, spec in zip(self.draft_layers, self.drafter.kv_layers if self.drafter else (), strict=True):
            layer.window = spec.window  # of the call; their blocks are those of full attention
        self.cache = KVCache(groups, config.block_size, self.device)
        self.saving = last_layer.can_save(self.layout)
        self.saved_rows = 0  # that the last layer left out
        self.run_rows = 0
        self.taps: dict[int, Tensor] = {}
        self._tapped = tuple(self.drafter.needs_hidden) if self.drafter is not None else ()
        self._graphs: Any = None
        self._weights = sum(p.numel() * p.element_size() for p in model.parameters())

    def _settle_length(self) -> None:
        limit = getattr(text_config(self.model), "max_position_embeddings", None)
        if self.config.max_model_len is None:
            if limit is None:
                raise ValueError(
                    f"EngineConfig.max_model_len must be given for {type(self.model).__name__}, whose configuration "
                    "has no max_position_embeddings"
                )
            self.config.max_model_len = int(limit)
        elif limit is not None and self.config.max_model_len > limit:
            raise ValueError(
                f"EngineConfig.max_model_len must be at most the model's {limit} positions, got "
                f"{self.config.max_model_len}"
            )

    # ---- memory

    def allocate(self) -> None:
        """Size and make the pools and tables; prove that the model's bits are those of its plain forward pass."""
        with lock_of(self.model):
            self._allocate()

    def _allocate(self) -> None:
        config = self.config
        if config.validate_model:
            proof.prove(self)
        peak = self._measure_peak()
        budget = config.kv_cache_bytes
        if budget is None:
            budget = free_bytes(self.device, config.memory_fraction, peak)
        self._make_state(
            budget, num_blocks=config.num_blocks, slots=config.max_num_seqs, swap_bytes=config.swap_bytes or 0
        )
        self._peak = peak
        if not config.enforce_eager:
            self._graphs = DecodeGraphs(self)
        speculative = config.speculative
        if speculative is not None and speculative.adaptive and speculative.step_times is None:
            speculative.step_times = step_times.measure(self)

    def _make_state(self, budget: int | None, *, num_blocks: int | None, slots: int, swap_bytes: int) -> None:
        config = self.config
        assert config.max_model_len is not None
        self.cache.size(
            budget,
            num_blocks=num_blocks,
            max_num_seqs=slots,
            max_model_len=config.max_model_len,
            max_rows=config.max_num_batched_tokens,
            swap_bytes=swap_bytes,
            caching=config.enable_prefix_caching,
        )
        # Tokens that a drafter looks ahead may lie behind the blocks that a sequence has.
        ahead = max(config.max_drafts + 1, self.drafter.lookahead if self.drafter is not None else 0)
        self.scratch_blocks = 1 + -(-ahead // config.block_size) if self.draft_layers else 0
        self.cache.allocate(slots * self.scratch_blocks)
        self.state = DeviceState(self.cache, slots, config.max_model_len, config.max_drafts, self.device)
        self.sampler = Sampler(slots, self.vocab_size, self.device)
        self._prompt_lens = np.zeros(slots, np.int64)
        self._prompt_tops = np.zeros(slots, np.int64)  # most likely tokens wanted beside each prompt token
        self._make_overrides()

    def _make_overrides(self) -> None:
        overrides = Overrides(self.model)
        self._state_runners = []
        for module, (_, state, views) in states_of(self.cache.groups).items():
            runner = StateRunner(self.model, state, views, self.device)
            self._state_runners.append(runner)
            overrides.forwards[module] = runner.forward
        layers = self.layout.layers
        if self.saving:
            overrides.forwards[layers[-1]] = last_layer.make_forward(layers[-1])
        for tap in self._tapped:
            if tap >= 0:
                overrides.forwards[layers[tap]] = self._tap(
                    tap, overrides.forwards.get(layers[tap], layers[tap].forward)
                )
        self._all_rows = not self.saving or -1 in self._tapped or len(layers) - 1 in self._tapped
        self._overrides = overrides

    def _tap(self, number: int, forward: Callable) -> Callable:
        def tapped(*arguments: Any, **options: Any) -> Any:
            output = forward(*arguments, **options)
            self.taps[number] = (output[0] if isinstance(output, tuple) else output)[0]
            return output

        return tapped

    def _measure_peak(self) -> int:
        """Return the bytes that a step of the most rows takes beside what it starts with, measured where it matters."""
        if torch.quartz.substrate() != "cuda" or self.config.kv_cache_bytes or self.config.num_blocks:
            return 0
        return proof.measure_peak(self)

    def memory_report(self) -> dict[str, Any]:
        """Return what takes memory, in bytes: on the device, and in host memory for swapping."""
        groups = [
            {
                "kind": group.kind,
                "window": group.window,
                "num_blocks": group.num_blocks,
                "block_bytes": size,
                "host_blocks": group.host_blocks,
            }
            for group, size in zip(self.cache.groups, self.cache.block_bytes, strict=True)
        ]
        free, total = torch.quartz.mem_get_info(self.device)
        return {
            "weights": self._weights,
            "drafter": self.drafter.weights() if self.drafter is not None else 0,
            "kv_cache": self.cache.bytes,
            "swap": self.cache.host_bytes,
            "tables": self.state.bytes + self.sampler.bytes,
            "graphs": self._graphs.bytes if self._graphs is not None else 0,
            "workspace": self._peak,
            "peak": torch.quartz.max_memory_allocated(self.device),
            "free": free,
            "total": total,
            "groups": groups,
        }

    @property
    def groups(self) -> list[Any]:
        """The groups for the scheduler, with their sizes."""
        from torch_quartz._C import engine

        return [
            engine.GroupSpec(
                kind=group.kind, window=group.window, num_blocks=group.num_blocks, host_blocks=group.host_blocks
            )
            for group in self.cache.groups
        ]

    # ---- a step

    @torch.inference_mode()
    def execute(self, plan: Any, sequences: Callable[[int, int], Any]) -> Step:
        """Launch the forward pass of a step.

        Parameters
        ----------
        plan : StepPlan
        sequences : callable
            Returns the `SequenceState` of a key and index.

        Returns
        -------
        Step
            For `sample` and `wait`.
        """
        with _evaluating(self.model):  # `_apply` may capture graphs anew
            self._apply(plan, sequences)
            inputs = StepInputs(plan, self.state, self.cache, self.layout.attention, self._prompt_lens, self._all_rows)
            hidden, output = self._run(inputs)
        return Step(plan, inputs, hidden, output, self.taps)

    def _apply(self, plan: Any, sequences: Callable[[int, int], Any]) -> None:
        """Do what comes before the forward pass: slots, blocks, states."""
        if len(plan.released):
            self.sampler.release(np.asarray(plan.released))
        new = [(slot, sequences(key, index)) for slot, key, index, _ in plan.new]
        if new:
            if self._graphs is not None and self._graphs.stale:
                # What was captured would use the old weights. On host the pools are in use and cannot be made small.
                self._graphs = DecodeGraphs(self) if torch.quartz.substrate() == "cuda" else None
            self.state.admit(new)
            self.sampler.admit(new)
            for slot, sequence in new:
                self._prompt_lens[slot] = sequence.num_prompt_tokens
                self._prompt_tops[slot] = sequence.request.params.prompt_logprobs or 0
        if len(plan.swap_out):
            self.cache.swap_out(np.asarray(plan.swap_out))
        if len(plan.swap_in):
            self.cache.swap_in(np.asarray(plan.swap_in))
        if len(plan.copies):
            self.cache.copy(np.asarray(plan.copies))
        if len(plan.state_ops):
            self.cache.state_ops(np.asarray(plan.state_ops), _ZERO_STATE)
        if len(plan.table_updates):
            self.state.update_tables(np.asarray(plan.table_updates))

    def _run(self, inputs: StepInputs) -> tuple[Tensor | None, Any]:
        """Run the base model; return the hidden states of the needed rows, None where there are none."""
        self.taps = {}
        self.run_rows += inputs.num_rows
        if inputs.saves:
            self.saved_rows += inputs.num_rows - inputs.num_out
        if self._graphs is not None and (replayed := self._graphs.run(inputs)) is not None:
            hidden, output, self.taps = replayed
            return hidden, output
        return self.forward(inputs.step, inputs.ids, inputs.positions)

    def forward(self, step: PagedStep, ids: Tensor, positions: Tensor) -> tuple[Tensor | None, Any]:
        """Run the base model over a step's rows.

        Parameters
        ----------
        step : PagedStep
        ids, positions : Tensor
            ``(1, rows)``.

        Returns
        -------
        tuple
            Hidden states of the needed rows, and what the base model returned; None and None where no row is needed.
        """
        self.taps = {}
        with self._overrides.running(step):
            try:
                output = call_base(self.layout.base, ids, positions)
            except StopLayer:
                return None, None
        hidden = output.last_hidden_state[0]
        if -1 in self._tapped:
            self.taps[-1] = hidden
        return hidden, output

    @torch.inference_mode()
    def sample(self, step: Step, bitmask: Tensor | None = None) -> None:
        """Launch drawing, verification, the update of the tables, drafting, and the copies to the host.

        Parameters
        ----------
        step : Step
            The latest one that was executed.
        bitmask : Tensor or None
            ``(rows, ceil(vocabulary / 32))``, int32: what each row that draws may draw; 1 + drafts rows a sequence.
        """
        inputs = step.inputs
        if inputs.spans:
            self._score_prompts(step)
        committed = None
        if len(inputs.sampling):
            committed = self._draw(step, bitmask)
        if self.drafter is not None:
            self._propose(step, committed)
        step.hidden = step.output = None
        step.taps = {}
        if torch.quartz.substrate() == "cuda":
            step.event = torch.quartz.Event()
            step.event.record()

    def _draw(self, step: Step, bitmask: Tensor | None) -> Tensor:
        """Draw, verify and write; return how many tokens each drawing sequence got."""
        inputs, state = step.inputs, self.state
        assert step.hidden is not None
        drafts = int(inputs.is_draft.sum())
        hidden = step.hidden
        if inputs.num_out != len(inputs.sample_rows):
            hidden = hidden.index_select(0, inputs.sample_index)
        logits = self.head(hidden, step.output)
        if inputs.saves or inputs.num_rows != len(inputs.sample_rows):
            before = inputs.lengths_before.index_select(0, inputs.sampling_index)
        else:
            before = inputs.lengths_before
        if drafts:
            row = upload(np.stack([inputs.sample_sequence, inputs.sample_offset]), self.device)
            positions = before.index_select(0, row[0]) + row[1]
            draft_tokens = state.drafts.view(-1).index_select(0, inputs.draft_index)
        else:
            positions, draft_tokens = before, None
        if bitmask is not None:
            bitmask = bitmask.to(self.device, non_blocking=True)
        logprobs, top_n = self.sampler.wants_logprobs(inputs.sample_slots)
        drawn = self.sampler.draw(
            logits,
            inputs.sample_slots,
            inputs.sample_places,
            positions,
            state.tokens,
            pending=self._pending(inputs, draft_tokens),
            bitmask=bitmask,
            logprobs=logprobs,
            top_n=top_n,
        )
        if draft_tokens is not None:
            from torch_quartz.ops import spec_verify

            verified = spec_verify(drawn.tokens, draft_tokens, inputs.cu_drafts)
            tokens, committed = verified.tokens, verified.committed
        else:
            tokens = drawn.tokens
            committed = (tokens >= 0).long()
        column = torch.where(tokens >= 0, positions, state.width - 1).clamp(max=state.width - 1)
        flat = inputs.sample_places * state.width + column
        state.tokens.view(-1).index_copy_(0, flat, tokens.clamp(min=0).to(torch.int32))
        places = self._sampling_places(inputs)
        state.lengths.index_copy_(0, places, (before + committed).clamp(max=state.max_model_len + 1))
        self.sampler.count(inputs.sample_slots, inputs.sample_places, tokens)
        if inputs.step.states is not None and drafts:
            whole = torch.ones(inputs.num_seqs, dtype=torch.int64, device=self.device)
            whole.index_copy_(0, inputs.sampling_index, committed)
            for runner in self._state_runners:
                runner.accept(inputs.step.states, whole)
        copies = {"tokens": tokens}
        if logprobs:
            copies["raw_logprobs"], copies["logprobs"] = drawn.raw_logprobs, drawn.logprobs
            if top_n:
                copies["top_ids"], copies["top_logprobs"] = drawn.top_ids, drawn.top_logprobs
        step.copies.update({name: _to_host(tensor) for name, tensor in copies.items()})
        return committed

    @staticmethod
    def _sampling_places(inputs: StepInputs) -> Tensor:
        if len(inputs.sampling) == inputs.num_seqs:
            return inputs.places_of_sequences
        return inputs.places_of_sequences.index_select(0, inputs.sampling_index)

    def _pending(self, inputs: StepInputs, draft_tokens: Tensor | None) -> Tensor | None:
        """Return the drafts before each row, which count as generated; None where no penalty looks at them."""
        if draft_tokens is None or not self.sampler.penalised(inputs.sample_slots):
            return None
        most = int(inputs.counts.max()) - 1
        first = (np.cumsum(inputs.counts - 1) - (inputs.counts - 1))[inputs.sample_sequence]
        number = np.arange(most)[None]
        before = number < inputs.sample_offset[:, None]
        index = np.where(before, first[:, None] + number, 0)
        both = upload(np.stack([index, before.astype(np.int64)]), self.device)
        return torch.where(both[1] != 0, draft_tokens[both[0]], -1)

    def _score_prompts(self, step: Step) -> None:
        """Compute how likely prompt tokens were, some rows at a time."""
        from torch_quartz.ops.sample import score_tokens

        inputs = step.inputs
        begin = 0
        assert step.hidden is not None
        for i, position, count in inputs.spans:
            slot = int(inputs.slot[i])
            top_n = int(self._prompt_tops[slot])
            parts: list[tuple] = []
            for piece in range(0, count, _PROMPT_ROWS):
                rows = min(_PROMPT_ROWS, count - piece)
                index = inputs.prompt_index[begin + piece : begin + piece + rows]
                logits = self.head(step.hidden.index_select(0, index), step.output)
                first = position + piece + 1
                targets = self.state.tokens[slot, first : first + rows].long()
                parts.append(tuple(map(_to_host, score_tokens(logits, targets, top_n))))
            begin += count
            step.prompt_copies.append((int(step.plan.key[i]), position, parts))

    def _propose(self, step: Step, committed: Tensor | None) -> None:
        """Run the drafter, and leave its drafts where the next step finds them."""
        from torch_quartz.engine.drafting import make_context

        assert self.drafter is not None
        context: DraftContext = make_context(self, step, committed)
        drafts, available, confidences = self.drafter.propose(context)
        state, inputs = self.state, step.inputs
        if len(inputs.sampling):
            places = self._sampling_places(inputs)
            chosen, lengths = drafts, context.lengths
            if len(inputs.sampling) != inputs.num_seqs:
                chosen = drafts.index_select(0, inputs.sampling_index)
                lengths = lengths.index_select(0, inputs.sampling_index)
            width = chosen.shape[1]
            state.drafts.index_copy_(0, places, chosen)
            column = lengths.unsqueeze(1) + torch.arange(width, device=self.device)
            flat = places.unsqueeze(1) * state.width + column.clamp(max=state.width - 1)
            state.tokens.view(-1).index_copy_(0, flat.view(-1), chosen.clamp(min=0).to(torch.int32).view(-1))
        step.copies["drafts"] = _to_host(drafts)
        step.copies["available"] = _to_host(available)
        if confidences is not None:
            step.copies["confidences"] = _to_host(confidences)

    def wait(self, step: Step) -> StepResult:
        """Return what a step drew; waits for its copies.

        Parameters
        ----------
        step : Step
            Sampled.
        """
        if step.event is not None:
            step.event.synchronize()
        inputs = step.inputs
        shape = (inputs.num_seqs, 1 + self.config.max_drafts)
        where = (inputs.sampling[inputs.sample_sequence], inputs.sample_offset)
        arrays = {name: tensor.numpy() for name, tensor in step.copies.items()}

        def spread(name: str, empty: float, dtype: Any) -> np.ndarray | None:
            values = arrays.get(name)
            if values is None:
                return None
            whole = np.full((*shape, *values.shape[1:]), empty, dtype)
            whole[where] = values
            return whole

        tokens = spread("tokens", -1, np.int32)
        drafts, available = arrays.get("drafts"), arrays.get("available")
        if drafts is not None:
            # Proposals for sequences that drew nothing stand for nothing.
            silent = np.ones(inputs.num_seqs, bool)
            silent[inputs.sampling] = False
            drafts, available = drafts.astype(np.int32), available.astype(np.int32)
            drafts[silent], available[silent] = -1, 0
        return StepResult(
            tokens if tokens is not None else np.full(shape, -1, np.int32),
            spread("raw_logprobs", -np.inf, np.float32),
            spread("logprobs", -np.inf, np.float32),
            spread("top_ids", -1, np.int64),
            spread("top_logprobs", -np.inf, np.float32),
            drafts,
            available,
            arrays.get("confidences"),
            [_joined(one) for one in step.prompt_copies],
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the model's embeddings of tokens."""
        return self.model.get_input_embeddings()(ids)


def _to_host(tensor: Tensor) -> Tensor:
    """Launch a copy to host memory; it is there when the step's event has passed."""
    if torch.quartz.substrate() == "host":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _joined(one: tuple) -> tuple:
    key, position, parts = one
    return (key, position, *(np.concatenate([part[i].numpy() for part in parts]) for i in range(3)))
