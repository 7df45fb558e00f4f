// Everything that knows torch's tensors, as one unit: reading torch's headers takes longer than
// compiling all of this. Operators have a header each; without this all of them would be read.
#define AT_PER_OPERATOR_HEADERS
#include "attention_ops.cpp"
#include "blockwise.cpp"
#include "dense.cpp"
#include "layers.cpp"
#include "memory.cpp"
#include "moments.cpp"
#include "recurrence_ops.cpp"
#include "step.cpp"
