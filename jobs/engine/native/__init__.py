"""The decoder's work on rows as machine code of our own, for a CPU.

What writes alone waits for memory: a token takes as long as all weights take to be read. PyTorch
adds a hundred operations a layer to that, each of which costs microseconds, and products that read
slower than the memory gives. Here a token is one call: every thread reads its share of the weights
in one stream, and nothing is between two products but the arithmetic.

- `vectors`: what numba lacks; `sums`: the inner loops of the products.
- `rows`: the operations on a row, between the products; `passes`: the same on many rows. The
  decoder's own pass uses them, too, so that both compute the same bits.
- `linear`: the products; `step`: one token of a few sequences through all layers.
- `plan`: what that is told of a model; `steps` tells it.
- `team`: runs it on PyTorch's own threads; `shares`: what each of them does.
- `compiling`: when it is compiled, and where that is kept.
"""
