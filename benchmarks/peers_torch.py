"""torch.amp.GradScaler on torch, with torch.optim.Adam.

What was chosen for fairness: Adam as torch gives it (`foreach` or a loop, which it chooses by device) and with
`fused=True`, which unscales within its own pass and is the best that torch has; gradients are set to None, not to zero.
"""

import torch

from peers_keras import EPSILON, LEARNING_RATE, LOSS_SCALE, make_data

REQUIRES = {"torch": ("torch",)}
# What goes behind the name, and the option of Adam.
KINDS = {"": {}, ", fused": {"fused": True}}


def device() -> torch.device:
    """Where Keras puts its variables."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def optimizer_steps(values, grads, peers: list[str]):
    """Returns `{name: step}` of the optimizer alone, without loss scaling among them.

    All work on the tensors `grads`, as Keras' variants do: what was restored before a step is then as warm in the
    caches for each of them.
    """
    if "torch" not in peers:
        return {}

    def make_step(scaled, options):
        params = [torch.nn.Parameter(torch.from_numpy(value).to(device())) for value in values]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer = torch.optim.Adam(params, 1e-3, eps=EPSILON, **options)
        if not scaled:
            return optimizer.step
        scaler = torch.amp.GradScaler(device().type, init_scale=LOSS_SCALE)
        # It makes its scale when it scales a first loss; here the gradients are scaled already.
        scaler.scale(torch.zeros((), device=device()))

        def step():
            scaler.step(optimizer)
            scaler.update()

        return step

    steps = {f"torch Adam{name}": make_step(False, options) for name, options in KINDS.items()}
    return steps | {f"GradScaler + torch Adam{name}": make_step(True, options) for name, options in KINDS.items()}


def training_steps(mode: str, sizes, peers: list[str]):
    """Returns `{name: step}` of whole training steps, each giving its loss."""
    del mode  # There is one.
    if "torch" not in peers:
        return {}
    weights, x, y = make_data(sizes)
    x, y = torch.from_numpy(x).to(device()), torch.from_numpy(y).long().to(device())

    def make_module():
        layers = []
        for kernel, bias in weights:
            layer = torch.nn.Linear(*kernel.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias))
            layers += [layer, torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1]).to(device())

    def make_step(options):
        module = make_module()
        optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE, eps=EPSILON, **options)
        scaler = torch.amp.GradScaler(device().type, init_scale=LOSS_SCALE)

        def step():
            optimizer.zero_grad(set_to_none=True)
            # Forward pass and loss, as torch advises: the backward pass follows the dtypes of the forward one.
            with torch.autocast(device().type, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(module(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        return step

    return {f"GradScaler + torch Adam{name}": make_step(options) for name, options in KINDS.items()}
