"""A GPU that the tests simulate, in the host's memory.

`python -m tests.simulated_gpu -m tandem train ...` (or `-m pytest`, or a script) runs with
`torch.cuda.is_available()` true and one device: tensors on it are torch's own, computed by torch's
CPU kernels (`device.cpp`). Code for GPUs runs as it is, and what it gets wrong shows: operands on
two devices, a result that is read while a graph is recorded or where nothing may wait, memory that
is read before it is written (it holds NaN), tensors that Triton could not reach. Graphs are
recorded and replayed. With `TRITON_INTERPRET=1` our Triton kernels run in Triton's interpreter.

It is as slow as it sounds, and shows nothing of speed, of races between streams, of NCCL or of a
GPU's own rounding.
"""
