"""LoRA adapters: their files, and their places in memory."""
