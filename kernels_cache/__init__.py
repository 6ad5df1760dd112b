"""Seed kernels: data, read by torch_kevolve.store as its lowest, read-only tier."""
