"""torch_quartz._C.engine: the binding of the scheduler. What it decides is tested in csrc/tests/test_scheduler*.cpp."""

import gc

import numpy as np
import pytest
import torch_quartz  # noqa: F401, loads the library
from torch_quartz._C import engine


def make(blocks=40, *, groups=None, **changes):
    values = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    values |= {"groups": groups or [engine.GroupSpec("full", num_blocks=blocks)], **changes}
    return engine.Scheduler(engine.SchedulerConfig(**values))


def row(plan, columns=1, token=5):
    """Return tokens as a device would: one for every sequence that draws."""
    tokens = np.full((plan.num_seqs, columns), -1, np.int32)
    tokens[plan.samples == 1, 0] = token
    return tokens


def drain(scheduler, columns=1, limit=1000):
    outputs = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        outputs.append(scheduler.update(plan.step_id, row(plan, columns)))
        scheduler.check()
        limit -= 1
        assert limit > 0
    return outputs


def test_a_request_from_the_queue_to_its_end():
    scheduler = make()
    scheduler.add_request(7, [1, 2, 3], max_tokens=3, stop_ids=[9])
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished) == (1, 0, True)
    plan = scheduler.schedule()
    assert (plan.step_id, plan.num_rows, plan.num_seqs) == (0, 3, 1)
    assert plan.key.dtype == np.int64
    assert {plan.slot.dtype, plan.start.dtype, plan.table_updates.dtype} == {np.dtype(np.int32)}
    assert plan.new == [(plan.slot[0], 7, 0, 0)]
    assert plan.table_updates.tolist() == [[0, plan.slot[0], 0, plan.table_updates[0, 3]]]
    assert [x.shape for x in (plan.copies, plan.swap_in, plan.swap_out, plan.state_ops)] == [(0, 3)] * 3 + [(0, 4)]
    output = scheduler.update(plan.step_id, np.array([[4]]))
    assert (output.key[0], output.index[0], output.num_tokens[0], output.finished[0]) == (7, 0, 1, 0)
    plan = scheduler.schedule()
    assert (plan.kind[0], plan.start[0], plan.query_len[0], plan.max_length[0]) == (1, -1, 1, 4)
    output = scheduler.update(plan.step_id, np.array([[9]], np.int32))
    assert (output.finished[0], output.stop_token[0]) == (1, 9)
    assert output.errors == []
    assert not scheduler.has_unfinished
    assert scheduler.schedule() is None
    scheduler.check()
    assert scheduler.stats()["groups"][0]["used"] == 0


def test_arrays_are_read_only_views_that_outlive_the_plan():
    scheduler = make()
    scheduler.add_request(1, np.arange(20, dtype=np.int32), max_tokens=50)
    plan = scheduler.schedule()
    lengths, updates = plan.query_len, plan.table_updates
    assert not lengths.flags.writeable
    assert lengths.base is not None
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 3
    scheduler.update(plan.step_id, row(plan))
    del plan
    gc.collect()
    for _ in range(20):
        other = scheduler.schedule()
        scheduler.update(other.step_id, row(other))
    assert lengths.tolist() == [20]
    assert updates[:, 2].tolist() == [0, 1]


def test_a_step_may_be_planned_before_the_tokens_of_the_last_one():
    scheduler = make(max_drafts=3)
    scheduler.add_request(1, [1, 2], max_tokens=20)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.drafts[0] == 3
    assert second.max_length[0] == 6
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        scheduler.schedule()
    with pytest.raises(ValueError, match=r"step_id.*\(0\).*got 1"):
        scheduler.update(second.step_id, row(second, 4))
    scheduler.update(first.step_id, row(first, 4), np.array([0]), np.zeros((1, 3), np.float32))
    tokens = np.array([[6, 7, -1, -1]])
    assert scheduler.update(second.step_id, tokens, available=[1]).num_tokens.tolist() == [2]
    third = scheduler.schedule()
    assert third.drafts.tolist() == [1]  # the host knows how many there are
    assert scheduler.stats()["drafts_accepted"] == 1


def test_samples_of_a_prompt():
    scheduler = make()
    scheduler.add_request(1, list(range(20)), max_tokens=2, n=3)
    plan = scheduler.schedule()
    assert plan.samples.tolist() == [0]
    scheduler.update(plan.step_id, row(plan))
    plan = scheduler.schedule()
    assert plan.index.tolist() == [0, 1, 2]
    assert [entry[2:] for entry in plan.forked] == [(1, 1), (1, 2)]
    assert {entry[1] for entry in plan.forked} == {entry[0] for entry in plan.new}
    assert plan.copies.shape == (2, 3)
    scheduler.update(plan.step_id, row(plan))
    drain(scheduler)


def test_nothing_could_be_drawn():
    scheduler = make()
    scheduler.add_request(1, [1, 2], max_tokens=5)
    scheduler.add_request(2, [3, 4], max_tokens=5)
    plan = scheduler.schedule()
    output = scheduler.update(plan.step_id, np.array([[-1], [8]], np.int32))
    assert output.finished.tolist() == [4, 0]
    ((key, index, reason),) = output.errors
    assert (key, index) == (1, 0)
    assert "NaN" in reason
    drain(scheduler)


def test_abort_and_finish_at_any_moment():
    scheduler = make()
    assert scheduler.abort(1) is False
    scheduler.finish(1, 0)
    scheduler.add_request(1, [1, 2], max_tokens=5, n=2)
    scheduler.add_request(2, [1, 2], max_tokens=5)
    plan = scheduler.schedule()
    assert scheduler.abort(1) is True
    assert scheduler.abort(1) is False
    scheduler.check()
    with pytest.raises(ValueError, match=r"key.*in flight.*got 1"):
        scheduler.add_request(1, [1], max_tokens=1)
    output = scheduler.update(plan.step_id, row(plan))
    assert output.finished.tolist() == [3, 0]
    assert output.num_tokens.tolist() == [0, 1]
    scheduler.finish(2, 0)
    assert not scheduler.has_unfinished
    scheduler.add_request(1, [1], max_tokens=1)
    drain(scheduler)
    assert scheduler.stats()["groups"][0]["used"] == 0


def test_prefix_cache_and_namespaces():
    scheduler = make()
    prompt = np.arange(40, dtype=np.int64)
    scheduler.add_request(1, prompt, max_tokens=1)
    drain(scheduler)
    for key, name, cached in ((2, b"", 32), (3, b"x", 0), (4, b"x\0", 0), (5, b"x", 32)):
        scheduler.add_request(key, prompt, max_tokens=1, namespace=name)
        plan = scheduler.schedule()
        assert plan.new[0][3] == cached
        scheduler.update(plan.step_id, row(plan))
    scheduler.reset_prefix_cache()
    scheduler.add_request(6, prompt, max_tokens=1)
    assert scheduler.schedule().new[0][3] == 0


def test_preemption_by_swap():
    scheduler = make(groups=[engine.GroupSpec("full", num_blocks=5, host_blocks=8)], preemption="swap")
    for key in range(2):
        scheduler.add_request(key, np.arange(30) + 50 * key, max_tokens=40)
    moved_out, moved_in = [], []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        moved_out += plan.swap_out[:, 2].tolist()
        moved_in += plan.swap_in[:, 2].tolist()
        scheduler.update(plan.step_id, row(plan))
        scheduler.check()
    assert moved_out
    assert moved_in == moved_out
    assert scheduler.stats()["swaps_in"] == scheduler.stats()["preemptions"]


def test_a_failed_step_is_repeated():
    scheduler = make()
    scheduler.add_request(1, list(range(20)), max_tokens=3)
    plan = scheduler.schedule()
    scheduler.update(plan.step_id, row(plan))
    plan = scheduler.schedule()
    scheduler.discard(plan.step_id)
    with pytest.raises(ValueError, match="step_id"):
        scheduler.discard(plan.step_id)
    assert scheduler.num_preempted == 1
    plan = scheduler.schedule()
    assert plan.released.tolist() == plan.slot.tolist()
    assert (plan.start[0], plan.query_len[0], plan.new[0][3]) == (16, 5, 16)
    scheduler.update(plan.step_id, row(plan))
    assert sum(int(output.num_tokens.sum()) for output in drain(scheduler)) == 1


def test_recurrent_states():
    scheduler = make(groups=[engine.GroupSpec("state", num_blocks=8)])
    scheduler.add_request(1, list(range(40)), max_tokens=1)
    plan = scheduler.schedule()
    block = plan.table_updates[0, 3]
    assert plan.state_ops.tolist() == [[engine.STATE_ZERO, 0, -1, block]]
    assert plan.query_len.tolist() == [32]  # to the end of a block, where the state can be kept
    scheduler.update(plan.step_id, row(plan))
    plan = scheduler.schedule()
    ((op, group, source, kept),) = plan.state_ops.tolist()
    assert (op, group, source) == (engine.STATE_COPY, 0, block)
    scheduler.update(plan.step_id, row(plan))
    scheduler.add_request(2, list(range(40)), max_tokens=1)
    plan = scheduler.schedule()
    assert plan.new[0][3] == 32
    assert plan.state_ops.tolist() == [[engine.STATE_COPY, 0, kept, plan.table_updates[0, 3]]]


REFUSED_REQUESTS = [
    ({"prompt": []}, r"prompt: must have at least one token, got 0"),
    ({"prompt": [0] * 128}, r"prompt: .*127.*got 128"),
    ({"prompt": [[1, 2]]}, r"prompt: must be an array of integers with 1 dimension, got 2 dimensions"),
    ({"prompt": [1.5]}, r"prompt: .*integers.*got dtype float64"),
    ({"prompt": "text"}, r"prompt: must be an array of integers"),
    ({"prompt": [1, -3]}, r"prompt\[1\]: must be a token id.*got -3"),
    ({"prompt": [2**31]}, r"prompt: must be integers of 32 bits, got 2147483648"),
    ({"max_tokens": 0}, r"max_tokens: must be at least 1, got 0"),
    ({"min_tokens": 9}, r"min_tokens: .*max_tokens = 5, got 9"),
    ({"n": 0}, r"n: .*got 0"),
    ({"priority": 1}, r"priority: .*fcfs.*got 1"),
    ({"drafts": 3}, r"drafts: .*max_drafts = 2, got 3"),
    ({"drafts": -1}, r"drafts: .*got -1"),
    ({"logits_from": 3}, r"logits_from: .*3 tokens, got 3"),
    ({"logits_from": -2}, r"logits_from: .*got -2"),
    ({"stop_ids": [-1]}, r"stop_ids: .*got -1"),
    ({"stop_ids": [0.5]}, r"stop_ids: .*float64"),
    ({"key": 1}, r"key: .*got 1"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_REQUESTS)
def test_a_bad_request_is_refused_alone(change, message):
    scheduler = make(max_drafts=2)
    scheduler.add_request(1, [1], max_tokens=1)
    arguments = {"key": 2, "prompt": [1, 2, 3], "max_tokens": 5, **change}
    with pytest.raises(ValueError, match=r"quartz: Scheduler\.add_request: " + message):
        scheduler.add_request(arguments.pop("key"), arguments.pop("prompt"), **arguments)
    assert scheduler.num_waiting == 1
    drain(scheduler, 3)


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers():
    scheduler = make(blocks=4)
    with pytest.raises(ValueError, match=r"prompt: can never fit.*64 tokens, got 65"):
        scheduler.add_request(1, [0] * 65, max_tokens=1)
    assert scheduler.max_sequence_tokens == 65
    scheduler.add_request(1, [0] * 60, max_tokens=60)
    outputs = drain(scheduler)
    assert sum(int(output.num_tokens.sum()) for output in outputs) == 5
    assert outputs[-1].finished.tolist() == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, r"block_size: .*got 0"),
        ({"max_num_seqs": 0}, r"max_num_seqs: .*got 0"),
        ({"max_model_len": 1}, r"max_model_len: .*got 1"),
        ({"policy": "random"}, r'policy: must be "fcfs" or "priority", got "random"'),
        ({"preemption": "never"}, r'preemption: must be "recompute" or "swap", got "never"'),
        ({"groups": [engine.GroupSpec("full")]}, r"groups\[0\]\.num_blocks: .*got 0"),
        (
            {"groups": [engine.GroupSpec("sliding", 64, 4)]},
            r"groups\[0\]\.num_blocks: a window of 64 .*5 blocks.*got 4",
        ),
    ],
)
def test_a_bad_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_a_group_has_a_known_kind():
    with pytest.raises(ValueError, match=r'GroupSpec: kind: .*got "ring"'):
        engine.GroupSpec("ring")
    group = engine.GroupSpec("full")
    group.num_blocks = 12
    group.kind = "sliding"
    group.window = 8
    assert repr(group) == "GroupSpec(kind='sliding', window=8, num_blocks=12, host_blocks=0)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [[5, -1, -1], [5, -1, -1]]}, r"tokens: .*1 sequences.*got 2"),
        ({"tokens": [[5]]}, r"tokens: .*3 columns, got 1"),
        ({"tokens": [5]}, r"tokens: .*2 dimensions, got 1 dimensions"),
        ({"tokens": [[5, 6, -1]]}, r"tokens\[0, 1\]: .*at most 1 tokens.*got 6"),
        ({"tokens": [[5.0, -1, -1]]}, r"tokens: .*float64"),
        ({"available": [1, 2]}, r"available: .*got 2"),
        ({"confidences": [[0.5]]}, r"confidences: .*\(1, 2\), got \(1, 1\)"),
        ({"step_id": 4}, r"step_id: .*got 4"),
    ],
)
def test_bad_results_change_nothing(arguments, message):
    scheduler = make(max_drafts=2)
    scheduler.add_request(1, [1, 2], max_tokens=5)
    plan = scheduler.schedule()
    good = {"step_id": plan.step_id, "tokens": [[5, -1, -1]]}
    with pytest.raises(ValueError, match=r"quartz: Scheduler\.update: " + message):
        scheduler.update(**(good | arguments))
    assert scheduler.update(**good).num_tokens.tolist() == [1]


def test_adaptive_drafts_stop_where_they_do_not_pay():
    scheduler = make(max_drafts=4, adaptive_drafts=True)
    scheduler.set_step_times([1.0 + 0.5 * rows for rows in range(65)])  # every row costs half of an empty step
    scheduler.add_request(1, [1, 2], max_tokens=100)
    planned = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        planned.append(int(plan.drafts[0]))
        scheduler.update(plan.step_id, row(plan, 5), available=[4], confidences=np.full((1, 4), 0.01, np.float32))
    assert sum(planned[2:]) == 0
