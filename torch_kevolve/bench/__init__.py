"""Bench: whole-product measurements, one row per case."""
