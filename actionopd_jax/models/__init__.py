"""The student: decoder, attention, log-probabilities, Hugging Face weights, embedded sampler."""
