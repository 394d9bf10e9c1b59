"""How PyTorch sees a norm: three ways to compute it, chosen per call.

(a) Anything that looks inside operators (compiling, exporting, tracing, modes, functorch levels, forward mode,
    subclasses, tensors without memory) gets the reference: plain ATen, right under every transform.
(b) Where a gradient is needed, an autograd function runs the kernel and saves x and float32 row statistics. Its
    backward is a kernel too, unless the backward itself is to be differentiated: then it is the reference's.
(c) Otherwise the kernel runs directly.

``torch.library.custom_op`` is not used for this: forward mode through it returns zeros without an error, double
backward is wrong with a warning, functorch raises (torch 2.13), and its dispatch alone costs more than a small norm.
Only under ``use(batch_invariant=True)`` does a compiler meet registered operators (`opaque`), so that a row keeps the
kernel's bits; what they cannot do raises. `python benchmarks/launch.py` prints what the parts of a call cost here.
"""
