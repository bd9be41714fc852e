"""The table of step times for adaptive schedules."""

import itertools

import pytest
from test_faults import bytes_of, make, parameters, prompts, tiny_model
from torch_quartz.engine.step_times import fill


def test_table_from_some_rows():
    assert fill({1: 1.0, 3: 2.0}, 5) == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert fill({2: 1.0}, 3) == [1.0] * 4
    assert fill({1: 5.0, 2: 2.0, 4: 4.0}, 4) == [2.0, 2.0, 2.0, 3.0, 4.0]  # the first one was disturbed


@pytest.mark.parametrize("most", [{}, {"max_num_batched_tokens": 20}])
def test_measured_where_none_is_given(most):
    import random

    model, chance = tiny_model(), random.Random(3)
    asked, params = prompts(8, chance), [parameters(i) for i in range(8)]
    right = [bytes_of(output) for output in make(model).generate(asked, params, use_tqdm=False)]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    llm = make(model, speculative=speculative, **most)
    times = llm.llm_engine.config.speculative.step_times
    assert len(times) == 1 + most.get("max_num_batched_tokens", 16 * 4)
    assert all(0 < a <= b for a, b in itertools.pairwise(times))
    assert [bytes_of(output) for output in llm.generate(asked, params, use_tqdm=False)] == right
    llm.check()
