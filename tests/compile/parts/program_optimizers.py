"""Compiled steps of optimizers, and changes of them: what the next start must do, and what it must not."""

# ruff: noqa: E501 (a row is a change of the program and what the next start does)

from __future__ import annotations

from program_changes import Change, rows

_TEXT = """
import torch
from torch import nn

ps = [nn.Parameter(torch.linspace(-1, 1, 3)), nn.Parameter(torch.linspace(0, 1, 6).view(2, 3))]
others = [nn.Parameter(torch.ones(2))]


def give_gradients(n):
    for at, p in enumerate(ps):
        p.grad = torch.full_like(p, 0.1 * (n + 1) * (at + 1))


def before(n):
    pass


def inputs():
    for n in range(3):
        give_gradients(n)
        before(n)
        yield ()


def state():
    return [*ps, *others, *(each for kept in o.state.values() for each in kept.values()), o.param_groups[-1].get("capturable")]


"""
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(ps, lr=0.5)",
    "SGD, momentum": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)",
    "SGD, foreach": "torch.optim.SGD(ps, lr=0.5, momentum=0.9, nesterov=True, foreach=True)",
    "SGD, differentiable": "torch.optim.SGD(ps, lr=0.5, differentiable=True)",
    "Adam": "torch.optim.Adam(ps, lr=0.5)",
    "Adam, a tensor as rate": "torch.optim.Adam(ps, lr=torch.tensor(0.5))",
    "Adam, foreach, amsgrad, maximize": "torch.optim.Adam(ps, lr=0.5, foreach=True, amsgrad=True, maximize=True)",
    "AdamW": "torch.optim.AdamW(ps, lr=0.5, weight_decay=0.1)",
    "AdamW, capturable, a tensor as rate": "torch.optim.AdamW(ps, lr=torch.tensor(0.5), foreach=True, capturable=True)",
    "AdamW, groups": "torch.optim.AdamW([{'params': ps[:1], 'weight_decay': 0.0}, {'params': ps[1:], 'lr': 0.25}], lr=0.5)",
    "SGD, groups of which one is empty": "torch.optim.SGD([{'params': []}, {'params': ps}], lr=0.5)",
    **{
        name: f"torch.optim.{name}(ps)"
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


def of(optimizer: str) -> str:
    """A program that steps. optimizer: its expression, and further lines."""
    return f"{_TEXT}o = {optimizer}\nprogram = o.step\n"


def changes(texts: dict[str, str], how: str) -> dict[str, Change]:
    return rows({name: of(text) for name, text in texts.items()}, how=how)


TRACED = changes(
    {
        "rate": "torch.optim.SGD(ps, lr=«0.5→0.25»)",
        "rate, a tensor": "torch.optim.Adam(ps, lr=«0.5→torch.tensor(0.5)»)",
        "rate, a tensor of another dtype": "torch.optim.Adam(ps, lr=torch.tensor(0.5«→, dtype=torch.float64»))",
        "rate of one group": "torch.optim.Adam([{'params': ps[:1]}, {'params': ps[1:], 'lr': «0.5→0.25»}])",
        "betas": "torch.optim.Adam(ps, betas=(0.9, «0.99→0.9»))",
        "weight decay": "torch.optim.AdamW(ps, weight_decay=«0.1→0.2»)",
        "no weight decay": "torch.optim.SGD(ps, lr=0.5, weight_decay=«0.1→0.0»)",
        "eps": "torch.optim.Adam(ps, eps=«1e-8→1e-2»)",
        "momentum": "torch.optim.SGD(ps, lr=0.5, momentum=«0.9→0.8»)",
        "no momentum": "torch.optim.SGD(ps, lr=0.5, momentum=«0.9→0.0»)",
        "dampening": "torch.optim.SGD(ps, lr=0.5, momentum=0.9, dampening=«0→0.5»)",
        "nesterov": "torch.optim.SGD(ps, lr=0.5, momentum=0.9, nesterov=«False→True»)",
        "amsgrad": "torch.optim.Adam(ps, amsgrad=«False→True»)",
        "maximize": "torch.optim.Adam(ps, maximize=«False→True»)",
        "foreach": "torch.optim.Adam(ps, foreach=«None→True»)",
        "class": "torch.optim.«Adam→AdamW»(ps, weight_decay=0.1)",
        "no gradient": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ndef before(n):\n    ps[«0→1»].grad = None\n",
        "no gradient later": "torch.optim.Adam(ps, lr=0.5)\ndef before(n):\n    if n == 1:\n        ps[0].grad = «ps[0].grad→None»\n",
        "gradient that comes later": "torch.optim.Adam(ps, lr=0.5)\ndef before(n):\n    if n == 0:\n        ps[0].grad = «ps[0].grad→None»\n",
        "gradient of other strides": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ndef before(n):\n    ps[1].grad = «torch.ones(2, 3)→torch.ones(3, 2).t()»\n",
        "gradient that two have": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nps += [nn.Parameter(torch.ones(3))]\no.add_param_group({'params': ps[2:]})\n\n\ndef before(n):\n    ps[2].grad = «ps[0].grad.clone()→ps[0].grad»\n",
        "gradients in one memory": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ndef before(n):\n    «both = [torch.ones(3), torch.ones(6)]→both = torch.ones(9).split([3, 6])»\n    ps[0].grad, ps[1].grad = both[0], both[1].view(2, 3)\n",
        "frozen parameter": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\n«→ps[0].requires_grad_(False)»",
        "one more parameter": "torch.optim.SGD(«ps→ps + others», lr=0.5)\nothers[0].grad = torch.ones(2)",
        "order of parameters": "torch.optim.Adam(«ps→ps[::-1]»)",
        "one more group": "torch.optim.SGD([{'params': ps[:1]}«, → , {'params': others}, »{'params': ps[1:]}], lr=0.5)\nothers[0].grad = torch.ones(2)",
        "order of groups": "torch.optim.Adam([{'params': ps[«:1→1:»]}, {'params': ps[«1:→:1»]}])",
        "groups of others": "torch.optim.Adam([{'params': «ps[:1]→ps»}, {'params': «ps[1:]→others»}])",
        "group with another entry": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\no.param_groups[0]['«name→other»'] = 1",
        "dtype": "torch.optim.Adam(«ps→[p.data for p in ps if p.data_ptr() and setattr(p, 'data', p.data.double()) is None] and ps»)",
        "sizes": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nps[1].data = torch.ones(2, «3→4»)",
        "strides": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nps[1].data = «torch.ones(2, 3)→torch.ones(3, 2).t()»",
        "parameters in one memory": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nboth = «[torch.ones(3), torch.ones(6)]→torch.ones(9).split([3, 6])»\nps[0].data, ps[1].data = both[0], both[1].view(2, 3)",
        "parameters that overlap": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nbase = torch.ones(6)\nps[0].data, ps[1].data = base«.clone()→»[:3], base.view(2, 3)",
        "default dtype": "torch.optim.Adam(ps, lr=0.5)\nundo = [lambda: torch.set_default_dtype(torch.float32)]\ntorch.set_default_dtype(torch.«float32→float64»)",
        "scheduler": "torch.optim.Adam(ps, lr=0.5)\n«→s = torch.optim.lr_scheduler.StepLR(o, 1)»\n\n\ndef before(n):\n    «pass→s.step()»\n",
        "state of other dtype": "torch.optim.Adam(ps, lr=0.5)\n\nfor at, p in enumerate(ps):\n    o.state[p] = {'step': torch.tensor(1.0«→, dtype=torch.float64»), 'exp_avg': torch.ones_like(p), 'exp_avg_sq': torch.ones_like(p)}",
        "state in another order": "torch.optim.Adam(ps, lr=0.5)\n«→ps.reverse()»\nfor at, p in enumerate(ps):\n    o.state[p] = {'step': torch.tensor(1.0), 'exp_avg': torch.ones_like(p), 'exp_avg_sq': torch.ones_like(p)}\n«→ps.reverse()»",
        "state's keys in another order": "torch.optim.Adam(ps, lr=0.5)\n\nfor at, p in enumerate(ps):\n    o.state[p] = {'step': torch.tensor(1.0), 'exp_avg«→_sq»': torch.ones_like(p), 'exp_avg«_sq→»': torch.ones_like(p) * 2}",
        "state that two have": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nkept = torch.ones(3)\nps += [nn.Parameter(torch.ones(3))]\no.add_param_group({'params': ps[2:]})\no.state[ps[0]]['momentum_buffer'] = kept\no.state[ps[1]]['momentum_buffer'] = torch.ones(2, 3)\no.state[ps[2]]['momentum_buffer'] = kept«.clone()→»",
        "state that a gradient is": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ngive_gradients(0)\no.step()\ndef before(n):\n    ps[0].grad = o.state[ps[0]]['momentum_buffer']«.clone()→»\n",
        "state of one parameter": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\n«→o.state[ps[1]]['momentum_buffer'] = torch.ones(2, 3)»",
        "state of a parameter that is gone": "torch.optim.Adam(ps, lr=0.5)\n«→o.state[others[0]]['step'] = torch.tensor(3.0)»",
        "method of the optimizer's own": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nown = o._init_group\n\n\ndef init_group(group, params, *more):\n    found = own(group, params, *more)\n    params.reverse()\n    return found\n\n\n«→o._init_group = init_group»",
        "method of the class": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nown = torch.optim.SGD._init_group\nundo = [lambda: setattr(torch.optim.SGD, '_init_group', own)]\n\n\ndef init_group(self, group, params, grads, buffers):\n    found = own(self, group, params, grads, buffers)\n    del params[0], grads[0], buffers[0]\n    return found\n\n\n«→torch.optim.SGD._init_group = init_group»",
        "function of the module": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nimport torch.optim.sgd as sgd\n\nown = sgd._single_tensor_sgd\nundo = [lambda: setattr(sgd, '_single_tensor_sgd', own)]\n\n\ndef single(params, grads, *more, **others):\n    own(params, [2 * each for each in grads], *more, **others)\n\n\n«→sgd._single_tensor_sgd = single»",
        "step of the class": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nown = torch.optim.SGD.step\nundo = [lambda: setattr(torch.optim.SGD, 'step', own)]\n\n\ndef twice(self, closure=None):\n    own(self)\n    return own(self)\n\n\n«→torch.optim.SGD.step = twice»",
        "user's class": "«torch.optim.SGD→type('SGD', (torch.optim.SGD,), {})»(ps, lr=0.5)",
    },
    "traced",
)
USED = changes(
    {
        "comment": "torch.optim.Adam(ps, lr=0.5)\n# «here→there»",
        "values of parameters": "torch.optim.Adam(ps, lr=0.5)\nps[0].data.fill_(«1→2»)",
        "values of gradients": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ndef before(n):\n    ps[0].grad.fill_(«1→2»)\n",
        "value of the rate's tensor": "torch.optim.AdamW(ps, lr=torch.tensor(«0.5→0.25»))",
        "state that was loaded": "torch.optim.Adam(ps, lr=0.5)\ngive_gradients(0)\nsaved = torch.optim.Adam(ps, lr=0.5)\nsaved.step()\n«→o.load_state_dict(saved.state_dict())»",
        "state that was loaded, momentum": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ngive_gradients(0)\nsaved = torch.optim.SGD(ps, lr=0.5, momentum=0.9)\nsaved.step()\n«→o.load_state_dict(saved.state_dict())»",
        "step that was taken": "torch.optim.Adam(ps, lr=0.5)\n«→give_gradients(0)\no.step()\n»",
        "step that was taken, momentum": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\n«→give_gradients(0)\no.step()\n»",
        "state that is loaded later": "torch.optim.Adam(ps, lr=0.5)\ngive_gradients(0)\nsaved = torch.optim.Adam(ps, lr=0.5)\nsaved.step()\n\n\ndef before(n):\n    if n == 1 and «False→True»:\n        o.load_state_dict(saved.state_dict())\n",
        "hook, which is traced": "torch.optim.SGD(ps, lr=0.5, momentum=0.9)\ndef doubles(self, args, kwargs):\n    torch._dynamo.graph_break()\n    for p in self.param_groups[0]['params']:\n        p.grad.mul_(2)\n\n\n«→o.register_step_pre_hook(doubles)»",
        "hook after the step, which is traced": "torch.optim.Adam(ps, lr=0.5)\ndef doubles(self, args, kwargs):\n    torch._dynamo.graph_break()\n    for p in self.param_groups[0]['params']:\n        p.data.mul_(2)\n\n\n«→o.register_step_post_hook(doubles)»",
    },
    "used",
)
UNFIT = {
    "user's class": of(
        "type('Mine', (torch.optim.SGD,), {'_init_group': lambda self, group, params, grads, buffers: "
        "[(params.append(p), grads.append(p.grad), buffers.append(None)) for p in group['params'][:1]] and False})(ps, lr=0.5)"
    ),
    "closure": of("torch.optim.SGD(ps, lr=0.5)")
    + "\n\ndef program():\n    return o.step(closure)\n\n\ndef closure():\n    return torch.ones(())\n",
}
