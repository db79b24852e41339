"""On a GPU, where autograd runs in threads of its own, hooked models compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.in_memory import attach
from tests.runtime.parity import check_parity
from tests.runtime.test_hooks_failures import Troubled
from tests.runtime.test_hooks_parity import IDS, Block, Tied, loss_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recompute", ["no", "yes", "reentrant", "segments", "reentrant segments"])
@pytest.mark.parametrize("functional_head", [False, True])
def test_tied_weights(recompute, functional_head):
    ids = IDS.cuda()
    build = lambda: Tied(recompute=recompute, functional_head=functional_head).cuda()  # noqa: E731
    check_parity(build, lambda m: loss_of(m(ids)), threshold_numel=100, steps=2)


def test_placeholders_take_no_memory_on_the_device():
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    _, residency = attach(model)
    residency.values.clear()
    assert torch.cuda.memory_allocated() - before < 1024 * 1024 * 4, "less than one of the weights"
    assert all(param.is_cuda for param in model.parameters())


def test_live_units_alone_take_memory():
    model = nn.Sequential(*[Block(256) for _ in range(8)]).cuda()
    _, residency = attach(model)
    unit_bytes = residency.units[0].layout.nbytes
    values = {unit: [value.cpu() for value in flats] for unit, flats in residency.values.items()}
    residency.values = {unit: [_Uploads(value) for value in flats] for unit, flats in values.items()}
    residency.reduce = lambda *_: None
    x = torch.randn(2, 256, device="cuda")
    model(x).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * unit_bytes, "a unit and its gradients, twice"


class _Uploads:
    """A CPU tensor whose clone is on the GPU."""

    def __init__(self, value):
        self._value = value

    def clone(self):
        return self._value.cuda()


def test_an_exception_in_backward_on_autograds_thread():
    torch.manual_seed(1)
    model = nn.Sequential(*[Troubled() for _ in range(4)]).cuda()
    _, residency = attach(model)
    x = torch.randn(6, 8, device="cuda")
    loss = model(x).sum()
    model[1].trouble_back = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        loss.backward()
    model[1].trouble_back = None
    model(x).sum().backward()
    assert not residency.live and residency.events[-1] == "backward ends"
