"""The barrier protocol of the Hopper kernels, stated once.

A `Ring` is a circle of shared-memory tiles between one producer and some consumer partitions. Both sides
count their uses of the ring from 0; use `i` is slot `i % STAGES` in phase `p = i // STAGES`:

    producer                                consumer
    acquire(i)   waits until phase p - 1    wait(i)      waits until phase p has arrived: the tile may
                 is released by all                      be read
    ... fills the slot, which arrives ...   release(i)   this partition has read it for the last time

Each slot has two mbarriers. `full` flips when a phase's bytes have landed (or its writer arrives), `empty`
when every consumer has released it. A barrier's parity is that of its last finished phase; waiting for
the parity *before* the first phase passes at once, so a fresh ring is empty.
"""

from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon, load_tile, mbarrier


@aggregate
class Ring:
    """STAGES tiles between one producer and its consumers; the protocol is in the module's docstring."""

    tiles: gl.shared_memory_descriptor  # [STAGES * CHUNKS, *chunk]
    full: gl.shared_memory_descriptor  # [STAGES, 1] mbarriers
    empty: gl.shared_memory_descriptor  # [STAGES, 1] mbarriers
    STAGES: gl.constexpr
    CHUNKS: gl.constexpr  # of a tile, side by side along its last dimension

    @gluon.jit
    def chunk(self, use, chunk):
        """Shared memory of one chunk of a use's tile."""
        return self.tiles.index(use % self.STAGES * self.CHUNKS + chunk)

    @gluon.jit
    def parity(self, use):
        return (use // self.STAGES) & 1

    @gluon.jit
    def acquire(self, use):
        """Producer: wait until every consumer has released the slot's previous phase."""
        mbarrier.wait(self.empty.index(use % self.STAGES), self.parity(use) ^ 1)

    @gluon.jit
    def load(self, use, desc, coords, CHUNKS: gl.constexpr, MORE_BYTES: gl.constexpr = 0):
        """Producer: acquire the slot and start TMA copies of its first CHUNKS chunks.

        MORE_BYTES: of other copies that the producer then starts, for the barrier of the same slot.
        """
        WIDTH: gl.constexpr = desc.block_shape[-1]
        self.acquire(use)
        bar_full = self.full.index(use % self.STAGES)
        mbarrier.expect(bar_full, CHUNKS * desc.block_type.nbytes + MORE_BYTES)
        for chunk in gl.static_range(CHUNKS):
            chunk_coords = coords[:-1] + (chunk * WIDTH,)  # noqa: RUF005
            load_tile(desc, chunk_coords, bar_full, self.chunk(use, chunk))

    @gluon.jit
    def load_halves(self, use, desc, first, second, CHUNKS: gl.constexpr):
        """Producer: likewise of a slot that has CHUNKS chunks for each of two warpgroups."""
        WIDTH: gl.constexpr = desc.block_shape[-1]
        self.acquire(use)
        bar_full = self.full.index(use % self.STAGES)
        mbarrier.expect(bar_full, 2 * CHUNKS * desc.block_type.nbytes)
        for w in gl.static_range(2):
            for chunk in gl.static_range(CHUNKS):
                coords = first[:-1] if w == 0 else second[:-1]
                chunk_coords = coords + (chunk * WIDTH,)  # noqa: RUF005
                load_tile(desc, chunk_coords, bar_full, self.chunk(use, w * CHUNKS + chunk))

    @gluon.jit
    def publish(self, use):
        """Producer: the slot was filled by ordinary stores."""
        mbarrier.arrive(self.full.index(use % self.STAGES), count=1)

    @gluon.jit
    def wait(self, use):
        """Consumer: wait until the use's tile has arrived."""
        mbarrier.wait(self.full.index(use % self.STAGES), self.parity(use))

    @gluon.jit
    def release(self, use, when=True):
        """Consumer: this partition no longer reads the slot."""
        mbarrier.arrive(self.empty.index(use % self.STAGES), count=1, pred=when)


@gluon.jit
def make_ring(
    tiles, STAGES: gl.constexpr, CHUNKS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1
):  # fmt: skip
    """An empty ring over tiles [STAGES * CHUNKS, ...]; CONSUMERS partitions release each of its slots.

    PRODUCERS partitions publish each of them, where they fill it together.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PRODUCERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return Ring(tiles, full, empty, STAGES, CHUNKS)


@gluon.jit
def skip(ring, use, count):
    """Release tiles that other warpgroups need and this one does not; the use after them."""
    for _ in range(count):
        ring.wait(use)
        ring.release(use)
        use += 1
    return use


@gluon.jit
def make_tile_ring(desc, STAGES: gl.constexpr, CHUNKS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring whose tiles are CHUNKS of a TMA descriptor's blocks."""
    return make_ring(make_tiles(desc, STAGES * CHUNKS), STAGES, CHUNKS, CONSUMERS)


@gluon.jit
def make_tiles(desc, COUNT: gl.constexpr):
    """Shared memory of COUNT blocks of a TMA descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
