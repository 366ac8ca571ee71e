"""What routing costs a step of sampling beside one model, and what an ensemble takes of memory."""
