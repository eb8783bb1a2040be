"""Dropout on a warpgroup's registers: which weights of a tile survive, as `core.dropout` has it.

Two threads hold the weights of a call of the generator, in each of two neighbouring squares of 16 rows and
columns. Each computes the call of one square, and then they trade words: a tile takes a call for 16 weights.
"""

from tilewise.core.dropout import KEY_A, KEY_B, LOW32, ROUND_A, ROUND_B, ROUNDS
from tilewise.gpu.hopper.common.compat import gl, gluon, unhoisted
from tilewise.gpu.hopper.common.layouts import accumulator_layout, along, call_layout

FACTOR_A, FACTOR_B = gl.constexpr(ROUND_A), gl.constexpr(ROUND_B)
STEP_A, STEP_B, LOW = gl.constexpr(KEY_A), gl.constexpr(KEY_B), gl.constexpr(LOW32)
NUM_ROUNDS = gl.constexpr(ROUNDS)


@gluon.constexpr_function
def _product_by(factor):
    return f"{{ .reg .b64 p; mul.wide.u32 p, $2, {factor}; mov.b64 {{$1, $0}}, p; }}"


@gluon.jit
def wide_product(x, FACTOR: gl.constexpr):
    """(high, low) words of a product of 32-bit integers. One instruction; as one of 64 bits it is two."""
    ASM: gl.constexpr = _product_by(FACTOR)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=(x.dtype, x.dtype), is_pure=True, pack=1)


@gluon.jit
def random_words(c0, c1, c2, c3):
    """Philox 4x32 with key 0: four words for each counter."""
    for i in gl.static_range(NUM_ROUNDS):
        high_a, low_a = wide_product(c0, FACTOR_A)
        high_b, low_b = wide_product(c2, FACTOR_B)
        c0 = high_b ^ c1 ^ (i * STEP_A & LOW)
        c2 = high_a ^ c3 ^ (i * STEP_B & LOW)
        c1, c3 = low_b, low_a
    return c0, c1, c2, c3


@gluon.jit
def load_seed(extras, cfg: gl.constexpr):
    """The two words of dropout's seed, if there is one, and its origin: query, key, head, heads."""
    low, high, query, key, head, heads = 0, 0, 0, 0, 0, 0
    if cfg.HAS_DROPOUT:
        seed = gl.load(extras.dropout_seed)
        low, high = gl.cast(seed & LOW, gl.uint32), gl.cast((seed >> 32) & LOW, gl.uint32)
        if cfg.HAS_ORIGIN:
            query, key = load_origin(extras.dropout_seed + 1)
            head, heads = load_origin(extras.dropout_seed + 3)
    return low, high, query, key, head, heads


@gluon.jit
def load_origin(pointer):
    return gl.cast(gl.load(pointer), gl.int32), gl.cast(gl.load(pointer + 1), gl.int32)


@gluon.jit
def survivors(
    row, column, batch, head, heads, seed, extras, N: gl.constexpr, HAS_KEY_ROWS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """[4, 8, N // 16, 8] words of a tile of 64 rows and N columns, of which `survives` takes a bit each.

    row, column: its first, multiples of 16. Rows are queries and columns keys; HAS_KEY_ROWS, the reverse.
    heads: of the call, or, if that is a part of a larger one, not used: `seed` is as `load_seed` has it.
    """
    if cfg.HAS_ORIGIN:
        sequence_head = seed[4] + batch * seed[5] + head
        if HAS_KEY_ROWS:
            row, column = row + seed[3], column + seed[2]
        else:
            row, column = row + seed[2], column + seed[3]
    else:
        sequence_head = batch * heads + head
    layout: gl.constexpr = call_layout(N)
    rows = row // 4 + gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = column // 4 + gl.arange(0, N // 4, gl.SliceLayout(0, layout))[None, :]
    none = ((rows ^ columns) & 0).to(gl.uint32)  # of the calls' shape
    low, high = none + seed[0], none + (seed[1] ^ gl.cast(sequence_head, gl.uint32))
    rows, columns = none + rows.to(gl.uint32), none + columns.to(gl.uint32)
    if HAS_KEY_ROWS:
        w0, w2, w1, w3 = random_words(rows, columns, low, high)
    else:
        w0, w1, w2, w3 = random_words(columns, rows, low, high)
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # [16, N // 4, 2, 2]: of an odd row, of an odd column
    # in bit 7 of each byte, whether that is at least the threshold
    sums = (words & 0x7F7F7F7F) + gl.cast(extras.dropout_addend, gl.uint32)
    words = ((sums | words) & gl.cast(extras.dropout_either, gl.uint32)) | (sums & words)
    words = gl.permute(words, (0, 2, 1, 3)).reshape([4, 8, N // 16, 8])
    tile = gl.full([64, N], 0.0, gl.float32, accumulator_layout(N)).reshape([4, 2, 8, N // 16, 2, 8])
    layout_of_tile: gl.constexpr = tile.type.layout
    return unhoisted(gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(4, layout_of_tile))))


@gluon.jit
def halves_of_squares(y):
    """(half of the rows, of the columns) of each weight of a tile y in its square, known to the compiler.

    The byte of a word that decides a weight is that of number 2 * (half of the queries) + (half of the keys).
    """
    layout: gl.constexpr = y.type.layout
    rows = gl.arange(0, 2, along(1, layout, 6))[None, :, None, None, None, None]
    columns = gl.arange(0, 2, along(4, layout, 6))[None, None, None, None, :, None]
    return rows, columns


@gluon.jit
def dropped(p, words):
    """16-bit weights [64 queries, N keys], 0 where they do not survive: two at a time, by signs of bytes."""
    y = p.reshape([4, 2, 8, p.shape[1] // 16, 2, 8])
    rows, columns = halves_of_squares(y)
    bytes_of_pair = 0xCC88 + 0x1111 * (2 * rows + columns)
    words = gl.expand_dims(gl.expand_dims(words, 1), 4)
    y = gl.inline_asm_elementwise(
        "{ .reg .b32 m; prmt.b32 m, $2, $3, $4; and.b32 $0, $1, m; }",
        "=r,r,r,r,r,r",
        [y, words, bytes_of_pair],
        dtype=p.dtype,
        is_pure=True,
        pack=2,
    )
    return gl.convert_layout(y.reshape(p.shape), p.type.layout, assert_trivial=True)


@gluon.jit
def marked(p, words):
    """Weights [64 keys, N queries], but negated where they do not survive."""
    y = p.reshape([4, 2, 8, p.shape[1] // 16, 2, 8])
    rows, columns = halves_of_squares(y)
    bit = 0x80 << (8 * (2 * columns + rows))
    words = gl.expand_dims(gl.expand_dims(words, 1), 4)
    y = gl.where((words & bit) != 0, y, -y)
    return gl.convert_layout(y.reshape(p.shape), p.type.layout, assert_trivial=True)
