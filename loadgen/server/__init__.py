"""Servers that loadgen starts: planned, placed on GPUs, made ready and ended; the embedded one among them."""
