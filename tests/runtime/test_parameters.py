"""A parameter under the engine looks like a parameter, and is never mistaken for its values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from infinity.errors import CapacityError, TraceError
from infinity.runtime.hooks import Hooks
from tests.runtime.in_memory import attach

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


def build():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(3)])


@pytest.fixture
def model():
    return build()


@pytest.fixture
def attached(model):
    return attach(model)


def test_metadata_is_the_parameters_own(model, attached):
    plain = build()
    for (name, ours), (_, param) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(ours, nn.Parameter), name
        assert (ours.shape, ours.size(), ours.numel(), ours.dim(), ours.ndim) == (param.shape, param.size(), param.numel(), param.dim(), param.ndim)
        assert (ours.dtype, ours.device, ours.layout, ours.nbytes) == (param.dtype, param.device, param.layout, param.nbytes)
        assert (ours.requires_grad, ours.is_leaf, ours.grad_fn, ours.grad) == (True, True, None, None)
        assert (ours.is_floating_point(), ours.is_complex(), ours.is_cuda, len(ours)) == (True, False, False, len(param))
        assert hash(ours) == id(ours) and ours in {ours}
        assert torch.zeros_like(ours).shape == param.shape and not torch.zeros_like(ours).any()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_at_rest_it_holds_one_element(model, attached):
    weight = model[0][1].weight
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 4
        assert weight.isnan().all()


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: p.norm(),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.T,
        lambda p: p.tolist(),
        lambda p: p.sum().item(),
        lambda p: p[0],
        lambda p: p.clone(),
        lambda p: p.cpu(),
        lambda p: p.numpy(),
        lambda p: p == p,
        lambda p: torch.stack([p, p]),
        lambda p: torch.cat((p,)),
        lambda p: nn.functional.linear(X, p),
        lambda p: nn.init.zeros_(p),
        lambda p: setattr(p, "data", torch.zeros(8, 8)),
        lambda p: p.half(),
        lambda p: p.to(torch.bfloat16),
        lambda p: torch.linalg.matrix_norm(p),
    ],
)
def test_using_values_outside_of_a_call_names_the_parameter(model, attached, use):
    with pytest.raises(TraceError, match=r"parameter '1\.1\.weight'.*engine\.gathered"):
        use(model[1][1].weight)


def test_values_by_name_inside_forward_are_there():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = build()

        def forward(self, x):
            return self.blocks(x) @ self.blocks[0][1].weight.T

    plain, model = ByName(), ByName()
    attach(model)
    assert torch.equal(plain(X), model(X))


def test_without_guard_values_are_nan(model):
    attach(model, guard=False)
    assert (model[1][1].weight + 1).isnan().all()
    assert model(X).isfinite().all()


def test_moves_to_where_it_is_change_nothing(model, attached):
    weight = model[1][1].weight
    assert weight.to("cpu") is weight and weight.to(torch.float32) is weight
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model
    assert model[1].to("cpu") is model[1]


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("meta")])
def test_moves_elsewhere_are_refused(model, attached, move):
    with pytest.raises(TraceError, match=r"cannot be converted.*engine\.detach"):
        move(model)
    with pytest.raises(TraceError, match="placeholder"):
        move(model[1])
    assert model(X).isfinite().all()


def test_buffers_still_move():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    attach(model)
    model._apply(lambda t: t + 1 if t.dtype is torch.int64 else t)
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(model, attached, copying):
    with pytest.raises(TraceError, match=r"parameter '0\.0\.weight' cannot be"):
        copying(model[0][0].weight)
    with pytest.raises((TraceError, pickle.PicklingError, AttributeError)):
        copying(model)


def test_it_prints_itself(model, attached):
    assert repr(model[1][1].weight) == "Parameter '1.1.weight' at rest: shape (8, 8), torch.float32, values with the engine"
    assert "Linear" in repr(model)


def test_gradients_in_the_engines_hands_are_not_none(model, attached):
    hooks, residency = attached
    weight = model[1][1].weight
    assert weight.grad is None
    model(X).sum().backward()
    with pytest.raises(TraceError, match=r"the gradient of '1\.1\.weight' is held by the engine"):
        weight.grad  # noqa: B018
    with pytest.raises(TraceError, match="is held by the engine"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(TraceError, match="is held by the engine"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(TraceError, match="is held by the engine"):
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    with pytest.raises(TraceError, match="engine holds the gradient"):
        weight.grad = None
    hooks.forget_grads()
    assert weight.grad is None
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    with pytest.raises(TraceError, match="cannot be set from outside"):
        weight.grad = torch.zeros(8, 8)


def test_the_models_zero_grad_drops_the_gradients(model, attached):
    _, residency = attached
    model(X).sum().backward()
    assert residency.grad("1.1.weight") is not None
    model.zero_grad()
    assert residency.grad("1.1.weight") is None
    assert model[1][1].weight.grad is None


def test_gathered_gives_values_and_takes_changes(model, attached):
    hooks, residency = attached
    plain = build()
    with hooks.gathered(model[1]):
        assert torch.equal(model[1][1].weight, plain[1][1].weight)
        assert len(residency.live) == 1
        with torch.no_grad():
            model[1][1].weight.mul_(2)
            model[1][0].bias.data = torch.ones(8)
    assert not residency.live and residency.events == ["commit 1"]
    assert torch.equal(residency.value("1.1.weight"), plain[1][1].weight * 2)
    assert torch.equal(residency.value("1.0.bias"), torch.ones(8))


def test_gathered_for_reading_commits_nothing(model, attached):
    hooks, residency = attached
    with hooks.gathered(write=False):
        want = build().state_dict()
        assert all(torch.equal(value, want[name]) for name, value in model.named_parameters())
    assert not residency.live and not residency.events


def test_gathered_units_and_nesting(model, attached):
    hooks, residency = attached
    units = [unit.unit for unit in hooks._live.units]
    with hooks.gathered(units[:2]), hooks.gathered(units[1:]):
        assert len(residency.live) == 3
        assert torch.equal(model(X), build()(X)), "a forward inside uses what is there"
        assert len(residency.live) == 3
    assert not residency.live
    assert sorted(residency.events) == ["commit 0", "commit 1", "commit 2", "forward begins", "forward ends"]


def test_gathered_still_guards_held_gradients(model, attached):
    hooks, _ = attached
    model(X).sum().backward()
    with hooks.gathered(), pytest.raises(TraceError, match="is held by the engine"):
        model[1][1].weight.grad  # noqa: B018


def test_values_changed_between_forward_and_backward_are_named(model, attached):
    hooks, _ = attached
    loss = model(X).sum()
    with hooks.gathered(model[0]), torch.no_grad():
        model[0][1].weight.zero_()
    with pytest.raises(TraceError, match=r"unit '0'.*modified"):
        loss.backward()


def test_gathering_to_read_is_no_change(model, attached):
    hooks, _ = attached
    loss = model(X).sum()
    with hooks.gathered():
        model[0][1].weight.sum().item()
    loss.backward()


def test_a_shape_that_does_not_fit_is_refused(model, attached):
    hooks, residency = attached
    with pytest.raises(TraceError, match=r"'1\.0\.bias' was given shape \(3,\)"), hooks.gathered(model[1]):
        model[1][0].bias.data = torch.ones(3)
    assert not residency.live


def test_state_dict_is_the_plain_models(model, attached):
    _, residency = attached
    want, got = build().state_dict(), model.state_dict()
    assert list(want) == list(got)
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not residency.live and residency.live_peak == 1 and len(residency.fetches) == 3
    part = model[1].state_dict(prefix="x.")
    assert list(part) == ["x.0.weight", "x.0.bias", "x.1.weight"]
    assert not residency.live


def test_state_dict_keeps_tied_weights_tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    attach(model)
    state = model.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_state_dict_says_no_where_it_must(model):
    attach(model, gather_limit_bytes=1000)
    with pytest.raises(CapacityError, match="infinity export"):
        model.state_dict()
    with pytest.raises(TraceError, match="keep_vars"):
        model.state_dict(keep_vars=True)


def test_load_state_dict_changes_the_values(model, attached):
    _, residency = attached
    state = {name: value + 1 for name, value in build().state_dict().items()}
    result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(residency.value(name), value) for name, value in state.items())
    assert not residency.live and residency.live_peak == 1
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.1\.weight"):
        model.load_state_dict({**state, "1.1.weight": torch.zeros(2, 2)})
    with pytest.raises(TraceError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    assert torch.equal(model(X), _loaded(state)(X))


def _loaded(state):
    plain = build()
    plain.load_state_dict(state)
    return plain


def test_detach_leaves_a_plain_module(model, attached):
    hooks, residency = attached
    model(X).sum().backward()
    loss = model(X).sum()
    assert hooks.detach() is model
    plain = build()
    assert all(type(param) is nn.Parameter and "_infinity_seat" not in param.__dict__ for param in model.parameters())
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks or module._state_dict_hooks for module in model.modules())
    assert not residency.live
    with pytest.raises(TraceError, match="modified"):
        loss.backward()
    fetches = len(residency.fetches)
    model.double()
    copy.deepcopy(model)(X.double()).sum().backward()
    model(X.double()).sum().backward()
    assert model[1][1].weight.grad is not None
    model.zero_grad()
    assert model[1][1].weight.grad is None
    assert len(residency.fetches) == fetches
    assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == 9


def test_a_model_is_held_once(model, attached):
    _, residency = attached
    with pytest.raises(TraceError, match="held by another engine"):
        Hooks(model, residency.units, residency)


def test_gradients_from_before_are_not_lost_silently(model):
    model(X).sum().backward()
    with pytest.raises(TraceError, match=r"'0\.0\.weight' already has a gradient"):
        attach(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 4)])
def test_placeholders_of_any_dtype_and_shape(dtype, shape):
    module = nn.Module()
    values = torch.zeros(shape).to(dtype)
    module.p = nn.Parameter(values, requires_grad=dtype.is_floating_point or dtype.is_complex)
    hooks, _ = attach(module)
    assert (module.p.shape, module.p.dtype) == (values.shape, dtype)
    with hooks.gathered():
        assert torch.equal(module.p, values)
    hooks.detach()
    assert torch.equal(module.p, values)
