"""The Triton kernels, installed as padam_ext.kernels; they need triton and torch only."""
