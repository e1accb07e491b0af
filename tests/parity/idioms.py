"""PyTorch's idioms around gradients: each takes a trainer, plain PyTorch or the engine, and returns what it saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(number: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def loss_of(trainer: Any, number: int, scale: float = 1.0) -> Tensor:
    return trainer(batch(number, scale)).square().mean()


def one(trainer: Any, number: int) -> float | None:
    trainer.backward(loss_of(trainer, number))
    trainer.step()
    norm: float | None = trainer.get_global_grad_norm()
    return norm


Idiom = Callable[[Any], list[Any]]
IDIOMS: list[Idiom] = []


def idiom(function: Idiom) -> Idiom:
    IDIOMS.append(function)
    return function


@idiom
def drop_a_bad_batch(trainer: Any) -> list[Any]:
    seen = [one(trainer, 0)]
    trainer.backward(loss_of(trainer, 1, scale=100.0))
    trainer.optimizer.zero_grad()
    return [*seen, one(trainer, 2), one(trainer, 3)]


@idiom
def zero_grad_at_every_place(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        trainer.optimizer.zero_grad()
        loss = loss_of(trainer, number)
        trainer.optimizer.zero_grad()
        trainer.backward(loss)
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
        trainer.optimizer.zero_grad()
    return seen


@idiom
def a_hook_that_raises_once(trainer: Any) -> list[Any]:
    """The gradient of its parameter stays on it in plain PyTorch, until zero_grad()."""
    raises = [True]

    def hook(param: nn.Parameter) -> None:
        if raises.pop() if raises else False:
            raise ValueError("broken off")

    handle = trainer.module[2].weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="broken off"):
        trainer.backward(loss_of(trainer, 0))
    trainer.optimizer.zero_grad()
    assert all(param.grad is None for param in trainer.module.parameters())
    seen = [one(trainer, 1), one(trainer, 2)]
    handle.remove()
    return [*seen, one(trainer, 3)]


def params_of(trainer: Any) -> list[nn.Parameter]:
    return list(trainer.module.parameters())


def grads_of(trainer: Any) -> list[Tensor]:
    return [param.grad for param in params_of(trainer) if param.grad is not None]


def with_changed_grads(trainer: Any, change: Callable[[], Any], num_steps: int = 3) -> list[Any]:
    """`change` between backward and step; what it returns, and the norms."""
    seen = []
    for number in range(num_steps):
        trainer.backward(loss_of(trainer, number))
        found = change()
        if isinstance(found, Tensor):
            found = found.detach().clone()
        trainer.step()
        seen += [found, trainer.get_global_grad_norm()]
    return seen


# -- looking, and changing in place ------------------------------------------------------------------------------------


@idiom
def log_norms_by_parameter(trainer: Any) -> list[Any]:
    return with_changed_grads(trainer, lambda: torch.stack([grad.norm() for grad in grads_of(trainer)]))


@idiom
def clip_by_norm(trainer: Any) -> list[Any]:
    return with_changed_grads(trainer, lambda: nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.05))


@idiom
def clip_by_norm_one_by_one(trainer: Any) -> list[Any]:
    def change() -> Tensor:
        return torch.stack([nn.utils.clip_grad_norm_(param, 0.01, foreach=False) for param in params_of(trainer)])

    return with_changed_grads(trainer, change)


@idiom
def clip_with_a_total_norm(trainer: Any) -> list[Any]:
    def change() -> Tensor:
        norm = nn.utils.get_total_norm(grads_of(trainer), norm_type=1.0)
        nn.utils.clip_grads_with_norm_(trainer.module.parameters(), 0.5, norm)
        return norm

    return with_changed_grads(trainer, change)


@idiom
def clip_by_value(trainer: Any) -> list[Any]:
    return with_changed_grads(trainer, lambda: nn.utils.clip_grad_value_(trainer.module.parameters(), 0.01))


@idiom
def clamp_the_data_of_gradients(trainer: Any) -> list[Any]:
    """`.data` has a version counter of its own, so nothing but the values shows that they changed."""

    def change() -> None:
        for grad in grads_of(trainer):
            grad.data.clamp_(-0.01, 0.01)

    return with_changed_grads(trainer, change)


@idiom
def change_by_numpy(trainer: Any) -> list[Any]:
    def change() -> None:
        for grad in grads_of(trainer):
            array = grad.numpy()
            array *= 0.5

    return with_changed_grads(trainer, change)


@idiom
def add_noise(trainer: Any) -> list[Any]:
    def change() -> None:
        generator = torch.Generator().manual_seed(5)
        for grad in grads_of(trainer):
            grad.add_(torch.randn(grad.shape, generator=generator), alpha=0.01)

    return with_changed_grads(trainer, change)


@idiom
def centralize(trainer: Any) -> list[Any]:
    def change() -> None:
        for grad in grads_of(trainer):
            if grad.dim() > 1:
                grad.sub_(grad.mean(dim=1, keepdim=True))

    return with_changed_grads(trainer, change)


@idiom
def scale_all_at_once(trainer: Any) -> list[Any]:
    def change() -> None:
        torch._foreach_mul_(grads_of(trainer), 0.3)

    return with_changed_grads(trainer, change)


@idiom
def clip_by_the_norms_of_weights(trainer: Any) -> list[Any]:
    """Adaptive gradient clipping looks at weights and gradients together."""

    def change() -> None:
        with tiered_zero.gathered(trainer.module), torch.no_grad():
            for param in params_of(trainer):
                assert param.grad is not None
                param.grad.mul_((0.01 * param.norm() / param.grad.norm()).clamp(max=1.0))

    return with_changed_grads(trainer, change)


@idiom
def flatten_and_scatter(trainer: Any) -> list[Any]:
    def change() -> Tensor:
        vector = nn.utils.parameters_to_vector(grads_of(trainer))
        start = 0
        for grad in grads_of(trainer):
            grad.copy_(vector[start : start + grad.numel()].view_as(grad) * 0.7)
            start += grad.numel()
        return vector

    return with_changed_grads(trainer, change)


# -- assigning ---------------------------------------------------------------------------------------------------------


@idiom
def replace_gradients(trainer: Any) -> list[Any]:
    def change() -> None:
        for param in params_of(trainer):
            assert param.grad is not None
            param.grad = param.grad * 0.5
            param.grad /= 2

    return with_changed_grads(trainer, change)


@idiom
def an_assigned_tensor_is_live(trainer: Any) -> list[Any]:
    def change() -> None:
        given = [torch.full_like(grad, 0.1) for grad in grads_of(trainer)]
        for param, grad in zip(params_of(trainer), given, strict=True):
            param.grad = grad
            assert param.grad is grad
        for grad in given:
            grad.mul_(3)

    return with_changed_grads(trainer, change)


@idiom
def gradients_by_autograd_grad(trainer: Any) -> list[Any]:
    """No backward at all."""
    seen = []
    for number in range(3):
        loss = loss_of(trainer, number)
        params = params_of(trainer)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        if number == 1:
            seen.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1))
        trainer.step()
        seen += [loss.detach(), trainer.get_global_grad_norm()]
    return seen


@idiom
def a_backward_adds_to_what_was_assigned(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        loss = loss_of(trainer, number)
        for param in params_of(trainer)[:3]:
            param.grad = torch.ones(param.shape)
        trainer.backward(loss)
        seen.append(trainer.module[2].weight.grad.clone())
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


@idiom
def a_backward_adds_to_what_was_changed(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        trainer.backward(loss_of(trainer, 2 * number))
        trainer.module[0].weight.grad.mul_(3)
        trainer.module[2].weight.grad = None
        trainer.module[4].weight.grad = torch.ones(4, 8)
        trainer.backward(loss_of(trainer, 2 * number + 1))
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


@idiom
def leave_some_parameters_out(trainer: Any) -> list[Any]:
    """Without a gradient neither momentum nor decay moves a weight."""
    seen = [one(trainer, 0)]

    def change() -> None:
        for param in params_of(trainer)[::2]:
            param.grad = None

    return seen + with_changed_grads(trainer, change) + [one(trainer, 9)]


@idiom
def exchange_two_gradients(trainer: Any) -> list[Any]:
    def change() -> None:
        first, second = trainer.module[0].weight, trainer.module[2].weight
        first.grad, second.grad = second.grad.t().clone(), first.grad.t()

    return with_changed_grads(trainer, change)


@idiom
def project_conflicting_gradients(trainer: Any) -> list[Any]:
    """Gradients of two losses, each alone, then joined."""
    seen = []
    for number in range(3):
        each = []
        for part in range(2):
            trainer.optimizer.zero_grad()
            trainer.backward(loss_of(trainer, 2 * number + part))
            each.append([grad.clone() for grad in grads_of(trainer)])
        for param, left, right in zip(params_of(trainer), *each, strict=True):
            dot = (left * right).sum()
            param.grad = left + right - (dot / right.square().sum() * right if dot < 0 else 0)
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


# -- hooks -------------------------------------------------------------------------------------------------------------


def with_hooks(trainer: Any, hook: Callable[[nn.Parameter], None], num_backwards: int = 1) -> list[Any]:
    handles = [param.register_post_accumulate_grad_hook(hook) for param in params_of(trainer)[1:]]
    seen = []
    for number in range(4):
        if number == 3:
            for handle in handles:
                handle.remove()
        for part in range(num_backwards):
            trainer.backward(loss_of(trainer, 10 * number + part))
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


@idiom
def halve_in_a_hook(trainer: Any) -> list[Any]:
    def hook(param: nn.Parameter) -> None:
        if param.grad is not None:
            param.grad.mul_(0.5)

    return with_hooks(trainer, hook)


@idiom
def halve_sums_in_a_hook(trainer: Any) -> list[Any]:
    """The second call sees the sum of both backwards."""

    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    return with_hooks(trainer, hook, num_backwards=2)


@idiom
def replace_and_drop_in_hooks(trainer: Any) -> list[Any]:
    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad = None if param.dim() == 1 else param.grad.sign()

    return with_hooks(trainer, hook) + with_hooks(trainer, hook, num_backwards=2)


@idiom
def look_in_hooks(trainer: Any) -> list[Any]:
    seen: list[Any] = []

    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        seen.append(param.grad.norm())

    return with_hooks(trainer, hook, num_backwards=3) + seen


@idiom
def hooks_on_the_gradient_itself(trainer: Any) -> list[Any]:
    handles = [param.register_hook(lambda grad: grad * 0.5) for param in params_of(trainer)]
    seen = [one(trainer, number) for number in range(2)]
    for handle in handles:
        handle.remove()
    return [*seen, one(trainer, 2)]


# -- the loop ----------------------------------------------------------------------------------------------------------


def plain_loop(trainer: Any, begin: Callable[[Tensor], None], zero_grad: Callable[[], None]) -> list[Any]:
    """As in PyTorch's tutorials: the trainer's own calls are not used."""
    seen = []
    for number in range(4):
        zero_grad()
        loss = loss_of(trainer, number)
        begin(loss)
        trainer.optimizer.step()
        seen.append(loss.detach())
    zero_grad()
    return seen


@idiom
def plain_backward(trainer: Any) -> list[Any]:
    return plain_loop(trainer, lambda loss: loss.backward(), trainer.optimizer.zero_grad)


@idiom
def plain_backward_and_clipping(trainer: Any) -> list[Any]:
    norms: list[Any] = []

    def begin(loss: Tensor) -> None:
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1))

    return plain_loop(trainer, begin, trainer.module.zero_grad) + norms


@idiom
def plain_backward_with_hooks(trainer: Any) -> list[Any]:
    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in params_of(trainer):
        param.register_post_accumulate_grad_hook(hook)

    def begin(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    return plain_loop(trainer, begin, trainer.optimizer.zero_grad)


@idiom
def call_the_module_itself(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        trainer.module(batch(number)).square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1))
        trainer.optimizer.step()
        trainer.module.zero_grad()
    return seen


@idiom
def zero_instead_of_none(trainer: Any) -> list[Any]:
    """A parameter that gets no gradient in a step goes on by its momentum, for its gradient is 0."""
    trainer.optimizer.zero_grad()
    seen = []
    for number in range(4):
        loss = loss_of(trainer, number)
        if number == 2:
            loss.backward(inputs=[trainer.module[4].weight])
        else:
            trainer.backward(loss)
        trainer.optimizer.step()
        seen.append(loss.detach())
        trainer.optimizer.zero_grad(set_to_none=False)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return seen


@idiom
def zero_the_models_gradients_in_place(trainer: Any) -> list[Any]:
    trainer.backward(loss_of(trainer, 0, scale=100.0))
    trainer.module.zero_grad(set_to_none=False)
    assert not any(grad.any() for grad in grads_of(trainer))
    trainer.backward(loss_of(trainer, 1))
    trainer.step()
    return [trainer.get_global_grad_norm(), one(trainer, 2)]


@idiom
def accumulate_by_hand(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        for part in range(3):
            loss = loss_of(trainer, 3 * number + part) / 3
            if number == 1:
                loss.backward()
            else:
                trainer.backward(loss)
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


@idiom
def go_on_after_a_broken_backward(trainer: Any) -> list[Any]:
    def breaks(grad: Tensor) -> None:
        raise ValueError("broken off")

    seen = [one(trainer, 0)]
    for number, begin in enumerate((trainer.backward, lambda loss: loss.backward())):
        hidden = trainer(batch(number))
        hidden.register_hook(breaks)
        with pytest.raises(ValueError, match="broken off"):
            begin(hidden.square().mean())
        trainer.optimizer.zero_grad()
        seen.append(one(trainer, 2 + number))
    return seen


@idiom
def sharpness_aware(trainer: Any) -> list[Any]:
    """Two backwards a step, the second from weights moved along the first one's gradient."""
    seen = []
    for number in range(3):
        trainer.backward(loss_of(trainer, number))
        norm = nn.utils.get_total_norm(grads_of(trainer))
        moves = [grad * (0.05 / norm) for grad in grads_of(trainer)]
        with tiered_zero.gathered(trainer.module, modify=True), torch.no_grad():
            before = [param.clone() for param in params_of(trainer)]
            for param, move in zip(params_of(trainer), moves, strict=True):
                param.add_(move)
        trainer.optimizer.zero_grad()
        trainer.backward(loss_of(trainer, number))
        with tiered_zero.gathered(trainer.module, modify=True), torch.no_grad():
            for param, value in zip(params_of(trainer), before, strict=True):
                param.copy_(value)
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
    return seen


@idiom
def grad_scaler(trainer: Any) -> list[Any]:
    """The second batch overflows: the scaler leaves its step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen: list[Any] = []
    for number in range(5):
        trainer.optimizer.zero_grad()
        loss = loss_of(trainer, number) * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        if number != 3:
            scaler.unscale_(trainer.optimizer)
            seen.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1))
        scaler.step(trainer.optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    trainer.optimizer.zero_grad()
    return seen
