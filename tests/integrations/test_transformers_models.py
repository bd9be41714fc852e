"""Forward, backward and generate of every architecture of the zoo: the values of the native device."""

import model_zoo
import pytest
import torch
import transformers_jobs as jobs


def test_the_installed_version_has_every_required_architecture():
    assert set(model_zoo.REQUIRED) <= set(model_zoo.available())


@pytest.mark.parametrize("name", [name for name in jobs.jobs() if name.startswith("model ")])
def test_model_equals_the_native_device(name):
    jobs.compare(name)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_training_with_dropout_follows_the_seed(name):
    model = model_zoo.build(name).to("quartz").train()
    inputs = {key: value.to("quartz") for key, value in model_zoo.case(name).inputs().items()}

    def step(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(**inputs).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    first, again, other = step(3), step(3), step(4)
    assert jobs.same_bits(first[0].cpu(), again[0].cpu())
    for gradient, repeated in zip(first[1:], again[1:], strict=True):  # CUDA adds some with atomics
        torch.testing.assert_close(gradient, repeated)
    assert not torch.equal(first[0], other[0]) and all(gradient.isfinite().all() for gradient in other)
    losses = torch.stack([step(seed)[0] for seed in range(20)])
    with torch.no_grad():
        assert (losses.mean() - model.eval()(**inputs).loss).abs() < 0.2 + 3 * losses.std()
