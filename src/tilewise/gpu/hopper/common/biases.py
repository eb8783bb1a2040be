"""What is added to scores, in the registers of a warpgroup and in units of log2."""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.layouts import along
from tilewise.gpu.hopper.common.softmax import LOG2_E


@gluon.jit
def load_slope(batch, head, extras, cfg: gl.constexpr):
    """The ALiBi slope of a head in units of log2, if there is one."""
    slope = 0.0
    if cfg.HAS_ALIBI:
        slope = gl.load(extras.slopes + batch * extras.slopes_stride + head).to(gl.float32) * LOG2_E
    return slope


@gluon.jit
def penalty(s, start, slope):
    """[64, N]: slope * |start + row - column|, which ALiBi takes from scores s.

    A thread has two rows, whose part is computed once, and columns that the compiler knows.
    """
    x = s.reshape([64, s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    rows = (start + gl.arange(0, 64, along(0, layout, 4)))[:, None, None, None]
    eights = 8 * gl.arange(0, x.shape[1], along(1, layout, 4))[None, :, None, None]
    firsts = 2 * gl.arange(0, 4, along(2, layout, 4))[None, None, :, None]
    columns = eights + gl.arange(0, 2, along(3, layout, 4))[None, None, None, :]
    distance = gl.abs((rows - firsts).to(gl.float32) * slope - columns.to(gl.float32) * slope)
    return gl.convert_layout(distance.reshape(s.shape), s.type.layout, assert_trivial=True)
