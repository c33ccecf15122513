"""Runs PTX, the assembly of NVIDIA's GPUs, on the CPU, and checks each access to memory."""
