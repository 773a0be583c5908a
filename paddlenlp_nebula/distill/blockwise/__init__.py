"""Block-wise distillation: each student block learns from one teacher block, on its own, after Pipe-BD (arXiv 2301.12443)."""
