"""Models of KerasHub with random weights, small enough for a CPU, each with a batch to learn by heart."""

import keras
import keras_hub
import numpy as np

models = keras_hub.models
WORDS, LENGTH, ROWS = 64, 12, 8


def _random():
    return np.random.default_rng(7)


def _tokens(prefix="", rows=ROWS):
    ids = _random().integers(1, WORDS, (rows, LENGTH)).astype("int32")
    mask = np.ones((rows, LENGTH), "int32")
    mask[::2, LENGTH // 2 :] = 0
    return {f"{prefix}token_ids": ids, f"{prefix}padding_mask": mask}


def _images(size=32, channels=3, rows=ROWS):
    return _random().uniform(0, 1, (rows, size, size, channels)).astype("float32")


def _labels(*shape):
    return _random().integers(0, 2, shape).astype("int32")


def _text_sizes(**options):
    return {
        "vocabulary_size": WORDS,
        "num_layers": 2,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "dropout": 0.0,
        **options,
    }


def _grouped(**options):
    return _text_sizes(num_query_heads=4, num_key_value_heads=2, **options)


def _next_token(task, backbone):
    x = _tokens()
    return task(backbone, preprocessor=None), x, np.roll(x["token_ids"], -1, axis=1)


def _with_logits(backbone):
    logits = keras.layers.Dense(WORDS, name="logits")(backbone.output["decoder_sequence_output"])
    return keras.Model(backbone.input, logits)


def bert():
    x = _tokens() | {"segment_ids": np.zeros((ROWS, LENGTH), "int32")}
    backbone = models.BertBackbone(**_text_sizes(num_heads=4, max_sequence_length=LENGTH))
    return models.BertTextClassifier(backbone, num_classes=2, preprocessor=None), x, _labels(ROWS)


def gpt2():
    backbone = models.GPT2Backbone(**_text_sizes(num_heads=4, max_sequence_length=LENGTH))
    return _next_token(models.GPT2CausalLM, backbone)


def llama():
    return _next_token(models.LlamaCausalLM, models.LlamaBackbone(**_grouped()))


def gemma():
    return _next_token(models.GemmaCausalLM, models.GemmaBackbone(**_grouped(head_dim=8)))


def t5():
    backbone = models.T5Backbone(**_text_sizes(num_heads=4))
    x = _tokens("encoder_") | _tokens("decoder_")
    return _with_logits(backbone), x, np.roll(x["decoder_token_ids"], -1, axis=1)


def whisper():
    sizes = {"max_encoder_sequence_length": 2 * LENGTH, "max_decoder_sequence_length": LENGTH}
    backbone = models.WhisperBackbone(**_text_sizes(num_heads=4, num_mels=16, **sizes))
    sound = _random().normal(size=(ROWS, 2 * LENGTH, 16)).astype("float32")
    x = {"encoder_features": sound} | _tokens("decoder_")
    return _with_logits(backbone), x, np.roll(x["decoder_token_ids"], -1, axis=1)


def vit():
    backbone = models.ViTBackbone(
        image_shape=(32, 32, 3), patch_size=(8, 8), num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    )
    return models.ViTImageClassifier(backbone, num_classes=2, preprocessor=None), _images(), _labels(ROWS)


def resnet():
    backbone = models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )
    return models.ResNetImageClassifier(backbone, num_classes=2, preprocessor=None), _images(), _labels(ROWS)


def sam():
    size, width = 64, 8
    encoder = models.ViTDetBackbone(
        hidden_size=16,
        num_layers=2,
        intermediate_dim=32,
        num_heads=2,
        global_attention_layer_indices=[1],
        patch_size=16,
        num_output_channels=width,
        window_size=2,
        image_shape=(size, size, 3),
    )
    prompts = keras_hub.layers.SAMPromptEncoder(
        hidden_size=width, image_embedding_size=(4, 4), input_image_size=(size, size), mask_in_channels=4
    )
    decoder = keras_hub.layers.SAMMaskDecoder(
        num_layers=2,
        hidden_size=width,
        intermediate_dim=16,
        num_heads=2,
        embedding_dim=width,
        num_multimask_outputs=3,
        iou_head_depth=2,
        iou_head_hidden_dim=width,
    )
    backbone = models.SAMBackbone(image_encoder=encoder, prompt_encoder=prompts, mask_decoder=decoder)
    x = {
        "images": _images(size, rows=2),
        "points": _random().uniform(0, size, (2, 1, 2)).astype("float32"),
        "labels": np.ones((2, 1), "float32"),
        "boxes": _random().uniform(0, size, (2, 1, 2, 2)).astype("float32"),
        "masks": np.zeros((2, 0, size, size, 1), "float32"),
    }
    task = models.SAMImageSegmenter(backbone)
    model = keras.Model(task.input, task.output["masks"])
    return model, x, _random().normal(size=(2, 4, 16, 16)).astype("float32")


def stable_diffusion_transformer():
    # No public name of KerasHub; `StableDiffusion3Backbone` makes it here.
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    model = MMDiT(
        patch_size=2,
        hidden_dim=32,
        num_layers=2,
        num_heads=2,
        position_size=8,
        latent_shape=(8, 8, 4),
        context_shape=(LENGTH, 16),
        pooled_projection_shape=(16,),
    )
    random = _random()
    x = {
        "latent": random.normal(size=(ROWS, 8, 8, 4)),
        "context": random.normal(size=(ROWS, LENGTH, 16)),
        "pooled_projection": random.normal(size=(ROWS, 16)),
        "timestep": random.uniform(0, 1_000, (ROWS, 1)),
    }
    x = {name: value.astype("float32") for name, value in x.items()}
    return model, x, random.normal(size=(ROWS, 8, 8, 4)).astype("float32")


def stable_diffusion_vae():
    # No public name of KerasHub; `StableDiffusion3Backbone` makes it here.
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    filters = {"encoder_num_filters": [32, 32], "decoder_num_filters": [32, 32]}
    model = VAEBackbone(**filters, encoder_num_blocks=[1, 1], decoder_num_blocks=[1, 1], sampler_method="mode")
    x = _images(16, rows=2)
    return model, x, x


# By name: what makes the model, its inputs and its targets. Integer targets are classes of logits, others numbers.
MODELS = {
    "BERT": bert,
    "GPT-2": gpt2,
    "Llama": llama,
    "Gemma": gemma,
    "T5": t5,
    "Whisper": whisper,
    "ViT": vit,
    "ResNet": resnet,
    "SAM": sam,
    "Stable Diffusion 3 transformer": stable_diffusion_transformer,
    "Stable Diffusion 3 VAE": stable_diffusion_vae,
}


def loss_of(y):
    """Returns the loss for targets `y`."""
    if y.dtype == "int32":
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()
