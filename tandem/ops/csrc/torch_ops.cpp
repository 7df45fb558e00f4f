// Everything that knows torch's tensors, as one unit: reading torch's headers takes longer than
// compiling all of this.
#include "attention_ops.cpp"
#include "blockwise.cpp"
#include "dense.cpp"
#include "memory.cpp"
#include "step.cpp"
