"""Kernels in C, compiled for one model on the machine that runs them, where it has a compiler."""
