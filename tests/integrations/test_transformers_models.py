"""Forward, backward and generate of every architecture of the zoo: the values of the native device."""

import model_zoo
import pytest
import transformers_jobs as jobs


def test_the_installed_version_has_every_required_architecture():
    assert set(model_zoo.REQUIRED) <= set(model_zoo.available())


@pytest.mark.parametrize("name", [name for name in jobs.jobs() if name.startswith("model ")])
def test_model_equals_the_native_device(name):
    jobs.compare(name)
