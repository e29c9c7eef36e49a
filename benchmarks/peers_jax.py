"""jmp and flax on JAX, both with optax.adam, as their documentation writes a step.

What was chosen for fairness: every step is one `jax.jit` with all of its state donated, weights, moments and loss
scale; a skipped update is selected by `where` over the whole state, jmp's `select_tree`, which both recommend.
"""

import jax
import jax.numpy as jnp

import loss_scale_overhead
from peers_keras import EPSILON, LEARNING_RATE, LOSS_SCALE, make_data

REQUIRES = {"jmp": ("jmp", "optax"), "flax": ("flax", "optax")}


def make_scale(peer: str):
    """Returns the dynamic loss scale of `peer`, its numbers as arrays of their own: they are donated."""
    if peer == "jmp":
        import jmp

        return jmp.DynamicLossScale(jnp.asarray(LOSS_SCALE, jnp.float32), counter=jnp.zeros((), jnp.int32))
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(scale=jnp.asarray(LOSS_SCALE, jnp.float32), fin_steps=jnp.zeros((), jnp.int32))


def value_and_grads(loss_scale, loss_fn, params, has_aux: bool = False):
    """Returns `(loss_scale, finite, loss, grads)` of either library, the loss and the gradients unscaled.

    With `has_aux`, as `jax.value_and_grad` has it, `loss_fn` returns a pair and `loss` is one.
    """
    if not hasattr(loss_scale, "adjust"):
        return loss_scale.value_and_grad(loss_fn, has_aux=has_aux)(params)
    import jmp

    def scaled_loss(params):
        loss, aux = loss_fn(params) if has_aux else (loss_fn(params), None)
        return loss_scale.scale(loss), aux

    (loss, aux), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    grads = loss_scale.unscale(grads)
    finite, loss = jmp.all_finite(grads), loss_scale.unscale(loss)
    return loss_scale.adjust(finite), finite, (loss, aux) if has_aux else loss, grads


def guarded_update(optimizer, finite, grads, params, opt_state):
    """Returns the weights and optax' state after the step, or as they were unless `finite`."""
    import optax

    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, opt_state))


def optimizer_steps(mode: str, params: int, peers: list[str]):
    """Returns `{name: step}` of the optimizer alone, optax.adam without loss scaling among them."""
    del mode  # There is one.
    if not {"jmp", "flax"} & set(peers):
        return {}
    import optax

    values, scaled_grads = loss_scale_overhead.make_values(params)
    optimizer = optax.adam(1e-3, eps=EPSILON)

    def bare(params, opt_state, loss_scale, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_scale

    def jmp_step(params, opt_state, loss_scale, scaled_grads):
        import jmp

        grads = loss_scale.unscale(scaled_grads)
        finite = jmp.all_finite(grads)
        params, opt_state = guarded_update(optimizer, finite, grads, params, opt_state)
        return params, opt_state, loss_scale.adjust(finite)

    def flax_step(params, opt_state, loss_scale, grads):
        # `DynamicScale` scales, differentiates and unscales in one call. The gradient of this loss is `grads`, and
        # the loss, which nobody reads, is not computed: what is left is what jmp does, and one product that XLA
        # fuses into it.
        def loss_fn(params):
            return sum(jnp.vdot(grad, param) for grad, param in zip(grads, params, strict=True))

        loss_scale, finite, _, grads = loss_scale.value_and_grad(loss_fn)(params)
        return *guarded_update(optimizer, finite, grads, params, opt_state), loss_scale

    def make_step(update, loss_scale, grads):
        weights = [jnp.array(value) for value in values]
        grads = [jnp.asarray(grad) for grad in grads]
        state = [weights, optimizer.init(weights), loss_scale]
        compiled = jax.jit(update, donate_argnums=(0, 1, 2))

        def step():
            state[:] = compiled(*state, grads)
            return state

        return step

    steps = {"optax.adam": make_step(bare, (), scaled_grads)}
    if "jmp" in peers:
        steps["jmp + optax.adam"] = make_step(jmp_step, make_scale("jmp"), scaled_grads)
    if "flax" in peers:
        grads = [grad / LOSS_SCALE for grad in scaled_grads]
        steps["flax + optax.adam"] = make_step(flax_step, make_scale("flax"), grads)
    return steps


def forward_functions(weights):
    """Returns `{peer: (params, logits(params, x))}`: a plain function under a jmp policy, a module of flax."""

    def jmp_forward():
        import jmp

        policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

        def logits(params, x):
            params, x = policy.cast_to_compute((params, x))
            for kernel, bias in params[:-1]:
                x = jax.nn.relu(x @ kernel + bias)
            kernel, bias = params[-1]
            return policy.cast_to_output(x @ kernel + bias)

        return [tuple(jnp.array(array) for array in pair) for pair in weights], logits

    def flax_forward():
        from flax import linen

        class Network(linen.Module):
            @linen.compact
            def __call__(self, x):
                for index, (_, bias) in enumerate(weights):
                    x = linen.Dense(len(bias), dtype=jnp.bfloat16)(x)
                    x = linen.relu(x) if index + 1 < len(weights) else x
                return x.astype(jnp.float32)

        params = {
            f"Dense_{index}": {"kernel": jnp.array(kernel), "bias": jnp.array(bias)}
            for index, (kernel, bias) in enumerate(weights)
        }
        return params, lambda params, x: Network().apply({"params": params}, x)

    return {"jmp": jmp_forward, "flax": flax_forward}


def training_steps(mode: str, sizes, peers: list[str]):
    """Returns `{name: step}` of whole training steps, each giving its loss."""
    del mode
    if not {"jmp", "flax"} & set(peers):
        return {}
    import optax

    weights, x, y = make_data(sizes)
    batch = jnp.asarray(x), jnp.asarray(y)
    optimizer = optax.adam(LEARNING_RATE, eps=EPSILON)

    def make_step(peer):
        params, logits = forward_functions(weights)[peer]()

        def update(params, opt_state, loss_scale, x, y):
            def loss_fn(params):
                return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

            loss_scale, finite, loss, grads = value_and_grads(loss_scale, loss_fn, params)
            return *guarded_update(optimizer, finite, grads, params, opt_state), loss_scale, loss

        state = [params, optimizer.init(params), make_scale(peer)]
        compiled = jax.jit(update, donate_argnums=(0, 1, 2))

        def step():
            *new_state, loss = compiled(*state, *batch)
            state[:] = new_state
            return float(loss)

        return step

    return {f"{peer} + optax.adam": make_step(peer) for peer in ("jmp", "flax") if peer in peers}
