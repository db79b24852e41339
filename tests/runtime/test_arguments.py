"""A model's arguments come to its device by themselves."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import nn

from infinity.runtime.arguments import move_arguments

META = torch.device("meta")
Pair = namedtuple("Pair", "left right")


class Keeps(nn.Module):
    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def test_tensors_at_any_depth_are_moved_and_nothing_else_is_changed():
    model, here, text = Keeps(), torch.ones(2), ["a"]
    handle = move_arguments(model, META)
    model(here, [here, {"x": here}], Pair(here, 3), text, mask=here, flag=True)
    first, nested, pair, words = model.args
    tensors = [first, nested[0], nested[1]["x"], pair.left, model.kwargs["mask"]]
    assert all(tensor.device == META and tensor.shape == (2,) for tensor in tensors)
    assert (pair.right, words, model.kwargs["flag"]) == (3, ["a"], True)
    handle.remove()
    model(here)
    assert model.args == (here,)


def test_a_tensor_that_is_there_already_is_the_same_object():
    model, here = Keeps(), torch.ones(2, requires_grad=True)
    move_arguments(model, torch.device("cpu"))
    model(here, k=here)
    assert model.args[0] is here and model.kwargs["k"] is here


def test_other_hooks_of_the_model_see_moved_tensors():
    model, seen = Keeps(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    move_arguments(model, META)
    model(torch.ones(1))
    assert seen == [META]
