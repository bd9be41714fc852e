"""``Trainer`` and accelerate: the device they choose, their numbers, precision, and resumed runs."""

import pytest
import torch
import transformers_jobs as jobs


@pytest.mark.parametrize("name", list(jobs.TRAINING))
def test_training_equals_the_native_device(name, explicit_import):
    jobs.compare(f"train {name}")


def test_trainer_chooses_the_device(explicit_import):
    trainer = jobs.make_trainer("quartz")
    assert trainer.args.device == torch.device("quartz:0") and trainer.args.n_gpu == 1
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"quartz"}


def test_variable_chooses_the_device_and_the_cpu_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "quartz:0")
    assert jobs.make_trainer("quartz").args.device == torch.device("quartz:0")
    assert jobs.make_trainer("cpu").args.device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert jobs.make_trainer("quartz").args.device.type != "quartz"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision, explicit_import):
    trainer = jobs.make_trainer("quartz", max_steps=12, **{precision: True})
    assert trainer.accelerator.device.type == "quartz"
    assert (trainer.accelerator.scaler is not None) == (precision == "fp16")
    if precision == "fp16":
        assert trainer.accelerator.scaler._device == "quartz" and trainer.accelerator.scaler.is_enabled()
    dtypes = set()
    trainer.model.transformer.h[0].attn.c_proj.register_forward_hook(lambda *call: dtypes.add(call[2].dtype))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(torch.tensor(losses).isfinite()) and losses[-1] < losses[0]


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, explicit_import):
    """The model has dropout: the device's random state must come back with the checkpoint."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = jobs.make_trainer("quartz", tmp_path / "whole", **options)
    whole.train()
    assert (tmp_path / "whole" / "checkpoint-3").is_dir()
    torch.manual_seed(99)  # an unrelated program state
    resumed = jobs.make_trainer("quartz", tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, first), second in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert jobs.same_bits(first.detach().cpu(), second.detach().cpu()), name


def test_evaluate_and_predict(explicit_import):
    rows = jobs.rows_of_text(5)
    losses, predictions = [], []
    for device in ("quartz", "cpu"):
        trainer = jobs.make_trainer(device)
        losses.append(trainer.evaluate(rows)["eval_loss"])
        predictions.append(torch.as_tensor(trainer.predict(rows).predictions))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*predictions)


def test_accelerate_state_round_trip(tmp_path, explicit_import):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    assert accelerator.device.type == "quartz"
    model = accelerator.prepare(torch.nn.Linear(3, 3))
    torch.manual_seed(5)
    accelerator.save_state(tmp_path)
    drawn = torch.rand(4, device=accelerator.device)
    torch.nn.init.zeros_(model.weight)
    torch.manual_seed(6)
    accelerator.load_state(tmp_path)
    assert torch.equal(torch.rand(4, device=accelerator.device), drawn)
    assert model.weight.abs().sum() > 0
    AcceleratorState._reset_state(reset_partial_state=True)


def test_batch_size_is_reduced_after_out_of_memory():
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 2:
            torch.empty(2**60, dtype=torch.uint8, device="quartz")
        return batch_size

    assert train() == 2
    assert tried[0] == 8 and tried[-1] == 2 and tried == sorted(tried, reverse=True)


def test_dataloader_of_accelerate_pins_and_moves(explicit_import):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(jobs.rows_of_text(), batch_size=4, pin_memory=True))
    batches = list(loader)
    assert len(batches) == 4 and all(batch["input_ids"].device.type == "quartz" for batch in batches)
    AcceleratorState._reset_state(reset_partial_state=True)
