"""What surrounds experts of latents: VAE, text encoder, tokenizer. Read strictly, told apart by content."""
