"""What XLA says about the memory of a Keras train step on JAX."""

import jax


def temporary_bytes(model, x, y):
    """Returns the bytes of temporary buffers of the compiled train step, or `None` if XLA does not tell.

    Args:
        model: A built and compiled model.
        x, y: One batch, as `fit` would pass it.
    """
    # The state that Keras' JAX trainer passes from step to step, in its order.
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    step = jax.jit(model.train_step, donate_argnums=0)
    analysis = step.lower(state, (x, y)).compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
