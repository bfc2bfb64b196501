"""A load harness: requests as they arrive in the field, sent to any LLM endpoint, and what their users would see."""
