"""Claims about machines, by their datasheets: sizes, rates and what they make of attention."""

from __future__ import annotations

from tilewise.device import DATASHEET
from tilewise.lab.bench.cases import dense
from tilewise.lab.claims.arithmetic import A100, HALF, ONE_HEAD, counted
from tilewise.lab.claims.claim import FA2, FA3, TUTORIAL, Measure, Measured, Setting
from tilewise.lab.learn import io_model, roofline
from tilewise.lab.learn.counts import Shape
from tilewise.lab.learn.machines import KIB, L2_BYTES_PER_CLOCK, MACHINES, MIB, SPECIAL_PER_CLOCK

H100 = MACHINES["H100"]
TERA = 1e12


def _sheet(value: float, what: str, note: str = "") -> Measure:
    return lambda setting: Measured(value, what, note)


for _gpu, _flops in (("A100", 156), ("H100", 295)):
    _says = f"An {_gpu} needs {_flops} FLOPs for each byte to be busy."
    counted(f"balance-{_gpu.lower()}", _says, TUTORIAL, _flops, "FLOP/byte", "equal")(
        _sheet(MACHINES[_gpu].device.balance, "from the datasheet")
    )

_cores, _tiles, _registers = A100.cores, A100.fast_level, A100.level("registers")
_l2, _memory = A100.level("L2"), A100.memory
_clock = f"from the clock: {L2_BYTES_PER_CLOCK:,} bytes in each"
for _name, _says, _claimed, _unit, _kind, _value, _what, _why in (
    ("size-registers", "A multiprocessor of an A100 has 256 KB of registers.", 256, "KiB", "equal",
     _registers.bytes / KIB, _registers.source, ""),
    ("size-sram", "Tiles have 192 KB of on-chip memory in a multiprocessor of an A100.", 192, "KiB", "equal",
     _tiles.bytes / KIB, "what one block can have",
     "A part is kept for the L1 cache and the system."),
    ("size-sram-total", "Tiles have 20 MB of on-chip memory in an A100.", 20, "MB", "equal",
     _tiles.total_bytes / 1e6, f"what blocks can have in {_cores} multiprocessors",
     "A part is kept for the L1 cache and the system."),
    ("size-l2", "The L2 cache of an A100 has 40 MB.", 40, "MiB", "equal",
     _l2.total_bytes / MIB, "from the datasheet", ""),
    ("speed-sram", "On-chip memory of an A100 moves 19 TB/s.", 19, "TB/s", "at least",
     (_tiles.bytes_per_second or 0) / TERA, f"from the clock, {_cores} multiprocessors", ""),
    ("speed-l2", "The L2 cache of an A100 moves 5 TB/s.", 5, "TB/s", "equal",
     (_l2.bytes_per_second or 0) / TERA, _clock, "It is a limit. What programs reach is less."),
    ("sram-faster", "On-chip memory is 10 times faster than device memory.", 10, "×", "equal",
     (_tiles.bytes_per_second or 0) / A100.device.bytes_per_second, "from clock and datasheet",
     ""),
    ("sram-smaller", "On-chip memory is 400 times smaller than device memory.", 400, "×", "equal",
     _memory.bytes / _tiles.total_bytes,
     f"an A100: {_memory.bytes / 1e9:.0f} GB over the {_tiles.total_bytes / 1e6:.0f} MB that tiles can have",
     "The difference is ten times as large."),
):  # fmt: skip
    counted(_name, _says, TUTORIAL, _claimed, _unit, _kind, why=_why)(_sheet(_value, _what))

_each = f"{SPECIAL_PER_CLOCK} a clock in each multiprocessor"
_exp = A100.device.flops_per_second / A100.special_per_second
_adds = H100.device.flops_per_second / (2 * H100.vector_per_second)
for _name, _says, _source, _rate, _unit, _kind, _value, _what, _note, _why in (
    ("vector-a100", "FLOPs outside matrix products are 16 times dearer on an A100.", FA2, 16, "×", "equal",
     A100.device.flops_per_second / (2 * A100.vector_per_second),
     "datasheet: float16 products over float32 multiply-adds", f"{_exp:.0f}× for exponentials", ""),
    ("exp-a100", "An A100 computes 19.5 T exponentials a second.", TUTORIAL, 19.5, "T/s", "equal",
     A100.special_per_second / TERA, _each, "",
     "19.5 TFLOP/s are those of multiply-adds. Exponentials have units of their own."),
    ("exp-h100", "An H100 computes 4 T exponentials a second.", FA3, 4, "T/s", "equal",
     H100.special_per_second / TERA, _each, "", ""),
    ("vector-h100", "FLOPs outside matrix products are about 250 times dearer on an H100.", FA3, 250, "×",
     "at least", H100.device.flops_per_second / H100.special_per_second,
     f"float16 products over exponentials, {_each}", f"{_adds:.0f}× for multiply-adds", ""),
):  # fmt: skip
    counted(_name, _says, _source, _rate, _unit, _kind, why=_why)(_sheet(_value, _what, _note))


@counted("fp8-peak", "An H100 is twice as fast in FP8 as in FP16.", FA3, 2, "×", "equal")
def fp8_peak(setting: Setting) -> Measured:
    case = dense("forward", "float16", 128, 16, 1, 16384)
    (device,) = (device for device in DATASHEET if device.name == H100.name)
    slow, fast = (roofline.least(case, None, device, peer) for peer in ("", min(roofline.EIGHT_BIT)))
    return Measured(
        slow.times[roofline.MATMUL] / fast.times[roofline.MATMUL], "matrix products, from the datasheet"
    )


for _name, _kernels, _source, _teraflops, _gpu, _percent, _why in (
    ("share-fa1", "FlashAttention", FA2, 124, "A100", 40, ""),
    ("share-fa2", "FlashAttention-2", FA2, 230, "A100", 73, "It was cut off, not rounded."),
    ("share-fa2-h100", "FlashAttention-2", FA3, 370, "H100", 35, "By the datasheet it is a little more."),
    ("share-fa3", "FlashAttention-3", FA3, 740, "H100", 75, ""),
):
    _says = f"{_kernels}'s {_teraflops} TFLOP/s are {_percent}% of an {_gpu}'s peak."
    _peak = MACHINES[_gpu].device.flops_per_second / TERA
    counted(_name, _says, _source, _percent, "%", "equal", why=_why)(
        _sheet(100 * _teraflops / _peak, f"the same over the datasheet's {_peak:,.0f} TFLOP/s")
    )


@counted("softmax-intensity", "A softmax does about 1 FLOP for each byte.", TUTORIAL, 1, "FLOP/byte", "equal")
def softmax_intensity(setting: Setting) -> Measured:
    cost, pairs = io_model.standard(ONE_HEAD), ONE_HEAD.pairs
    flops = cost.vector_flops - pairs + cost.special_ops  # the scale is the first product's
    intensity = flops / (cost.reads["s"] + cost.writes["p"])
    return Measured(
        intensity,
        f"counted from the loop: maximum, subtraction, exp, sum and division, {8 * HALF} bits",
        f"an A100 needs {A100.device.balance / intensity:.0f} times as many to be busy",
    )


BALANCE = round(A100.device.balance)
BRIEF, MIDDLE = Shape(128, 128, 64), Shape(2048, 2048, 64)


@counted(
    "memory-bound",
    f"Above 1,024 tokens standard attention is bound by memory: at most {BALANCE} FLOPs a byte.",
    TUTORIAL, BALANCE, "FLOP/byte", "at most",
)  # fmt: skip
def memory_bound(setting: Setting) -> Measured:
    found, short = (roofline.memory_intensity(io_model.standard(s), A100) for s in (MIDDLE, BRIEF))
    size = f"{MIDDLE.seqlen_q:,} tokens, head size {MIDDLE.head_dim}, beside an A100's balance"
    return Measured(
        found, f"counted: {size}", f"{short:.0f} at {BRIEF.seqlen_q} tokens: short sequences are as well"
    )


@counted(
    "compute-bound", f"FlashAttention is bound by arithmetic: at least {BALANCE} FLOPs a byte.",
    TUTORIAL, BALANCE, "FLOP/byte",
)  # fmt: skip
def compute_bound(setting: Setting) -> Measured:
    cost = io_model.fa2(MIDDLE)
    size = f"{MIDDLE.seqlen_q:,} tokens, head size {MIDDLE.head_dim}, beside an A100's balance"
    note = f"{cost.intensity:.0f} for each byte that the L2 cache serves"
    return Measured(
        roofline.memory_intensity(cost, A100), f"counted: {size}, K and V stay in the L2 cache", note
    )
