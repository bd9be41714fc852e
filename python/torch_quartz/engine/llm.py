"""`LLM`: prompts in, texts out, in one call."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_quartz.engine.chat import for_template, is_conversation
from torch_quartz.engine.llm_engine import LLMEngine
from torch_quartz.engine.outputs import CompletionOutput, RequestOutput
from torch_quartz.engine.requests import RequestFactory
from torch_quartz.engine.sampling_params import OutputKind, SamplingParams
from torch_quartz.engine.sequence import Request


class LLM:
    """A causal language model of Transformers, served.

    Parameters
    ----------
    model : str, path or Module
        A folder, a name of the hub, or a module. The weights of a module may change between calls; then call
        `reset_prefix_cache`.
    tokenizer : str, path or object, optional
        By default that of `model`. A module without one is served with token ids.
    **options
        Fields of `EngineConfig`: device, dtype, max_model_len, max_num_seqs, max_num_batched_tokens, memory_fraction,
        kv_cache_bytes, block_size, enable_prefix_caching, speculative, enforce_eager, seed, and more.

    Examples
    --------
    >>> llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", device="quartz")
    >>> llm.generate(["The sea is"], SamplingParams(temperature=0.8, seed=7, max_tokens=16))[0].outputs[0].text
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any):
        self._start(LLMEngine.from_options(model, tokenizer=tokenizer, **options))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Serve an engine that exists."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._counter = itertools.count()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.llm_engine.factory.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None."""
        return self.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return one finished output for each, in their order.

        A prompt that cannot be served (too long, ids of no token, a grammar that does not compile) has an output with
        ``error``; the others are served.

        Parameters
        ----------
        prompts : str, list of int, dict, or a list of these
            Texts, token ids, or dicts as `RequestFactory.make` takes them.
        sampling_params : SamplingParams or list, optional
            For all prompts, or one for each. Prompts without a seed draw different ones; identical prompts with one
            seed get identical outputs.
        use_tqdm : bool
            Whether to show progress.
        priority : list of int, optional
            One for each prompt, lower ones first; needs ``policy="priority"``.

        Raises
        ------
        ValueError
            Where there are not as many parameters or priorities as prompts; nothing has run.
        """
        prompts = _listed(prompts)
        engine = self.llm_engine

        def make(number: int, params: SamplingParams | None, rank: int) -> Request:
            return engine.make_request(
                self._name(), prompts[number], params, priority=rank, output_kind=OutputKind.FINAL_ONLY
            )

        return self._run(len(prompts), sampling_params, priority, use_tqdm, make)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the tokenizer's chat template; otherwise as `generate`.

        Parameters
        ----------
        messages : list of dict, or a list of those
            One conversation, or several.
        sampling_params, use_tqdm, priority
            As in `generate`.
        tools : list of dict, optional
            JSON schemas of the tools that the template describes to the model.
        chat_template : str, optional
            In place of the tokenizer's.
        add_generation_prompt, continue_final_message : bool
            Whether an answer begins, or the last message goes on.
        chat_template_kwargs : dict, optional
            Further variables of the template.
        """
        conversations = [messages] if is_conversation(messages) else list(messages)
        options = {
            "tools": None if tools is None else list(tools),
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        engine = self.llm_engine

        def make(number: int, params: SamplingParams | None, rank: int) -> Request:
            prompt = chat_prompt(engine.factory, conversations[number], options)
            return engine.make_request(self._name(), prompt, params, priority=rank, output_kind=OutputKind.FINAL_ONLY)

        return self._run(len(conversations), sampling_params, priority, use_tqdm, make)

    def validate(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None) -> None:
        """Raise the ValueError of the first prompt that `generate` would refuse; nothing runs."""
        prompts = _listed(prompts)
        for prompt, params in zip(prompts, _one_each("sampling_params", sampling_params, len(prompts)), strict=True):
            self.llm_engine.make_request("validate", prompt, params)

    def metrics(self) -> dict[str, Any]:
        """Return counts, rates and states of the engine; see docs/serving.md."""
        return self.llm_engine.metrics()

    def prometheus(self) -> str:
        """Return `metrics` in Prometheus' text format; needs the package prometheus-client."""
        return self.llm_engine.prometheus()

    def memory_report(self) -> dict[str, Any]:
        """Return what takes memory on the device, in bytes."""
        return self.llm_engine.memory_report()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks: keys and values of old weights, for example."""
        self.llm_engine.reset_prefix_cache()

    def check(self) -> None:
        """Raise an error where a block, a slot or a request is lost."""
        self.llm_engine.check()

    def _name(self) -> str:
        return str(next(self._counter))

    def _run(
        self,
        count: int,
        sampling_params: Any,
        priority: Sequence[int] | None,
        use_tqdm: bool,
        make: Callable[[int, SamplingParams | None, int], Request],
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        params = _one_each("sampling_params", sampling_params, count)
        ranks = [0] * count if priority is None else _one_each("priority", list(priority), count)
        if engine.num_unfinished_requests:
            raise RuntimeError(
                f"the engine has {engine.num_unfinished_requests} unfinished requests of another caller: "
                "finish them with LLMEngine.step or end them with abort_request first"
            )
        outputs: list[RequestOutput | None] = [None] * count
        numbers: dict[str, int] = {}
        bar = _Progress(count, use_tqdm)
        try:
            for number in range(count):
                try:
                    request = make(number, params[number], ranks[number])
                    engine.submit(request)
                    numbers[request.request_id] = number
                except ValueError as error:
                    outputs[number] = _failed(self._name(), params[number], error)
                    bar.add(outputs[number])
            while engine.has_unfinished_requests():
                for output in engine.step():
                    number = numbers.pop(output.request_id, None)
                    if number is not None:
                        outputs[number] = output
                        bar.add(output)
        except BaseException:
            engine.abort_request(list(numbers))
            raise
        finally:
            bar.close()
        return outputs


def chat_prompt(factory: RequestFactory, messages: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a conversation as a prompt of token ids; ValueError where there is no template or it refuses."""
    tokenizer = factory.tokenizer
    if tokenizer is None:
        raise ValueError("messages must not be given where the engine has no tokenizer")
    if not options.get("chat_template") and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat_template must be given where the tokenizer has none")
    conversation = for_template(messages)
    try:
        return {"prompt_token_ids": factory.apply_chat_template(conversation, **options)}
    except ValueError:
        raise
    except Exception as error:  # a template may raise anything
        raise ValueError(f"chat_template: {type(error).__name__}: {error}") from error


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # an array or tensor, also of rows
    if prompts and all(isinstance(prompt, numbers.Integral) for prompt in prompts):
        return [prompts]  # one prompt of token ids
    return prompts


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} must be one for all prompts or one for each of the {count}, got {len(values)}")
    return list(values)


def _failed(request_id: str, params: SamplingParams | None, error: ValueError) -> RequestOutput:
    n = params.n if isinstance(params, SamplingParams) else 1
    samples = [CompletionOutput(index, finish_reason="error", error=str(error)) for index in range(n)]
    return RequestOutput(request_id, None, [], samples, finished=True)


class _Progress:
    """A bar of finished prompts with the rate of tokens, or nothing."""

    def __init__(self, count: int, shown: bool):
        self._bar = None
        self._tokens = 0
        if shown and count:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=count, desc="prompts", dynamic_ncols=True)

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._tokens += sum(len(sample.token_ids) for sample in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
