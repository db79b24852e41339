"""What goes wrong in a user's forward or backward leaves hooks that work; what cannot be honoured is refused in words."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import TraceError
from infinity.kinds import Lane
from infinity.runtime.saved import can_chain, top_hooks
from infinity.timeline import Timeline
from tests.runtime.in_memory import attach
from tests.runtime.parity import check_parity, same

sees_hooks_around = pytest.mark.skipif(not can_chain(), reason="torch before 2.8 does not tell which saved-tensor hooks are around the model")


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


class Troubled(nn.Module):
    """Raises what it is told to, on the way there or back."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.trouble = self.trouble_back = None

    def forward(self, x):
        x = self.norm(x)
        if self.trouble is not None:
            raise self.trouble
        x = self.linear(x)
        return _Back.apply(x, self)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.module.trouble_back is not None:
            raise ctx.module.trouble_back
        return grad, None


def build():
    torch.manual_seed(1)
    return nn.Sequential(*[Troubled() for _ in range(4)])


def check_like_plain(model, residency):
    """One more step gives plain PyTorch's gradients; nothing is left over."""
    plain = build()
    plain(X).pow(2).sum().backward()
    residency.drop_grads()
    model(X).pow(2).sum().backward()
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())
    assert not residency.live
    assert top_hooks() is None
    assert residency.live_peak <= 3


@pytest.mark.parametrize("trouble", [ValueError("no"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_in_forward(trouble, at):
    model = build()
    hooks, residency = attach(model)
    model[at].trouble = trouble
    with pytest.raises(type(trouble)):
        model(X)
    model[at].trouble = None
    if isinstance(trouble, Exception):
        assert not residency.live and not hooks._calls and top_hooks() is None
        assert residency.events == ["forward begins", "forward ends"]
    check_like_plain(model, residency)


def test_an_interrupted_submodule_is_no_obstacle_to_the_model():
    model = build()
    _, residency = attach(model)
    model[1].trouble = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model[1](X)
    model[1].trouble = None
    check_like_plain(model, residency)


def test_what_an_interrupt_left_live_is_not_used_in_the_next_step():
    model = build()
    hooks, residency = attach(model)
    model[1].trouble = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    unit = hooks._live.units[1].unit
    residency.values[unit][0].zero_()
    unit.version += 1
    hooks.forget_grads()
    assert not model[1].linear(X).any()
    assert not residency.live and top_hooks() is None


def test_a_block_called_after_an_interrupt_and_an_update_has_new_values():
    model = build()
    hooks, residency = attach(model)
    model[1].trouble = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model[1].trouble = None
    unit = hooks._live.units[1].unit
    residency.values[unit][0].zero_()
    unit.version += 1
    assert not model[1](X).any()
    hooks.reset()
    assert not residency.live and top_hooks() is None


def test_reset_ends_what_was_interrupted():
    model = build()
    hooks, residency = attach(model)
    model[1].trouble = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert residency.live
    hooks.reset()
    assert not residency.live and top_hooks() is None


@pytest.mark.parametrize("trouble", [ValueError("no"), KeyboardInterrupt()])
def test_an_exception_in_backward(trouble):
    model = build()
    _, residency = attach(model)
    loss = model(X).pow(2).sum()
    model[1].trouble_back = trouble
    with pytest.raises(type(trouble)):
        loss.backward()
    assert residency.events[-1] == "backward ends", "autograd drops the callback of a pass that died"
    assert not residency.live
    model[1].trouble_back = None
    check_like_plain(model, residency)


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=sees_hooks_around), True])
def test_an_exception_in_recomputation(reentrant):
    model = build()
    _, residency = attach(model)
    x = X.clone().requires_grad_()
    for block in model:
        x = checkpoint(block, x, use_reentrant=reentrant)
    model[2].trouble = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        x.sum().backward()
    assert not residency.live and top_hooks() is None
    model[2].trouble = None
    check_like_plain(model, residency)


def test_a_failing_fetch_reaches_the_caller():
    model = build()
    hooks, residency = attach(model)
    residency.broken = hooks._live.units[2].unit
    with pytest.raises(RuntimeError, match="the disk is gone"):
        model(X)
    assert not residency.live and not hooks._calls
    residency.broken = None
    check_like_plain(model, residency)


def test_a_failing_fetch_in_backward_reaches_the_caller():
    model = build()
    hooks, residency = attach(model)
    loss = model(X).sum()
    residency.broken = hooks._live.units[1].unit
    with pytest.raises(RuntimeError, match="the disk is gone"):
        loss.backward()
    residency.broken = None
    assert not residency.live
    check_like_plain(model, residency)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(mode):
    model, plain = build(), build()
    _, residency = attach(model)
    with mode():
        assert torch.equal(plain.eval()(X), model.eval()(X))
    model.train()
    assert not residency.live and residency.live_peak <= 2
    check_like_plain(model, residency)


def test_a_forward_that_turns_gradients_on():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = build()

        def forward(self, x):
            with torch.enable_grad():
                return self.blocks(x)

    plain, model = Inner(), Inner()
    _, residency = attach(model)
    with torch.no_grad():
        loss, ours = plain(X), model(X)
    loss.sum().backward()
    ours.sum().backward()
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())


def test_two_backwards_through_one_graph_add_up():
    plain, model = build(), build()
    _, residency = attach(model)
    for net in (plain, model):
        loss = net(X).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())


def test_gradients_of_some_parameters_alone():
    plain, model = build(), build()
    _, residency = attach(model)
    want = torch.autograd.grad(plain(X).sum(), [plain[1].linear.weight, plain[3].norm.bias])
    got = torch.autograd.grad(model(X).sum(), [model[1].linear.weight, model[3].norm.bias])
    assert all(torch.equal(left, right) for left, right in zip(want, got, strict=True))
    assert not residency.reductions and not residency.live


def test_a_gradient_for_the_input_alone():
    model = build()
    _, residency = attach(model)
    x = X.clone().requires_grad_()
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None and not residency.reductions and not residency.live


def test_units_updated_between_forward_and_backward_are_named():
    model = build()
    hooks, _ = attach(model)
    loss = model(X).sum()
    hooks._live.units[2].unit.version += 1
    with pytest.raises(TraceError, match=r"unit '2'.*has been modified.*version 1, expected version 0"):
        loss.backward()


def test_what_comes_late_is_handed_down_again():
    class TwoParts(nn.Module):
        """Uses the first linear of each block, then the second of each."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(3))

        def forward(self, x):
            for part in ("a", "b"):
                for block in self.blocks:
                    x = torch.tanh(block[part](x))
            return x.sum()

    residency = check_parity(TwoParts, lambda m: m(X), function=lambda name, module: isinstance(module, nn.ModuleDict))
    assert [(name, len(present)) for name, _, present in residency.reductions] == [(f"blocks.{k}", 2) for k in (2, 1, 0, 2, 1, 0)]


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    note: str = "a dataclass is no pytree"


class Dataclassed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Output(torch.tanh(self.linear(x.hidden)))


def test_outputs_that_are_not_pytrees():
    model = lambda: nn.Sequential(*[Dataclassed() for _ in range(4)])  # noqa: E731
    residency = check_parity(model, lambda m: m(Output(X)).hidden.sum())
    assert residency.fetches == ["0", "1", "2", "3", "3", "2", "1", "0"]


@sees_hooks_around
def test_a_users_save_on_cpu_still_sees_activations():
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.clone()

    plain, model = build(), build()
    _, residency = attach(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = plain(X).pow(2).sum()
        want, seen = seen, []
        ours = model(X).pow(2).sum()
    loss.backward()
    ours.backward()
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())
    assert X.shape in seen
    weights = sum(shape == (8, 8) or shape == (8,) for shape in want)
    assert len(seen) == len(want) - weights, "all but the weights"
    assert top_hooks() is None


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m[1], lambda m: m[1].linear])
def test_hooks_that_keep_what_they_get_do_not_keep_placeholders(part):
    model, plain = build(), build()
    _, residency = attach(model)
    for net in (plain, model):
        x = X.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            part(net)(x).pow(2).sum().backward()
        if net is plain:
            want = x.grad
    assert torch.equal(x.grad, want)
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())


def test_a_second_thread_is_refused():
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.enter, self.go = nn.Linear(8, 8), threading.Event(), threading.Event()

        def forward(self, x):
            self.enter.set()
            self.go.wait(10)
            return self.linear(x)

    model = Waits()
    attach(model)
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    model.enter.wait(10)
    with pytest.raises(TraceError, match="two threads"):
        model(X)
    model.go.set()
    thread.join()
    assert model(X).shape == X.shape, "the refused call left no trace"


def test_a_users_own_hooks_see_what_they_expect():
    def hooked(net, seen):
        net[1].linear.weight.register_hook(lambda grad: grad * 2)
        net[2].register_full_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_out[0].sum().item()))
        net[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net(X).pow(2).sum().backward()
        return net, seen

    model = build()
    _, residency = attach(model)
    plain, want = hooked(build(), [])
    _, got = hooked(model, [])
    assert want == got
    assert all(same(param.grad, residency.grad(name)) for name, param in plain.named_parameters())


def test_replicas_are_refused():
    model = build()
    attach(model)
    replica = copy.copy(model[0])
    with pytest.raises(TraceError, match="a copy of '0' was called.*DataParallel"):
        replica(X)


def test_requires_grad_changed_after_attach_is_named():
    model = build()
    _, residency = attach(model)
    model[2].requires_grad_(False)
    with pytest.raises(TraceError, match=r"requires_grad of '2\.norm\.weight' is now False, but it was trainable"):
        model(X)
    model[2].requires_grad_(True)
    check_like_plain(model, residency)


def test_in_place_changes_during_forward_are_not_lost_silently():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return self.linear(x)

    model = nn.Sequential(Changes(), Changes())
    _, residency = attach(model)
    with pytest.raises(TraceError, match=r"unit '0' \(0\.linear\.weight.*changed in place"):
        model(X)
    assert not residency.live


def test_autocast_over_fp32_parameters_is_named_once(caplog):
    model = build()
    _, residency = attach(model)
    with caplog.at_level(logging.WARNING, "infinity"), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(X).sum().backward()
    (record,) = caplog.records
    assert "autocast" in record.message and "'0'" in record.message


def test_events_bracket_each_pass():
    model = build()
    _, residency = attach(model)
    for _ in range(2):
        loss = model(X).sum()
        model(X)
        loss.backward()
    one = ["forward begins", "forward ends"] * 2 + ["backward begins", "backward ends"]
    assert residency.events == one * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_with_recomputation_is_one_pass(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = build()

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    _, residency = attach(model)
    model(X.clone().requires_grad_()).sum().backward()
    assert residency.events == ["forward begins", "forward ends", "backward begins", "backward ends"]
    assert residency.fetches == [f"blocks.{k}" for k in (0, 1, 2, 3, 3, 2, 1, 0)]


def test_an_embedding_is_not_fetched_for_backward():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    _, residency = attach(model)
    model(torch.arange(5)).sum().backward()
    assert residency.fetches == ["0", "1", "2", "2", "1"]


def test_spans_of_units_on_the_compute_lane():
    timeline, model = Timeline(), build()
    attach(model, timeline=timeline)
    model(X).sum().backward()
    spans = [span.name for span in timeline.spans() if span.lane is Lane.GPU]
    assert spans == ["0", "1", "2", "3", "3 backward", "2 backward", "1 backward", "0 backward"]


def test_forked_data_workers_do_not_disturb():
    model = build()
    _, residency = attach(model)
    loader = torch.utils.data.DataLoader([X] * 4, batch_size=1, num_workers=2, multiprocessing_context="fork")
    for (batch,) in loader:
        model(batch).sum().backward()
    check_like_plain(model, residency)
