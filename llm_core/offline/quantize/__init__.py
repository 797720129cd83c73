"""Post-training quantisation: GPTQ, AWQ, RTN, INT8, FP8, and export to Hugging Face formats."""
