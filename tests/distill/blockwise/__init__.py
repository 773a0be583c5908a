"""Tests of block-wise distillation."""
