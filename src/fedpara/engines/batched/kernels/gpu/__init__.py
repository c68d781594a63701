"""The kernels of the ops on a GPU, in Triton. Only an op that runs there imports them."""
