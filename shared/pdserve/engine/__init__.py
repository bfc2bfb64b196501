"""The model side of a worker: configuration, weights, attention, paged KV, sampling."""
