"""The user's side: datasets, samplers, what makes a batch of samples."""
