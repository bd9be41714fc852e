"""`AsyncLLM`: streams, cancelled tasks, shutdown. On a runner without a model."""

import asyncio
import random
import threading
import time

import pytest
from fake_runner import expected, make_engine
from torch_quartz import AsyncLLM, SamplingParams
from words import word_tokenizer


def run(function, engine=None):
    """Run ``function(llm)`` in a fresh event loop, then check that nothing is left."""
    engine = engine or make_engine(tokenizer=word_tokenizer())

    async def main():
        async with AsyncLLM.from_engine(engine) as llm:
            result = await asyncio.wait_for(function(llm), 60)
            while (await llm.metrics())["num_requests"]:
                await asyncio.sleep(0.001)
            await llm.call(lambda engine: engine.check())
            return result

    result = asyncio.run(main())
    assert not engine.has_unfinished_requests()
    return result


async def collect(stream):
    return [output async for output in stream]


PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_streams_of_many_tasks(kind):
    async def main(llm):
        async def one(number):
            params = PARAMS.clone(seed=number, output_kind=kind)
            outputs = await collect(llm.generate([3 + number], params))
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            pieces = [output.outputs[0] for output in outputs]
            if kind == "delta":
                tokens = [token for piece in pieces for token in piece.token_ids]
                text = "".join(piece.text for piece in pieces)
            else:
                tokens, text = pieces[-1].token_ids, pieces[-1].text
            assert tokens == expected([3 + number], params, number, 0)[0]
            assert text == llm.tokenizer.decode(tokens, skip_special_tokens=True)
            return len(outputs)

        counts = await asyncio.gather(*(one(i) for i in range(40)))
        assert kind != "final_only" or max(counts) == 1

    run(main)


def test_a_stream_gives_tokens_as_they_come():
    async def main(llm):
        steps = threading.Semaphore(3)  # the engine goes on when the last output has been seen
        llm._engine.runner.faults["execute"] = lambda plan: steps.acquire(timeout=10)
        lengths = []
        async for output in llm.generate([3], PARAMS):
            lengths.append(len(output.outputs[0].token_ids))
            steps.release()
        assert lengths == sorted(lengths) and lengths[-1] == 12 and len(lengths) >= 6

    run(main)


def test_a_slow_consumer_loses_no_delta():
    async def main(llm):
        tokens = []
        async for output in llm.generate([3], PARAMS.clone(output_kind="delta")):
            await asyncio.sleep(0.003)
            tokens += output.outputs[0].token_ids
        assert tokens == expected([3], PARAMS, 3, 0)[0]
        outputs = []
        async for output in llm.generate([3], PARAMS):
            await asyncio.sleep(0.003)
            outputs.append(output)
        assert outputs[-1].outputs[0].token_ids == tokens and len(outputs) <= len(tokens)

    run(main)


def test_refused_requests_raise():
    async def main(llm):
        llm._engine.runner.faults["execute"] = lambda plan: time.sleep(0.01)  # the first one is not to end too soon
        with pytest.raises(ValueError, match="at least one token"):
            await collect(llm.generate([], PARAMS))
        stream = llm.generate([3], PARAMS.clone(max_tokens=60), "name")
        await anext(stream)
        with pytest.raises(ValueError, match="request_id"):
            await collect(llm.generate([3], PARAMS, "name"))
        await stream.aclose()
        return (await collect(llm.generate([3], PARAMS, "other")))[-1]

    assert run(main).finished


def test_chat():
    async def main(llm):
        outputs = await collect(llm.chat([{"role": "user", "content": "w5"}], PARAMS))
        assert outputs[-1].prompt_token_ids == [5, 63]
        with pytest.raises(ValueError, match="no such role"):
            await collect(llm.chat([{"role": "bad", "content": "w5"}], PARAMS))

    run(main)


def test_cancelled_tasks_free_their_places():
    """Case G7: half of the clients vanish at random moments; the others' tokens do not change."""

    async def main(llm):
        chance = random.Random(11)

        async def one(number):
            params = PARAMS.clone(seed=number, max_tokens=30)
            outputs = await collect(llm.generate([3 + number % 60] * (1 + number % 20), params))
            return outputs[-1].outputs[0].token_ids

        for _ in range(10):
            tasks = [asyncio.create_task(one(i)) for i in range(24)]
            victims = chance.sample(range(24), 12)
            for victim in victims:
                await asyncio.sleep(chance.choice((0, 0, 0.001, 0.003)))
                tasks[victim].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for i, result in enumerate(results):
                if isinstance(result, asyncio.CancelledError):
                    assert i in victims
                    continue
                params = PARAMS.clone(max_tokens=30)
                assert result == expected([3 + i % 60] * (1 + i % 20), params, i, 0, 64)[0]

    run(main, make_engine(num_blocks=24))


def test_leaving_the_loop_aborts():
    async def main(llm):
        llm._engine.runner.faults["execute"] = lambda plan: time.sleep(0.01)
        stream = llm.generate([3], PARAMS.clone(max_tokens=None))
        async for _ in stream:
            break
        await stream.aclose()
        while (await llm.metrics())["aborted_requests"] != 1:
            await asyncio.sleep(0.001)

    run(main)


def test_abort_by_name():
    async def main(llm):
        llm._engine.runner.faults["execute"] = lambda plan: time.sleep(0.01)
        outputs = []
        async for output in llm.generate([3], PARAMS.clone(max_tokens=60), "name"):
            outputs.append(output)
            if len(outputs) == 1:
                assert await llm.abort("name")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert not await llm.abort("name")

    run(main)


def test_errors_of_a_request_reach_its_stream_alone():
    async def main(llm):
        bad, good = await asyncio.gather(collect(llm.generate([2], PARAMS)), collect(llm.generate([3], PARAMS)))
        assert "no token could be drawn" in bad[-1].error
        assert good[-1].error is None
        assert (await llm.metrics())["failed_requests"] == 1

    run(main, make_engine(nan=2))


def test_a_broken_engine_does_not_leave_anyone_waiting():
    async def main(llm):
        def broken():
            llm._engine.step = original
            raise RuntimeError("the loop itself broke")

        original = llm._engine.step
        llm._engine.step = broken
        with pytest.raises(RuntimeError, match="the loop itself broke"):
            await collect(llm.generate([3], PARAMS))
        assert (await collect(llm.generate([3], PARAMS)))[-1].error is None

    run(main)


def test_shutdown_ends_streams_and_refuses_new_ones():
    engine = make_engine()

    async def main():
        llm = AsyncLLM.from_engine(engine)
        assert llm.is_running
        engine.runner.faults["execute"] = lambda plan: time.sleep(0.01)
        stream = llm.generate([3], PARAMS.clone(max_tokens=60, output_kind="delta"))
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        llm.shutdown()  # twice is fine
        rest = await collect(stream)
        assert rest[-1].finished
        with pytest.raises(RuntimeError, match="shut down"):
            await collect(llm.generate([3], PARAMS))
        assert not llm.is_running

    threads = threading.active_count()
    asyncio.run(main())
    engine.check()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if "torch-quartz" in thread.name]


def test_a_dead_event_loop_does_not_stop_the_others():
    """The program of one client ends without a word; another loop goes on, and the blocks come back."""
    engine = make_engine()
    engine.runner.faults["execute"] = lambda plan: time.sleep(0.01)
    llm = AsyncLLM.from_engine(engine)
    loop = asyncio.new_event_loop()
    stream = llm.generate([3], PARAMS.clone(max_tokens=None))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def other():
        outputs = await collect(llm.generate([3], PARAMS))
        while (await llm.metrics())["num_requests"]:
            await asyncio.sleep(0.001)
        return outputs

    assert asyncio.run(other())[-1].outputs[0].token_ids == expected([3], PARAMS, 3, 0)[0]
    llm.shutdown()
    engine.check()
