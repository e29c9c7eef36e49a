"""Programs as XLA prints them: what is counted, against numbers worked out by hand."""

import pytest

from mpkeras.tools.forecast.hlo import parse, read_program

# Knows no backend.
pytestmark = pytest.mark.backends("tensorflow")


def program(*lines, others=""):
    body = "\n  ".join(lines)
    return f"HloModule m, is_scheduled=true\n\n{others}\nENTRY %main (p: f32[2]) -> f32[2] {{\n  {body}\n}}\n"


def test_a_product():
    found = read_program(
        program(
            "%a = bf16[3,5]{1,0} parameter(0)",
            "%b = bf16[5,7]{1,0} parameter(1)",
            "ROOT %c = bf16[3,7]{1,0:T(8,128)(2,1)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        )
    )
    assert found.matrix_flops == {"bfloat16": 2 * 3 * 5 * 7}
    assert found.products == {"bfloat16": 1}
    assert (found.collectives, found.conditionals, found.host_transfers, found.loops_of_unknown_length) == ([], 0, 0, 0)


def test_a_product_of_a_library_and_what_comes_with_it():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}'
    found = read_program(
        program(
            "%a = f16[4,6]{1,0} parameter(0)",
            "%b = f16[4,8]{1,0} parameter(1)",
            "%c = (f16[6,8]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
            f'custom_call_target="__cublas$gemm", backend_config={config}',
        )
    )
    assert found.matrix_flops == {"float16": 2 * 6 * 8 * 4}


def test_float8_operands_count_as_float8_whatever_they_sum_in():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    found = read_program(
        program(
            "%a = f8e4m3fn[16,32]{1,0} parameter(0)",
            "%b = f8e5m2[16,32]{1,0} parameter(1)",
            "%s = f32[] parameter(2)",
            "%c = (bf16[16,16]{1,0}, s8[64]{0}) custom-call(%a, %b, %s, %s), "
            f'custom_call_target="__cublas$lt$matmul$f8", backend_config={config}',
        )
    )
    assert found.products == {"float8": 1} and found.matrix_flops == {"float8": 2 * 16 * 16 * 32}
    assert found.float8_call_flops == 2 * 16 * 16 * 32
    # Where no library is called for it, it is not sure.
    found = read_program(
        program(
            "%a = f8e4m3fn[16,32]{1,0} parameter(0)",
            "%b = f8e4m3fn[32,16]{1,0} parameter(1)",
            "ROOT %c = f32[16,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        )
    )
    assert found.products == {"float8": 1} and found.float8_call_flops == 0


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        ("algorithm=dot_bf16_bf16_f32", "bfloat16"),
        ("algorithm=dot_bf16_bf16_f32_x3", "float32"),
        ("algorithm=dot_tf32_tf32_f32", "float32"),
        ('backend_config={"precision_config":{"algorithm":"ALG_DOT_BF16_BF16_F32"}}', "bfloat16"),
        ('backend_config={"precision_config":{"algorithm":"ALG_UNSET"}}', "float32"),
    ],
)
def test_what_an_algorithm_rounds_its_operands_to_is_what_is_multiplied(algorithm, dtype):
    found = read_program(
        program(
            "%a = f32[3,5]{1,0} parameter(0)",
            "%b = f32[5,7]{1,0} parameter(1)",
            "ROOT %c = f32[3,7]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, " + algorithm,
        )
    )
    assert found.products == {dtype: 1}


# One axis of 5 inputs, a kernel of 3 with padding 1: the first and the last output meet 2 inputs, the others 3.
MET_IN_5 = 3 * 5 - 2
# With stride 2 the outputs are at 0, 2 and 4.
MET_WITH_STRIDE = 2 + 3 + 2


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        pytest.param(
            "%c = f32[2,5,5,6]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 2 * MET_IN_5**2 * 4 * 6,
            id="padded",
        ),
        pytest.param(
            "%c = f32[2,3,5,6]{3,2,1,0} convolution(%x, %k), "
            "window={size=3x3 stride=2x1 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 2 * MET_WITH_STRIDE * MET_IN_5 * 4 * 6,
            id="with a stride",
        ),
        pytest.param(
            "%c = (f32[2,5,5,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"',
            2 * 2 * MET_IN_5**2 * 4 * 6,
            id="cuDNN, forward",
        ),
        pytest.param(
            "%c = (f32[2,5,5,4]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"',
            2 * 2 * MET_IN_5**2 * 4 * 6,
            id="cuDNN, to the inputs",
        ),
        pytest.param(
            "%c = (f32[3,3,4,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"',
            2 * 2 * MET_IN_5**2 * 4 * 6,
            id="cuDNN, to the kernel",
        ),
        pytest.param(
            "%c = f32[2,5,5,4]{3,2,1,0} convolution(%x, %d), "
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, feature_group_count=4",
            2 * 2 * MET_IN_5**2 * 1 * 4,
            id="depthwise",
        ),
        pytest.param(
            # Zeros between the inputs: of 9 places 5 hold one, and a kernel of 1 meets those alone.
            "%c = f32[2,9,9,6]{3,2,1,0} convolution(%x, %one), "
            "window={size=1x1 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f",
            2 * 2 * 5 * 5 * 4 * 6,
            id="dilated inputs",
        ),
    ],
)
def test_convolutions(call, flops):
    found = read_program(
        program(
            "%x = f32[2,5,5,4]{3,2,1,0} parameter(0)",
            "%y = f32[2,5,5,6]{3,2,1,0} parameter(1)",
            "%k = f32[3,3,4,6]{3,2,1,0} parameter(2)",
            "%d = f32[3,3,1,4]{3,2,1,0} parameter(3)",
            "%one = f32[1,1,4,6]{3,2,1,0} parameter(4)",
            call,
        )
    )
    assert found.matrix_flops == {"float32": flops}


BODY = """\
%body (p: (s32[], f16[4,4])) -> (s32[], f16[4,4]) {
  %p = (s32[], f16[4,4]{1,0}) parameter(0)
  %m = f16[4,4]{1,0} get-tuple-element(%p), index=1
  %c = f16[4,4]{1,0} fusion(%m), kind=kOutput, calls=%fused
}

%fused (q: f16[4,4]) -> f16[4,4] {
  %q = f16[4,4]{1,0} parameter(0)
  ROOT %d = f16[4,4]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("known", "times", "loops_of_unknown_length"),
    [(', backend_config={"known_trip_count":{"n":"7"}}', 7, 0), ("", 1, 1)],
)
def test_what_is_in_a_loop_counts_as_often_as_it_runs(known, times, loops_of_unknown_length):
    loop = f"%w = (s32[], f16[4,4]{{1,0}}) while(%t), condition=%cond, body=%body{known}"
    found = read_program(program("%t = (s32[], f16[4,4]{1,0}) tuple()", loop, others=BODY))
    assert found.matrix_flops == {"float16": times * 2 * 4**3}
    assert found.products == {"float16": 1}
    assert found.loops_of_unknown_length == loops_of_unknown_length
    # Devices tell each other as often what is in it.
    sent = BODY.replace("dot(%q, %q)", "all-reduce(%q)")
    found = read_program(program("%t = (s32[], f16[4,4]{1,0}) tuple()", loop, others=sent))
    assert [part["bytes"] for part in found.collectives] == [times * 4 * 4 * 2]
    # An update that waits for its turn is a loop too, with nothing in it that is counted.
    found = read_program(
        program("%t = (s32[], f16[4,4]{1,0}) tuple()", loop, others=BODY.replace("dot(%q, %q)", "add(%q, %q)"))
    )
    assert found.loops_of_unknown_length == 0


def test_what_devices_tell_each_other():
    found = read_program(
        program(
            "%a = f16[8,4]{1,0} parameter(0)",
            "%r = f16[8,4]{1,0} all-reduce(%a), to_apply=%add",
            "%s = (f16[8,4]{1,0}, f32[2]{0}) all-reduce-start(%a, %b), to_apply=%add",
            "%d = (f16[8,4]{1,0}, f32[2]{0}) all-reduce-done(%s)",
            "%g = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%a), dimensions={0}",
        )
    )
    assert found.collectives == [
        {"kind": "all-gather", "dtype": "bfloat16", "bytes": 8 * 4 * 2, "tensors": {"": 8 * 4 * 2}},
        {"kind": "all-reduce", "dtype": "float16", "bytes": 2 * 8 * 4 * 2, "tensors": {"": 2 * 8 * 4 * 2}},
        {"kind": "all-reduce", "dtype": "float32", "bytes": 8, "tensors": {"": 8}},
    ]


JOINED = """
%joined (p.0: f32[3], p.1: f32[], p.2: f32[2]) -> f32[6] {
  %p.0 = f32[3]{0} parameter(0)
  %p.1 = f32[] parameter(1)
  %p.2 = f32[2]{0} parameter(2)
  ROOT %c = f32[6]{0} concatenate(%p.0, %p.1, %p.2), dimensions={0}
}
%two (q.0: f32[3]) -> (f32[3], f32[2]) {
  %q.0 = f32[3]{0} parameter(0)
  %r.0 = f32[3]{0} add(%q.0, %q.0), metadata={op_name="jit(f)/mpkeras_reduce(a/bias)/reduce_sum"}
  %r.1 = f32[2]{0} slice(%q.0), slice={[0:2]}, metadata={op_name="jit(f)/mpkeras_reduce(b/bias)/reduce_sum"}
  ROOT %t = (f32[3]{0}, f32[2]{0}) tuple(%r.0, %r.1)
}
"""


def test_the_weights_behind_what_is_sent_are_named():
    found = read_program(
        program(
            '%w = bf16[2,4]{1,0} parameter(0), metadata={op_name="state[0][1]"}',
            "%x = f32[3]{0} parameter(1)",
            '%n = bf16[2,4]{1,0} convert(%v), metadata={op_name="jit(f)/mpkeras_gather(c/kernel)/convert"}',
            "%n.1 = bf16[2,4]{1,0} bitcast(%n)",
            # Combined: the name that XLA puts on all of it is that of the first.
            "%g = (bf16[4,4]{1,0}, bf16[4,4]{1,0}) all-gather(%w, %n.1), dimensions={0}",
            "%f = (f32[3]{0}, f32[2]{0}) fusion(%x), kind=kLoop, calls=%two",
            "%f.0 = f32[3]{0} get-tuple-element(%f), index=0",
            "%f.1 = f32[2]{0} get-tuple-element(%f), index=1",
            "%s = f32[] constant(0)",
            "%j = f32[6]{0} fusion(%f.0, %s, %f.1), kind=kLoop, calls=%joined",
            "%r = f32[6]{0} all-reduce(%j), to_apply=%add",
            # Of activations, whatever weight they are made with.
            "%d = f32[3]{0} dot(%x, %w), lhs_contracting_dims={}",
            "%r.1 = f32[3]{0} all-reduce(%d), to_apply=%add",
            others=JOINED,
        ),
        weights=["z", "first/kernel"],
    )
    gathered, summed = found.collectives
    assert gathered["tensors"] == {"first/kernel": 32, "c/kernel": 32}
    assert summed["tensors"] == {"": 4 + 12, "a/bias": 12, "b/bias": 8}


LOOP = """
%body (p: (f32[3], f32[2])) -> (f32[3], f32[2]) {
  %p = (f32[3]{0}, f32[2]{0}) parameter(0)
  %q.0 = f32[3]{0} get-tuple-element(%p), index=0
  %q.1 = f32[2]{0} get-tuple-element(%p), index=1
  %r.1 = f32[2]{0} add(%q.1, %q.1), metadata={op_name="jit(f)/while/body/mpkeras_reduce(loop/bias)/add_any"}
  ROOT %t = (f32[3]{0}, f32[2]{0}) tuple(%q.0, %r.1)
}
"""


def test_what_is_summed_behind_a_loop_or_comes_from_a_library_is_named():
    kernel = "f32[3,1,1]{2,1,0}"
    target = 'custom_call_target="__cudnn$convBackwardFilter"'
    call = f"custom-call(%x, %y), {target}, window={{size=3}}, dim_labels=b0f_0io->b0f"
    name = 'metadata={op_name="jit(f)/mpkeras_reduce(near/kernel)/conv"}'
    found = read_program(
        program(
            "%x = f32[2,4,1]{2,1,0} parameter(0)",
            "%w = (f32[3]{0}, f32[2]{0}) while(%t), condition=%cond, body=%body",
            "%w.0 = f32[3]{0} get-tuple-element(%w), index=0",
            "%w.1 = f32[2]{0} get-tuple-element(%w), index=1",
            "%s.0 = f32[3]{0} all-reduce(%w.0), to_apply=%add",
            "%s.1 = f32[2]{0} all-reduce(%w.1), to_apply=%add",
            # A result and a workspace.
            "%y = f32[2,2,1]{2,1,0} parameter(1)",
            f"%c = ({kernel}, u8[16]{{0}}) {call}, {name}",
            f"%c.0 = {kernel} get-tuple-element(%c), index=0",
            f"%s.2 = {kernel} all-reduce(%c.0), to_apply=%add",
            others=LOOP,
        )
    )
    (summed,) = found.collectives
    assert summed["tensors"] == {"": 12, "loop/bias": 8, "near/kernel": 12}


@pytest.mark.parametrize(
    ("line", "conditionals", "transfers"),
    [
        ("%c = (f32[2]{0}) conditional(%p, %a, %a), true_computation=%x, false_computation=%y", 1, 0),
        ("%i = ((f32[2]{0}), token[]) infeed(%t)", 0, 1),
        ("%s = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=1, is_host_transfer=true", 0, 1),
        ("%s = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=1", 0, 0),
        ('%k = () custom-call(%a), custom_call_target="xla_ffi_python_gpu_callback"', 0, 1),
        ('%k = f32[2]{0} custom-call(%a), custom_call_target="__cudnn$softmax"', 0, 0),
        ("%h = f32[2]{0:S(5)} copy(%a)", 0, 1),
        ("%h = f32[2]{0:S(1)} copy(%a)", 0, 0),
    ],
)
def test_who_waits_for_whom(line, conditionals, transfers):
    found = read_program(program("%a = f32[2]{0} parameter(0)", line))
    assert (found.conditionals, found.host_transfers) == (conditionals, transfers)


def test_parse_keeps_the_order_and_the_operands():
    computations, entry = parse(program("%a = f32[2]{0} parameter(0)", "ROOT %b = f32[2]{0} add(%a, /*index=1*/%a)"))
    assert entry == "main"
    assert [(line.name, line.operation, line.operands) for line in computations["main"]] == [
        ("a", "parameter", []),
        ("b", "add", ["a", "a"]),
    ]


def test_a_text_that_is_no_program():
    with pytest.raises(ValueError, match="Expected the text of an HLO module. Received: 'nothing'"):
        read_program("nothing")
