"""Where a graph is cut: runs that repeat, the ends of blocks, and that long graphs take no more than their length."""

import keras
import pytest
from keras import layers

from mpkeras.conversion.segments import Segments, _longest_run, ends_of_blocks

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", (0, 1, 0)),
        ("abc", (0, 1, 0)),
        ("aab", (0, 1, 2)),
        ("xababab", (1, 2, 6)),
        # The shortest period wins where two are as long.
        ("aaaa", (0, 1, 4)),
        # An "a" too many at the end is no part of a period of two; a run of the same length further on comes too late.
        ("ababaccdcd", (0, 2, 4)),
        # The longer run begins within the last period of the shorter one.
        ("aabaabaab", (0, 3, 9)),
        ("abcabcabab", (0, 3, 6)),
        # Periods of more than four are not looked for.
        ("abcdeabcde", (0, 1, 0)),
    ],
)
def test_the_longest_run(names, expected):
    assert _longest_run(list(names)) == expected


def stack(blocks, stem=True):
    x = inputs = keras.Input((4,))
    x = layers.Dense(4, "relu")(x) if stem else x
    for _ in range(blocks):
        x = layers.Add()([x, layers.Dense(4)(layers.Activation("tanh")(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


def test_ends_of_blocks():
    # Call 0 is the dense layer before them, and of three calls is each block.
    assert ends_of_blocks(stack(3)) == {0, 3, 6, 9}
    assert ends_of_blocks(stack(1)) == set()


def test_a_block_at_the_end_of_all_ends_no_part():
    """As in a backbone without a head, and in a chain whose head is a layer like the others."""
    whole = stack(3)
    assert ends_of_blocks(keras.Model(whole.input, whole.layers[-2].output)) == {0, 3, 6}
    x = inputs = keras.Input((4,))
    for _ in range(4):
        x = layers.Dense(4, "gelu")(x)
    assert ends_of_blocks(keras.Model(inputs, x)) == {0, 1, 2}


def test_ends_of_blocks_that_stand_on_the_inputs():
    assert ends_of_blocks(stack(2, stem=False)) == {2, 5}
    assert ends_of_blocks(stack(3, stem=False)) == {2, 5, 8}
    assert ends_of_blocks(stack(1, stem=False)) == set()
    # Attention and the dense layers behind it are one block, of calls 0 to 3: two products, each with its sum.
    x = inputs = keras.Input((6, 4))
    for _ in range(2):
        x = layers.Add()([x, layers.MultiHeadAttention(1, 4)(x, x)])
        x = layers.Add()([x, layers.Dense(4)(x)])
    assert ends_of_blocks(keras.Model(inputs, layers.Dense(1)(x))) == {3, 7}


def post_norm(blocks):
    """Attention, a product and a sum each with a normalization behind its sum: seven calls a block, behind call 0."""
    x = inputs = keras.Input((6, 4))
    x = layers.Dense(4)(x)
    for _ in range(blocks):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(1, 4)(x, x)]))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(4)(layers.Dense(8, "relu")(x))]))
    return keras.Model(inputs, layers.Dense(1)(x))


@pytest.mark.parametrize(("blocks", "ends"), [(1, set()), (2, {0, 7, 14}), (3, {0, 7, 14, 21})])
def test_the_last_block_ends_in_what_the_others_end_in(blocks, ends):
    model = post_norm(blocks)
    assert ends_of_blocks(model) == ends
    # Without a head the last one ends with the model, and no part.
    without_head = keras.Model(model.input, model.layers[-2].output)
    assert ends_of_blocks(without_head) == ends - {7 * blocks}


def test_what_no_block_ends_in_stands_behind_the_last():
    # Calls 1 to 4 are a block; a pooling is not the activation that ends the others.
    x = inputs = keras.Input((8, 4))
    x = layers.Dense(4)(x)
    for i in range(3):
        x = layers.Add()([x, layers.Dense(4)(layers.ReLU()(x))])
        x = layers.GlobalMaxPooling1D(keepdims=True)(x) if i == 2 else layers.ELU()(x)
    assert ends_of_blocks(keras.Model(inputs, layers.Dense(1)(x))) == {0, 4, 8}


def test_an_input_that_leads_past_the_blocks_does_not_hide_them():
    x = inputs = keras.Input((4,))
    x = layers.Dense(4)(x)
    for _ in range(2):
        x = layers.Add()([x, layers.Dense(4)(x)])
    assert ends_of_blocks(keras.Model(inputs, layers.Dense(1)(layers.Add()([x, inputs])))) == {0, 2, 4}


class Counting(list):
    """A list that counts what is read of it."""

    reads = 0

    def __getitem__(self, key):
        Counting.reads += 1
        return super().__getitem__(key)


def test_a_long_list_is_read_a_few_times_an_entry():
    names = Counting("ab" * 500 + "c" + "abb" * 300)
    assert _longest_run(names) == (0, 2, 1000)
    assert Counting.reads < 12 * len(names)


def test_what_leaves_a_segment_is_what_a_later_one_or_the_outputs_need():
    x = inputs = keras.Input((4,))
    first = layers.Dense(4)(x)
    second = layers.Dense(4)(first)
    third = layers.Dense(4)(second)
    graph = keras.Model(inputs, [layers.Add()([first, third]), second])
    segments = Segments(graph, {0, 1, 2}, lambda layer: [layer])
    # `first` crosses two segments; `second` is an output.
    made = [([id(t) for t in f.inputs], [id(t) for t in f.outputs]) for f, _ in segments._made()]
    assert made[0] == ([id(inputs)], [id(first)]) and made[1] == ([id(first)], [id(second)])
    assert made[2] == ([id(second)], [id(third)]) and set(made[3][0]) == {id(first), id(third)}
