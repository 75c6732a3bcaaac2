"""Memory layout of the arguments of native code: addresses and sizes, as int64 words.

A linear layer has LINEAR words; a decoder layer has LAYER words, the last of which are its four
linear layers. The model's words come first, then its head, then the layers.
"""

from __future__ import annotations

# The forms of a linear layer: float32; bfloat16 and int8 for dot-product instructions (2 and 4
# inputs each); bfloat16 and int8 that are widened to float32 and int16 when loaded; bfloat16 by
# bfloat16 inputs, widened, in AMX's order of summation; int8 and int4 with a scale for each group
# of inputs (grouped.py).
(
    FLOAT32,
    DOT_BFLOAT16,
    DOT_INT8,
    WIDENED_BFLOAT16,
    WIDENED_INT8,
    TILED_BFLOAT16,
    GROUPED_INT8,
    GROUPED_INT4,
) = range(8)

# Words of a linear layer.
FORM = 0
WEIGHT = 1
OUTPUTS = 2
INPUTS = 3
BIAS = 4  # or 0
K_BLOCK = 5  # inputs per partial sum, each added to the accumulated sum, as in oneDNN
SCALE = 6  # quantization scales, float32 per output
SUMS = 7  # minus the sum of the weights, int32 per output; 0 for inputs without a zero point
PANEL = 8  # panel width: WIDTH or a divisor of it
LINEAR = 9

# Words of a decoder layer.
ATTENTION_NORM = 0
MLP_NORM = 1
QUERY_NORM = 2  # or 0
KEY_NORM = 3
QKV = 4
OUT = QKV + LINEAR
GATE_UP = OUT + LINEAR
DOWN = GATE_UP + LINEAR
LAYER = DOWN + LINEAR

# Words of the model.
LAYERS = 0
HIDDEN = 1
HEADS = 2
KV_HEADS = 3
SIZE = 4  # of a head
INNER = 5  # of the MLP
CONSTANTS = 6  # float32: EPS of the norms, SCALING of attention
NORM = 7
HEAD = 8
FIRST_LAYER = HEAD + LINEAR
EPS, SCALING = 0, 1

# Words of one call. The first three are addresses of functions; OpenMP.run passes two of them.
THREAD = 0
THREADS = 1
BARRIER = 2
PLAN = 3
ROWS = 4
X = 5  # (rows, hidden), overwritten
COS = 6  # (rows, size)
SIN = 7
SEQUENCES = 8  # SEQUENCE words each
QKVS = 9  # scratch shared by all threads: (rows, outputs of QKV)
ATTENDED = 10  # (rows, heads, size)
GATED = 11  # (rows, inner)
LOGITS = 12  # (rows, vocabulary)
PRIVATE = 13  # scratch of the first thread
PRIVATE_BYTES = 14  # of scratch per thread
CLAIMED = 15  # a word per thread for each phase of each layer and for the head, initially 0
NUM_SEQUENCES = 16

PHASES = 5  # phases of a layer, separated by barriers

# Words of a sequence.
KEYS = 0  # (layers, keys and values, kv_heads, capacity, size)
CAPACITY = 1
LENGTH = 2  # positions before its first row
FIRST = 3  # its first row
COUNT = 4  # of its rows, which follow one another
SEQUENCE = 5
