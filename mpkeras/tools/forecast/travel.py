"""Travel between devices in another dtype than the policy says."""

from mpkeras.seams import ConvertedLayer, ModelView, dtypes

_GATHER = "all-gather"


def travels_otherwise(model, travel, collectives: list, gathers_for_layers: bool = True) -> list:
    """Returns `[{"tensor", "kind", "dtype", "expected", "bytes"}]` of what a policy does not say.

    A weight that a layer in 16 bits reads is expected in `gather_dtype`, and its gradient in `reduce_dtype`; those of
    float32 layers are expected in float32. A layer in 16 bits may read a weight in float32, as LayerNormalization does
    its scale, and cast it itself or not: either dtype is as the layer says.

    Args:
        model: The model whose step was compiled.
        travel: The dtypes in which its policy says that weights and gradients travel: `ModelView.travel`.
        collectives: The collectives of the program, as `read_program` returns them.
        gathers_for_layers: Whether weights are gathered where layers read them. Where only the state of the optimizer
            is split, it is new weights that are gathered, in the dtype that they are stored in.
    """
    expected = {}
    for layer in ModelView(model).layers:
        is_small = layer.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES
        gathered = (travel.gather_dtype or layer.compute_dtype) if is_small else "float32"
        summed = travel.reduce_dtype if is_small else "float32"
        for variable in ConvertedLayer(layer).own_variables:
            read = ConvertedLayer(layer).dtype_read(variable)
            in_either = (gathered,) if read == layer.compute_dtype else (gathered, read)
            expected[variable.path] = in_either, summed
    otherwise = []
    for collective in collectives:
        kind, dtype = collective["kind"], collective["dtype"]
        if not travel.is_sum(kind) and not (gathers_for_layers and kind == _GATHER):
            continue
        for tensor, size in collective["tensors"].items():
            if tensor not in expected:
                continue
            gathered, summed = expected[tensor]
            said = (summed,) if travel.is_sum(kind) else gathered
            if dtype not in said:
                otherwise.append({"tensor": tensor, "kind": kind, "dtype": dtype, "expected": said[0], "bytes": size})
    return otherwise
