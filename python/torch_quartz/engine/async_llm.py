"""`AsyncLLM`: outputs as they come, for programs with an event loop; the engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from torch_quartz.engine.llm import chat_prompt
from torch_quartz.engine.llm_engine import LLMEngine
from torch_quartz.engine.outputs import RequestOutput
from torch_quartz.engine.sampling_params import OutputKind, SamplingParams
from torch_quartz.engine.sequence import Request

_log = logging.getLogger(__name__)


class AsyncLLM:
    """A causal language model, served to asyncio tasks.

    Parameters
    ----------
    model, tokenizer, **options
        As of `LLM`.

    Examples
    --------
    >>> async with AsyncLLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
    ...     async for output in llm.generate("The sea is", SamplingParams(output_kind="delta")):
    ...         print(output.outputs[0].text, end="")
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any):
        self._start(LLMEngine.from_options(model, tokenizer=tokenizer, **options))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> AsyncLLM:
        """Serve an engine that exists; from now on only this object may use it."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._counter = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # of the engine's thread
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="torch-quartz engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._engine.factory.tokenizer

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yield outputs as `sampling_params.output_kind` says, the last one finished.

        A consumer that is slower than the engine gets fewer "cumulative" outputs, and all "delta" ones. Cancelling the
        task, or leaving the loop, aborts the request, whatever it is doing.

        Parameters
        ----------
        prompt : str, list of int or dict
            As `LLMEngine.add_request`.
        sampling_params : SamplingParams, optional
            The defaults if not given.
        request_id : str, optional
            A name that no unfinished request has; made up if not given.
        priority : int
            Lower ones first; needs ``policy="priority"``.

        Raises
        ------
        ValueError
            Where the request is refused.
        RuntimeError
            After `shutdown`.
        """
        # Tokenizing and compiling a grammar take time: neither the event loop nor the engine should wait for it.
        request = await asyncio.to_thread(
            self._engine.make_request, self._name(request_id), prompt, sampling_params, priority=priority
        )
        async for output in self._stream(request):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; the arguments are those of `LLM.chat`, the outputs those of `generate`."""
        options = {
            "tools": None if tools is None else list(tools),
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        prompt = await asyncio.to_thread(chat_prompt, self._engine.factory, messages, options)
        async for output in self.generate(prompt, sampling_params, request_id, priority=priority):
            yield output

    async def abort(self, request_id: str) -> bool:
        """End a request: its stream yields what it has, with reason "abort". False where it is not known."""
        return await self.call(lambda engine: engine.abort_request(request_id))

    async def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        """Return ``function(engine)``, run between two steps in the engine's thread (`metrics`, for example)."""
        return await asyncio.wrap_future(self._call(function))

    async def metrics(self) -> dict[str, Any]:
        """Return counts, rates and states of the engine."""
        return await self.call(LLMEngine.metrics)

    async def prometheus(self) -> str:
        """Return `metrics` in Prometheus' text format; needs the package prometheus-client."""
        return await self.call(LLMEngine.prometheus)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks."""
        await self.call(LLMEngine.reset_prefix_cache)

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return not self._closed and self._thread.is_alive()

    def shutdown(self) -> None:
        """Abort what is running, end the thread and wait for it; twice is fine."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- the caller's side

    def _name(self, request_id: str | None) -> str:
        return f"async-{next(self._counter)}" if request_id is None else request_id

    def _post(self, command: Callable[[], None]) -> None:
        with self._closing:  # nothing may be put behind the end of the queue
            if self._closed:
                raise RuntimeError("the engine was shut down")
            self._commands.put(command)

    def _call(self, function: Callable[[LLMEngine], Any]) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future

    async def _stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        stream = _Stream(asyncio.get_running_loop(), request.output_kind is OutputKind.DELTA)
        self._post(lambda: self._submit(request, stream))
        finished = False
        try:
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not finished and not stream.failed:
                # Behind the submission in the queue; by the stream, for the name may be another request's by then.
                with contextlib.suppress(RuntimeError):  # shut down: everything was aborted
                    self._post(lambda: self._leave(request.request_id, stream))

    # ---- the engine's thread

    def _submit(self, request: Request, stream: _Stream) -> None:
        try:
            self._engine.submit(request)
            self._streams[request.request_id] = stream
        except Exception as error:
            self._send({stream: [error]})

    def _leave(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _serve(self) -> None:
        engine = self._engine
        running = True
        while running or engine.has_unfinished_requests():
            try:
                if running:
                    running = self._obey()
                if engine.has_unfinished_requests():
                    self._deliver(engine.step())
            except BaseException as error:  # a fault of the engine itself: nobody may wait for ever
                _log.exception("the engine's loop failed")
                self._send({stream: [error] for stream in self._streams.values()})
                self._streams.clear()

    def _obey(self) -> bool:
        """Run the commands that are there, waiting for one where there is nothing else to do; False at the end."""
        wait = not self._engine.has_unfinished_requests()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                self._engine.abort_request(list(self._streams))
                return False
            command()
            wait = False

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        news: dict[_Stream, list[RequestOutput | BaseException]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its consumer has left
            news[stream] = [output]
            if output.finished:
                del self._streams[output.request_id]
        self._send(news)

    def _send(self, news: dict[_Stream, list[RequestOutput | BaseException]]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Any]]] = {}
        for stream, items in news.items():
            loops.setdefault(stream.loop, []).extend((stream, item) for item in items)
        for loop, pairs in loops.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)  # one wake-up a step
            except RuntimeError:  # the loop is closed, its consumers are gone
                gone = {stream for stream, _ in pairs}
                for name in [name for name, stream in self._streams.items() if stream in gone]:
                    self._leave(name, self._streams[name])


def _put_all(pairs: list[tuple[_Stream, Any]]) -> None:
    for stream, item in pairs:
        stream.put(item)


class _Stream:
    """What one consumer has yet to see; used in its event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delta: bool):
        self.loop = loop
        self.failed = False
        self._delta = delta
        self._items: deque[RequestOutput | BaseException] = deque()
        self._there = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        if self._items and not self._delta:
            self._items.clear()  # the new one says everything
        self._items.append(item)
        self._there.set()

    async def next(self) -> RequestOutput:
        while not self._items:
            self._there.clear()
            await self._there.wait()
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self.failed = True
            raise item
        return item
