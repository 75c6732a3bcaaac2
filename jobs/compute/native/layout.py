"""Memory layout of the arguments of native code: addresses and sizes, as int64 words.

A linear layer has LINEAR words; a decoder layer has LAYER words, the last of which are its four
linear layers. The model's words come first, then its head, then the layers.
"""

from __future__ import annotations

# The forms of a linear layer: float32; bfloat16 and int8 whose products an instruction adds up,
# pairs and quads of inputs at a time; the same weights, widened to float32 and int16 when loaded.
FLOAT32, DOT_BFLOAT16, DOT_INT8, WIDENED_BFLOAT16, WIDENED_INT8 = range(5)

# Of a linear layer.
FORM = 0
WEIGHT = 1
OUTPUTS = 2
INPUTS = 3
BIAS = 4  # or 0
RUN = 5  # inputs that are summed up before that is added to the sum of those before, as oneDNN does
SCALE = 6  # of each output: what one unit of its weights is
SUMS = 7  # of each output: minus the sum of its weights; 0 where inputs have no zero point
PANEL = 8  # outputs whose weights lie side by side: WIDTH or a part of it
LINEAR = 9

# Of a layer.
ATTENTION_NORM = 0
MLP_NORM = 1
QUERY_NORM = 2  # or 0
KEY_NORM = 3
QKV = 4
OUT = QKV + LINEAR
GATE_UP = OUT + LINEAR
DOWN = GATE_UP + LINEAR
LAYER = DOWN + LINEAR

# Of the model.
LAYERS = 0
HIDDEN = 1
HEADS = 2
KV_HEADS = 3
SIZE = 4  # of a head
INNER = 5  # of the MLP
CONSTANTS = 6  # float32: eps of the norms, scale of attention
NORM = 7
HEAD = 8
FIRST_LAYER = HEAD + LINEAR
EPS, SCALING = 0, 1

# Of one call. The first two are addresses of functions, given by OpenMP.run.
THREAD = 0
THREADS = 1
BARRIER = 2  # another one
PLAN = 3
ROWS = 4
X = 5  # (rows, hidden): changed
COS = 6  # (rows, size)
SIN = 7
SEQUENCES = 8  # SEQUENCE words for each row
QKVS = 9  # scratch of all threads: (rows, outputs of QKV)
ATTENDED = 10  # (rows, heads, size)
GATED = 11  # (rows, inner)
LOGITS = 12  # (rows, vocabulary)
PRIVATE = 13  # scratch of the first thread
PRIVATE_BYTES = 14  # from each thread's to the next one's
CLAIMED = 15  # zeros: a word for each thread, of each of a layer's PHASES, and of the head's

PHASES = 5  # of a layer: between two of them threads wait for each other

# Of a sequence.
KEYS = 0  # (layers, keys and values, kv_heads, capacity, size)
CAPACITY = 1
LENGTH = 2  # positions before this one
SEQUENCE = 3
