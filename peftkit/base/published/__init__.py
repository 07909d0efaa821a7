"""Pre-quantised checkpoints (AWQ, GPTQ, FP8, ...), imported only for a base that is one."""
