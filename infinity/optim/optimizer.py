"""The optimizer that users hold: torch.optim.AdamW's interface over states that live in any tier."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from infinity.errors import CheckpointError, ConfigError, TraceError
from infinity.optim.chunks import Address, FlatKey, Rule
from infinity.optim.exchange import Exchange, Place
from infinity.optim.grads import Grads
from infinity.optim.loss_scale import LossScale
from infinity.optim.pipeline import Pipeline

_NOT_OFFERED = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
_CLIP_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_."""


class TieredAdamW(torch.optim.Optimizer):
    """AdamW as torch.optim.AdamW computes it; learning rates and the rest are read from `param_groups` at each step, so schedulers work.

    `step()` takes ownership of the gradients: the next backward starts afresh, with or without `zero_grad()`. A step whose gradients hold an
    inf or a nan changes nothing. `state` and `state_dict()` hold each parameter's step count only; moments are saved by `engine.save`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        addresses: Mapping[Tensor, Address],
        grads: Grads,
        pipeline: Pipeline,
        exchange: Exchange,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._addresses = addresses
        self._grads = grads
        self._pipeline = pipeline
        self._exchange = exchange
        self._averaged_arrivals: int | None = None
        """How many gradients had arrived when those at rest became those of all ranks."""
        self._drops = 0
        """How often gradients had been dropped when clipping and averaging began."""
        self._loss_scale = loss_scale
        self._max_grad_norm = max_grad_norm
        self._clip = 1.0
        self._max_norms: tuple[float, ...] = ()
        """What the gradients are clipped to, in that order, with `_clip` as the outcome."""
        self._clipped_arrivals: int | None = None
        self.skipped_steps = 0
        """Steps not taken because a gradient was inf or nan."""
        self.taken_steps = 0
        """Updates made since the start of the process."""
        self.on_update: Callable[[], None] = lambda: None
        """Called when parameters are about to change: whoever fetched some ahead gives them up."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called while a step is under way, whenever more of the parameters have their new values."""
        self.on_cleared: Callable[[], None] = lambda: None
        """Called whenever no gradient is left: whoever shows `param.grad` to users can forget it."""
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ConfigError for a parameter that the engine does not train and for options that are not offered."""
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1], self._addresses)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Raises TraceError for set_to_none=False: a zero gradient, unlike none, would decay the moments."""
        if not set_to_none:
            raise TraceError("zero_grad(set_to_none=False) keeps gradients of zeros, which are not stored. Call zero_grad()")
        self._grads.clear()
        self.on_cleared()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a total 2-norm of `max_norm`, when `step()` reads them. Returns the norm before, fp32 [] on the CPU.

        The formula is torch.nn.utils.clip_grad_norm_'s. With loss scaling both norms are those of the true gradients.
        """
        self._average()
        return self._clip_to(max_norm, self._norm())

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One AdamW update of every parameter that got a gradient. `closure` computes the loss and calls backward, as torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._average()
        if not self._grads.is_empty():
            self._update()
        else:
            self._begin_afresh()
        return loss

    def step_counts(self) -> dict[str, int]:
        """Updates made of each parameter, by name: a parameter without gradient is not counted on."""
        return {self._addresses[param].name: state["step"] for param, state in self.state.items()}

    def group_names(self) -> list[list[str]]:
        """The names of each group's trained parameters."""
        return names_of(self.param_groups, self._addresses)

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """What `step_counts()` gave. Raises CheckpointError for a name that the optimizer does not train."""
        params = {self._addresses[param].name: param for group in self.param_groups for param in group["params"] if param in self._addresses}
        unknown = sorted(counts.keys() - params.keys())
        if unknown:
            raise CheckpointError(f"step counts of {len(unknown)} parameters that are not trained here, first {unknown[0]!r}. Was the model changed?")
        self.state.clear()
        for name, count in counts.items():
            self.state[params[name]]["step"] = int(count)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and step counts. Raises CheckpointError for a state dict with moments, which it could not honour."""
        extra = sorted({key for state in state_dict["state"].values() for key in state if key != "step"})
        if extra:
            raise CheckpointError(f"this optimizer state holds {', '.join(extra)}: moments live in the store. Load them with engine.load")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = int(state["step"])

    def _update(self) -> None:
        if self._clipped_arrivals not in (None, self._grads.arrivals):
            raise TraceError("gradients arrived between clip_grad_norm_() and step(): call clip_grad_norm_() after the last backward")
        rules = self._rules(self._grads.all_present())  # before the norm, which waits: a GPU is still at the backward
        norm = self._norm_of_all(rules)
        if self._max_grad_norm is not None:
            norm = float(self._clip_to(self._max_grad_norm, norm))
        self.on_update()
        if math.isfinite(norm):
            self._take_step(rules, self._clip * self._loss_scale_inverse())
        else:
            self._skip_step(norm)
        if self._loss_scale is not None:
            self._loss_scale.update(norm)
        self._begin_afresh()
        self.on_cleared()

    def _norm_of_all(self, rules: dict[FlatKey, dict[int, Rule]]) -> float:
        """The norm; beside it ranks compare their rules. Raises TraceError where they would not make the same update: gradients stay, and are not
        clipped.
        """
        check_alike = self._exchange.compare_update(rules, self._loss_scale_inverse(), self._max_norms, self._names)
        norm = self._norm()
        try:
            check_alike()
        except TraceError:
            self._forget_clip()
            raise
        return norm

    def _names(self) -> dict[Place, str]:
        return {(address.flat_key, address.slot): address.name for address in self._addresses.values()}

    def _take_step(self, rules: dict[FlatKey, dict[int, Rule]], grad_scale: float) -> None:
        self._pipeline.check()
        grads = self._grads.take()
        self._exchange.begin_gather(rules)
        try:
            self._pipeline.step(rules, grads, grad_scale, self._report)
        except BaseException as error:
            grads.fail(error)  # nobody waits for a step that never began
            self._exchange.give_up(error)
            raise
        self._gather()
        self.taken_steps += 1
        for param, address in self._addresses.items():
            rule = rules.get(address.flat_key, {}).get(address.slot)
            if rule is not None:
                self.state[param]["step"] = rule.step

    def _average(self) -> None:
        """Whoever reads the gradients first waits until they are those of all ranks."""
        if self._drops != self._grads.drops:
            self._begin_afresh()  # the gradients are gone that were clipped and averaged
        if not self._exchange.averages:
            return
        if self._averaged_arrivals is None:
            self._exchange.average(self._grads)
            self._averaged_arrivals = self._grads.arrivals
        elif self._averaged_arrivals != self._grads.arrivals:
            raise TraceError(
                "gradients arrived after the ranks had averaged theirs, for clip_grad_norm_() or a step that was refused: "
                "call zero_grad() and the backwards of this step again, and clip after the last one"
            )

    def _report(self) -> None:
        """More of the parameters have their new values."""
        self._exchange.gather_updated(self._pipeline.is_updated)
        self.on_progress()

    def _gather(self) -> None:
        """Until the other ranks' new values are here too; without them the parameters are a mix of two steps."""
        try:
            self._exchange.finish_gather()
        except BaseException as error:
            self._pipeline.spoil(error)
            raise

    def _skip_step(self, norm: float) -> None:
        self._grads.clear()
        self.skipped_steps += 1
        if self._loss_scale is None:
            warnings.warn(f"the norm of the gradients is {norm}: this step was skipped, {self.skipped_steps} so far", RuntimeWarning, stacklevel=5)

    def _rules(self, present: Mapping[FlatKey, frozenset[int]]) -> dict[FlatKey, dict[int, Rule]]:
        """The next update of each parameter that has a gradient, with the numbers its group has now."""
        rules: dict[FlatKey, dict[int, Rule]] = {}
        for group in self.param_groups:
            numbers = [float(number) for number in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])]
            of_step: dict[int, Rule] = {}  # one for all that are as far
            for param in group["params"]:
                address = self._addresses.get(param)
                if address is not None and address.slot in present.get(address.flat_key, ()):
                    step = self.state.get(param, {}).get("step", 0) + 1
                    rule = of_step.get(step) or of_step.setdefault(step, Rule._make((*numbers, step)))
                    rules.setdefault(address.flat_key, {})[address.slot] = rule
        return rules

    def _norm(self) -> float:
        """Of the gradients as `step()` would use them now."""
        return self._grads.norm() * self._clip * self._loss_scale_inverse()

    def _loss_scale_inverse(self) -> float:
        return self._loss_scale.grad_scale() if self._loss_scale is not None else 1.0

    def _clip_to(self, max_norm: float, norm: float) -> Tensor:
        self._clip *= min(1.0, max_norm / (norm + _CLIP_EPS))
        self._max_norms += (float(max_norm),)
        self._clipped_arrivals = self._grads.arrivals
        return torch.tensor(norm, dtype=torch.float32)

    def _forget_clip(self) -> None:
        self._clip, self._max_norms = 1.0, ()
        self._clipped_arrivals = None

    def _begin_afresh(self) -> None:
        """Gradients are about to arrive for another step."""
        self._forget_clip()
        self._averaged_arrivals = None
        self._drops = self._grads.drops


def checked_groups(params: Any, addresses: Mapping[Tensor, Address], **defaults: Any) -> list[dict[str, Any]]:
    """`params` as the list of groups that `TieredAdamW` makes of it. Raises ConfigError for what it would refuse, while nothing is built."""
    if isinstance(params, Tensor):
        raise ConfigError("param_groups is a tensor: give an iterable of parameters, of groups, or a function of named_parameters()")
    try:
        copies = [dict(entry) if isinstance(entry, Mapping) else entry for entry in params]
        groups = torch.optim.Optimizer(copies, defaults).param_groups
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"param_groups: {error}") from error
    for group in groups:
        _check_group(group, addresses)
    return groups


def names_of(groups: Iterable[Mapping[str, Any]], addresses: Mapping[Tensor, Address]) -> list[list[str]]:
    """The names of each group's trained parameters."""
    return [[addresses[param].name for param in group["params"] if param in addresses] for group in groups]


def _check_group(group: Mapping[str, Any], addresses: Mapping[Tensor, Address]) -> None:
    """Raises ConfigError naming the parameter or the option that the engine cannot honour."""
    for param in group["params"]:
        if param.requires_grad and param not in addresses:
            raise ConfigError(
                f"param_groups: a parameter of shape {tuple(param.shape)} is not one the engine trains. "
                "Build param_groups from the named_parameters() of the model that was given to infinity.initialize"
            )
    _check_options(group)


def _check_options(group: Mapping[str, Any]) -> None:
    """The bounds of torch.optim.AdamW. Raises ConfigError naming the option."""
    for name in _NOT_OFFERED:
        if group.get(name):
            raise ConfigError(f"optimizer: {name} is not offered, leave it out of param_groups")
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0.0:
            raise ConfigError(f"optimizer: {name} is {group[name]}, it must not be below 0")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ConfigError(f"optimizer: betas are {group['betas']}, both must be in [0, 1)")
