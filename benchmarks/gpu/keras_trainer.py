"""Training with Keras on JAX: float32, stock mixed precision and mpkeras."""

import contextlib

import jax
import jax.numpy as jnp
import keras
from keras import ops

import mpkeras
from gpu import keras_models
from gpu.cases import Case, make_batches
from gpu.trainer import Trainer, matrix_flops_per_s
from gpu.variants import Variant

# In JAX's words. Its own default is TF32, where a GPU has it.
PRECISIONS = {False: "highest", True: "default"}


def make_trainer(case: Case, variant: Variant, options: dict) -> Trainer:
    """Returns the trainer of `variant`. `options["data_format"]` is that of the images."""
    keras.utils.set_random_seed(0)
    keras.config.set_image_data_format(options["data_format"])
    stock_policy = f"mixed_{variant.dtype}" if variant.library == "keras" and variant.dtype != "float32" else "float32"
    keras.config.set_dtype_policy(stock_policy)
    # Stock Keras raises for float16 attention on a CPU. mpkeras keeps these layers in float32 there by a rule.
    lacks_float16_attention = stock_policy == "mixed_float16" and jax.default_backend() == "cpu"
    model = keras_models.build(case, "float32" if lacks_float16_attention else None)
    if variant.library == "mpkeras":
        name = variant.policy or f"mixed_{variant.dtype}"
        model = mpkeras.apply_policy(model, mpkeras.Policy(name, **dict(variant.options)))
    return KerasTrainer(case, variant, model)


class KerasTrainer(Trainer):
    """Every variant gets what JAX does best: one compiled step, donated state, batches on the device, no reading."""

    def __init__(self, case: Case, variant: Variant, model):
        super().__init__([(jnp.asarray(_formatted(x)), jnp.asarray(y)) for x, y in make_batches(case)])
        self.model, self.variant = model, variant
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # SGD with momentum for the convolutions and Adam for the transformers, as they are usually trained.
        if case.family == "resnet":
            optimizer = keras.optimizers.SGD(case.learning_rate, momentum=0.9)
        else:
            optimizer = keras.optimizers.Adam(case.learning_rate, epsilon=1e-8)
        if variant.library == "mpkeras" and variant.scales:
            self._step = mpkeras.make_train_step(model, optimizer, loss_fn, jit_compile=True)
        else:
            if variant.scales:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            self._step = StockStep(model, optimizer, loss_fn)

    def step(self, x, y):
        with self._precision():
            return self._step(x, y)["loss"]

    def wait(self, loss):
        # The weights, too: the loss may be there before the update that belongs to it.
        is_stock = isinstance(self._step, StockStep)
        weights = self._step.state[0] if is_stock else [v.value for v in self.model.trainable_variables]
        jax.block_until_ready([loss, weights])

    def _precision(self):
        if self.variant.dtype != "float32":
            return contextlib.nullcontext()
        return jax.default_matmul_precision(PRECISIONS[self.variant.tf32])

    def describe(self) -> dict:
        """Returns what does not change while it trains."""
        x, y = self.batches[0]
        has_attention = x.ndim == 2
        with self._precision():
            is_flash = "fmha" in self._step.compiler_ir(x, y, optimized=False).lower()
            temporary_bytes = self._step.temporary_bytes(x, y)
        held = [variable.value for variable in (*self.model.variables, *self._step.optimizer.variables)]
        held = sum(value.nbytes for value in (*held, *(array for batch in self.batches for array in batch)))
        return {
            "params": sum(int(ops.size(variable)) for variable in self.model.trainable_variables),
            "attention": ("cuDNN flash" if is_flash else "XLA") if has_attention else None,
            "compiler_bytes": None if temporary_bytes is None else temporary_bytes + held,
            # What the allocator has taken of the device, some of which it may have in reserve.
            "held_bytes": most_bytes("peak_pool_bytes") or most_bytes("peak_bytes_in_use"),
        }

    def state(self) -> dict:
        """Returns where training has come to, and what it took."""
        optimizer = self._step.optimizer
        if isinstance(self._step, StockStep):
            self._step.write_back()
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return {
            "losses": self.losses,
            "loss_scale": float(ops.convert_to_numpy(optimizer.dynamic_scale)) if is_scaling else None,
            "peak_bytes": most_bytes("peak_bytes_in_use"),
        }


class StockStep:
    """The train step of Keras' guide to JAX: `stateless_call` and `stateless_apply` in one `jax.jit`.

    Not `train_on_batch` or `fit`, which read the logs; and as in the guide the variables get their values at the
    end, while mpkeras' step assigns them every time: the float32 and stock variants are as fast as they can be.
    """

    def __init__(self, model, optimizer, loss_fn):
        self.model, self.optimizer, self._loss_fn = model, optimizer, loss_fn
        optimizer.build(model.trainable_variables)
        self._variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        self.state = [[variable.value for variable in variables] for variables in self._variables]
        # Donated in the order in which they come out: every buffer is used again.
        self.function = jax.jit(self._pure_step, donate_argnums=0)

    def __call__(self, x, y) -> dict:
        self.state, loss = self.function(self.state, x, y)
        return {"loss": loss}

    def write_back(self):
        """Gives the variables the values that they have come to."""
        for variables, values in zip(self._variables, self.state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def compiler_ir(self, x, y, optimized: bool = True) -> str:
        lowered = self.function.lower(self.state, x, y)
        return lowered.compile().as_text() if optimized else lowered.as_text(dialect="hlo")

    def temporary_bytes(self, x, y) -> int | None:
        analysis = self.function.lower(self.state, x, y).compile().memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def _pure_step(self, state, x, y):
        trainable, non_trainable, optimizer_values = state

        def scaled_loss_of(trainable):
            y_pred, updated = self.model.stateless_call(trainable, non_trainable, x, training=True)
            loss = self._loss_fn(y, y_pred)
            mapping = list(zip(self.optimizer.variables, optimizer_values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return self.optimizer.scale_loss(loss), (loss, updated)

        (_, (loss, updated)), grads = jax.value_and_grad(scaled_loss_of, has_aux=True)(trainable)
        trainable, optimizer_values = self.optimizer.stateless_apply(optimizer_values, grads, trainable)
        return [trainable, updated, optimizer_values], loss


def most_bytes(name: str) -> int | None:
    """Returns a figure of JAX's allocator, by its name; `None` where JAX does not count."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def _formatted(x):
    is_image = x.ndim == 4
    return x.transpose(0, 3, 1, 2) if is_image and keras.config.image_data_format() == "channels_first" else x


def device() -> dict:
    """Returns what the device is; `"kind"` is `"gpu"` or `"cpu"`."""
    (first, *_) = jax.devices()
    return {"kind": first.platform, "name": first.device_kind}


def environment() -> dict:
    import harness

    return harness.environment()


def matrix_rates(size: int) -> dict:
    """Returns the measured FLOP/s of a large product in each dtype."""
    rates = {}
    for name, dtype, precision in (
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
        ("float32, TF32", "float32", PRECISIONS[True]),
        ("float32", "float32", PRECISIONS[False]),
    ):
        if name == "float32, TF32" and device()["kind"] != "gpu":
            rates[name] = None
            continue
        # Random numbers: of zeros a GPU multiplies faster than it ever does in training.
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (size, size), "float32").astype(dtype) for key in keys)
        with jax.default_matmul_precision(precision or "default"):
            product = jax.jit(jnp.matmul)
            rates[name] = matrix_flops_per_s(lambda a=a, b=b, f=product: f(a, b), jax.block_until_ready, size)
    return rates
