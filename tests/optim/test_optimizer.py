"""TieredAdamW is torch.optim.AdamW, wherever the states live."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim.rig import SHAPES, Rig, everywhere, file_store, initial_values, mixed, random_grads, rig

from infinity.errors import CheckpointError, ConfigError, TraceError
from infinity.kinds import State, Tier
from infinity.optim.loss_scale import LossScale

NAMES = [name for unit in SHAPES for name in unit]


class TorchTwin:
    """torch.optim.AdamW on fp32 masters of the same parameters, gradients rounded as the engine gets them."""

    def __init__(self, dtype: torch.dtype, decayed: set[str], **options: float) -> None:
        self.params = {name: torch.nn.Parameter(value.float()) for name, value in initial_values(SHAPES, dtype).items()}
        self.optimizer = torch.optim.AdamW(two_groups(self.params, decayed), **options)

    def backward(self, grads: dict[str, torch.Tensor]) -> None:
        for name, grad in grads.items():
            param = self.params[name]
            param.grad = grad.float() if param.grad is None else param.grad + grad.float()

    def clip(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_([p for p in self.params.values() if p.grad is not None], max_norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def two_groups(params, decayed: set[str]):
    return [
        {"params": [p for name, p in params.items() if name in decayed], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for name, p in params.items() if name not in decayed], "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]


def assert_masters_match(r: Rig, twin: TorchTwin, dtype: torch.dtype) -> None:
    masters, params = r.values(State.MASTER), r.values(State.PARAM)
    for name in NAMES:
        torch.testing.assert_close(masters[name], twin.params[name].detach(), rtol=2e-6, atol=2e-7)
        assert torch.equal(params[name], masters[name].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [mixed, everywhere(Tier.HBM)], ids=["nvme and cpu", "hbm"])
def test_fifty_steps_are_torchs(place, dtype: torch.dtype, tmp_path):
    """Two groups, a scheduler, clipping, accumulation, and parameters that get no gradient in some steps."""
    decayed = {"embed", "0.up", "1.up", "head"}
    twin = TorchTwin(dtype, decayed, lr=1e-2)
    with file_store(tmp_path) as open_store, rig(place, dtype=dtype, grad_dtype=torch.float32, open_store=open_store) as r:
        optimizer = r.optimizer(two_groups(r.params, decayed), lr=1e-2)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-2], total_steps=51) for o in (optimizer, twin.optimizer)]
        for step in range(50):
            missing = ["0.bias", "1.up"] if step % 3 == 1 else ["embed"] if step % 7 == 2 else []
            for micro in range(1 + step % 2):
                grads = random_grads(SHAPES, dtype, 2 * step + micro, missing)
                r.backward(grads)
                twin.backward(grads)
            norm, expected = optimizer.clip_grad_norm_(20.0), twin.clip(20.0)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
            optimizer.step()
            twin.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        assert_masters_match(r, twin, dtype)
        expected_counts = {name: int(twin.optimizer.state[param]["step"]) for name, param in twin.params.items()}
        assert optimizer.step_counts() == expected_counts
        assert expected_counts["0.bias"] < expected_counts["0.norm"] == 50


@pytest.mark.parametrize("tier", list(Tier))
def test_fp16_with_loss_scaling_is_fp32_arithmetic_on_the_true_gradients(tier: Tier):
    twin = TorchTwin(torch.float16, set(), lr=1e-2)
    with rig(everywhere(tier), dtype=torch.float16) as r:
        scale = LossScale(initial=1024.0, growth_interval=2)
        optimizer = r.optimizer(two_groups(r.params, set()), lr=1e-2, loss_scale=scale, max_grad_norm=5.0)
        for step in range(6):
            true = random_grads(SHAPES, torch.float16, step)
            scaled = {name: (grad.float() * scale.value / 64).half() for name, grad in true.items()}
            twin.backward({name: grad.float() / scale.value for name, grad in scaled.items()})
            twin.clip(5.0)
            twin.step()
            scale.scale(torch.zeros(()))
            r.backward(scaled)
            optimizer.step()
        assert scale.value == 1024.0 * 2**3
        assert_masters_match(r, twin, torch.float16)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tier", list(Tier))
def test_a_step_with_inf_or_nan_changes_nothing(tier: Tier, bad: float):
    with rig(everywhere(tier), dtype=torch.float16) as r:
        scale = LossScale(initial=1024.0)
        optimizer = r.optimizer(loss_scale=scale)
        grads = random_grads(SHAPES, torch.float16, 0)
        scale.scale(torch.zeros(()))
        r.backward(grads)
        optimizer.step()
        before = {state: r.values(state) for state in (State.PARAM, State.MASTER, State.EXP_AVG, State.EXP_AVG_SQ)}
        counts = optimizer.step_counts()
        grads["1.up"].view(-1)[777] = bad
        scale.scale(torch.zeros(()))
        r.backward(grads)
        optimizer.step()
        for state, values in before.items():
            after = r.values(state)
            assert all(torch.equal(after[name], value) for name, value in values.items())
        assert optimizer.step_counts() == counts and optimizer.skipped_steps == 1 and scale.value == 512.0
        assert r.grads.is_empty()


def test_without_loss_scaling_a_skipped_step_is_said_aloud():
    with rig(everywhere(Tier.CPU)) as r:
        optimizer = r.optimizer()
        r.backward({"0.bias": torch.full((120,), math.nan)})
        with pytest.warns(RuntimeWarning, match="norm of the gradients is nan: this step was skipped"):
            optimizer.step()


def test_an_unscaled_fp16_backward_is_refused():
    with rig(everywhere(Tier.CPU), dtype=torch.float16) as r:
        optimizer = r.optimizer(loss_scale=LossScale())
        optimizer.step()  # nothing arrived: nothing to refuse
        r.backward(random_grads(SHAPES, torch.float16, 0))
        with pytest.raises(TraceError, match="not scaled"):
            optimizer.step()


def test_clipping_twice_compounds_as_torchs():
    twin = TorchTwin(torch.float32, set(), lr=1e-2)
    with rig(everywhere(Tier.CPU)) as r:
        optimizer = r.optimizer(two_groups(r.params, set()), lr=1e-2, max_grad_norm=2.0)
        grads = random_grads(SHAPES, torch.float32, 0)
        r.backward(grads)
        twin.backward(grads)
        for max_norm in (5.0, 3.0):
            torch.testing.assert_close(optimizer.clip_grad_norm_(max_norm), twin.clip(max_norm))
        twin.clip(2.0)
        optimizer.step()
        twin.step()
        assert_masters_match(r, twin, torch.float32)


def test_gradients_after_clipping_are_refused():
    with rig(everywhere(Tier.CPU)) as r:
        optimizer = r.optimizer()
        r.backward(random_grads(SHAPES, torch.float32, 0))
        optimizer.clip_grad_norm_(1.0)
        r.backward(random_grads(SHAPES, torch.float32, 1))
        with pytest.raises(TraceError, match="after the last backward"):
            optimizer.step()
        optimizer.zero_grad()
        r.backward(random_grads(SHAPES, torch.float32, 1))
        optimizer.step()


def test_a_run_that_resumes_step_counts_goes_on_as_if_never_stopped():
    def train(r: Rig, optimizer, steps: range) -> None:
        for step in steps:
            r.backward(random_grads(SHAPES, torch.float32, step, missing=["embed"] if step == 1 else []))
            optimizer.step()

    with rig(everywhere(Tier.CPU)) as straight, rig(everywhere(Tier.CPU)) as stopped:
        train(straight, straight.optimizer(), range(4))
        first = stopped.optimizer()
        train(stopped, first, range(2))
        by_name, by_state_dict = stopped.optimizer(), stopped.optimizer()
        by_name.load_step_counts(first.step_counts())
        by_state_dict.load_state_dict(copy.deepcopy(first.state_dict()))
        assert by_name.step_counts() == by_state_dict.step_counts() == first.step_counts()
        train(stopped, by_name, range(2, 4))
        expected = straight.values()
        assert all(torch.equal(value, expected[name]) for name, value in stopped.values().items())


def test_state_dicts_with_moments_and_unknown_names_are_refused():
    twin = TorchTwin(torch.float32, set(), lr=1e-2)
    twin.backward(random_grads(SHAPES, torch.float32, 0))
    twin.step()
    with rig(everywhere(Tier.CPU)) as r:
        with pytest.raises(CheckpointError, match=r"exp_avg, exp_avg_sq.*engine\.load"):
            r.optimizer(two_groups(r.params, set())).load_state_dict(twin.optimizer.state_dict())
        with pytest.raises(CheckpointError, match="'ghost'"):
            r.optimizer().load_step_counts({"ghost": 3})


def test_hooks_and_closures_work_as_on_any_torch_optimizer():
    with rig(everywhere(Tier.CPU)) as r:
        optimizer = r.optimizer()
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure() -> float:
            assert torch.is_grad_enabled()
            r.backward(random_grads(SHAPES, torch.float32, 0))
            return 3.5

        assert optimizer.step(closure) == 3.5
        assert seen == ["before", "after"] and set(optimizer.step_counts().values()) == {1}


def test_what_is_not_offered_is_refused_by_name():
    with rig(everywhere(Tier.CPU)) as r:
        params = list(r.params.values())
        with pytest.raises(ConfigError, match="amsgrad is not offered"):
            r.optimizer([{"params": params, "amsgrad": True}])
        with pytest.raises(ConfigError, match="lr is -1"):
            r.optimizer(lr=-1)
        with pytest.raises(ConfigError, match="betas"):
            r.optimizer(betas=(0.9, 1.0))
        with pytest.raises(ConfigError, match=r"shape \(3, 4\).*named_parameters"):
            r.optimizer([torch.nn.Parameter(torch.zeros(3, 4))])
        with pytest.raises(TraceError, match="set_to_none"):
            r.optimizer().zero_grad(set_to_none=False)


def test_parameters_outside_the_groups_get_no_update():
    with rig(everywhere(Tier.CPU)) as r:
        before = r.values()
        optimizer = r.optimizer([r.params["head"]], lr=1e-2)
        r.backward(random_grads(SHAPES, torch.float32, 0))
        optimizer.step()
        after = r.values()
        assert [name for name in NAMES if not torch.equal(before[name], after[name])] == ["head"]


def test_a_tensor_learning_rate_is_read_at_the_step():
    with rig(everywhere(Tier.CPU)) as r:
        optimizer = r.optimizer(lr=torch.tensor(0.0), weight_decay=0.0)
        before = r.values()
        r.backward(random_grads(SHAPES, torch.float32, 0))
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in r.values().items())
        optimizer.param_groups[0]["lr"] = 0.1
        r.backward(random_grads(SHAPES, torch.float32, 0))
        optimizer.step()
        assert not torch.equal(r.values()["embed"], before["embed"])
