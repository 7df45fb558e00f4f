"""Hugging Face modules in and out: loading, scalar head, LoRA, saving."""
