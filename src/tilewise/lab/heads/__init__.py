"""What the heads of a model attend to: one picture of exact statistics, at any length.

    layers = [attention(..., return_aux=Aux(block_sum=128, entropy=True))[1] for each layer]
    Heads(layers, block=128)               # in a notebook, the picture
    Heads(layers, block=128).save("heads.png")

`tilewise heads` draws those of a small model that it trains.
"""

from tilewise.lab.heads.picture import Heads

__all__ = ["Heads"]
